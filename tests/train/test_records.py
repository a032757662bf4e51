import json
import math

import numpy as np
import pytest

from contraflow.errors import TrainingError
from contraflow.model.tokenizer import build_char_tokenizer
from contraflow.train.batcher import Credit, pack, samples
from contraflow.train.records import episode_records, write_aside


@pytest.fixture
def tokenizer(tmp_path):
    return build_char_tokenizer(tmp_path / "tokenizer")


def records(groups, tokenizer, keep):
    return list(episode_records(groups, tokenizer, step=4, keep=keep, credit=Credit("dr_grpo")))


def test_a_record_has_one_entry_per_token_and_survives_json(make_group, make_episode, tokenizer):
    group = make_group([make_episode(6, reward=1.0, versions=(2, 3)), make_episode(5, seed=1)], index=9, attempt=2)
    (record,) = records([group], tokenizer, 1)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert (record["step"], record["group"], record["attempt"]) == (4, 9, 2)
    assert (record["prompt"], record["reference"]) == ("1+1=", "2")
    first, second = record["episodes"]
    assert first["pieces"] == tokenizer.pieces(group.episodes[0].tokens.tolist())
    assert first["roles"] == ["prompt"] * 2 + ["model"] * 4
    assert first["advantages"] == [0.0, 0.0, 0.5, 0.5, 0.5, 0.5]
    assert first["versions"] == [-1, -1, 2, 2, 3, 3]
    assert first["logprobs"] == pytest.approx(group.episodes[0].logprobs.tolist(), abs=1e-5)
    assert (second["reward"], second["parts"], second["stop"], second["error"]) == (0.0, {"correct": 0.0}, "stop", "")


def test_numbers_that_are_not_finite_become_null(make_group, make_episode, tokenizer):
    group = make_group([make_episode(4, reward=math.nan), make_episode(4)])
    (record,) = records([group], tokenizer, 1)
    json.dumps(record, allow_nan=False)
    assert record["episodes"][0]["reward"] is None


@pytest.mark.parametrize(
    ("keep", "expected"), [(0, []), (1, [0]), (2, [0, 9]), (4, [0, 3, 6, 9]), (99, list(range(10)))]
)
def test_kept_groups_are_spread_over_the_take(make_group, make_episode, tokenizer, keep, expected):
    groups = [make_group([make_episode(3)], index=index) for index in range(10)]
    assert [record["group"] for record in records(groups, tokenizer, keep)] == expected
    assert records([], tokenizer, keep) == []


def test_a_refused_update_can_be_read_back_without_pickle(make_group, make_episode, choose, tmp_path):
    group = make_group([make_episode(6, reward=1.0), make_episode(4)])
    (made,) = samples([group], choose([group]), Credit("grpo"))
    batches = pack(made, tokens_per_batch=6, reduction="token")
    write_aside(tmp_path / "bad" / "one.npz", batches, "the loss is nan")
    with np.load(tmp_path / "bad" / "one.npz", allow_pickle=False) as stored:
        assert str(stored["fault"]) == "the loss is nan"
        for place, batch in enumerate(batches):
            assert stored[f"{place}.tokens"].tolist() == batch.tokens.tolist()
            assert stored[f"{place}.weights"].tolist() == batch.weights.tolist()
            assert f"{place}.routes" not in stored


def test_a_batch_that_cannot_be_written_aside_says_both_faults(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(TrainingError, match="the loss is nan; the batch could not be written"):
        write_aside(tmp_path / "file" / "one.npz", [], "the loss is nan")
