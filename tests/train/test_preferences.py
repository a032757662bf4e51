import itertools
import math
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from contraflow.config import Preferences
from contraflow.envs.registry import make_env
from contraflow.errors import ConfigError, ModelError
from contraflow.model.tokenizer import build_char_tokenizer
from contraflow.rewards.base import Said, Transcript
from contraflow.rewards.rules import even, even_once
from contraflow.train.preferences import (
    Preference,
    encode_pairs,
    make_preferences,
    read_preferences,
    write_preferences,
)
from contraflow.types import StopReason, Task

TASK = Task(key="train/0", prompt="1+1=", reference="2")
ENV = make_env("arithmetic", {})


def made(count, seed=0, split="train", **fields):
    return list(itertools.islice(make_preferences(Preferences(**fields), ENV, seed, split=split), count))


def said(answer):
    return Transcript((Said("prompt", TASK.prompt), Said("model", answer)), StopReason.STOP)


def test_a_seed_always_makes_the_same_pairs_and_another_one_others():
    assert made(50) == made(50)
    assert made(50) != made(50, seed=1)
    assert made(50) != made(50, split="test")


def test_pairs_are_of_the_lengths_and_characters_asked_for_and_the_rule_tells_them_apart():
    for row in made(200, characters="0123", shortest=2, longest=4):
        assert row.gold is not None
        assert row.gold[0] != row.gold[1]
        for answer in (row.chosen, row.rejected):
            assert 2 <= len(answer) <= 4
            assert set(answer) <= set("0123")


@given(st.text("0123456789ab", min_size=2, max_size=12), st.integers(0, 2**32))
def test_answers_drawn_without_repeats_have_none(characters, seed):
    kinds = len(set(characters))
    assume(kinds > 1)
    for row in made(5, seed, characters=characters, longest=kinds, repeats=False):
        for answer in (row.chosen, row.rejected):
            assert len(set(answer)) == len(answer) <= kinds
            assert set(answer) <= set(characters)


def test_pairs_without_repeats_do_not_tell_the_rule_that_counts_once_from_the_one_that_counts_all():
    rows = made(300, gold="even_once", repeats=False, temperature=0.0)
    answers = [answer for row in rows for answer in (row.chosen, row.rejected)]
    for answer in answers:
        assert even_once(TASK, said(answer)) == pytest.approx(even(TASK, said(answer)))
    repeating = [answer for row in made(300) for answer in (row.chosen, row.rejected)]
    assert any(even_once(TASK, said(answer)) < even(TASK, said(answer)) for answer in repeating)


def test_more_characters_than_there_are_different_ones_are_refused():
    with pytest.raises(ValueError, match="repeats = false with longest = 6: characters has 2 different ones"):
        Preferences(characters="0101", repeats=False)


def test_without_heat_the_better_one_is_always_chosen():
    assert all(row.gold[0] > row.gold[1] for row in made(200, temperature=0.0))


def test_choices_are_as_noisy_as_bradley_and_terry_say():
    rows = made(4000, temperature=0.2)
    wrong = sum(row.gold[0] < row.gold[1] for row in rows)
    chances = [1 / (1 + math.exp(abs(row.gold[0] - row.gold[1]) / 0.2)) for row in rows]
    spread = math.sqrt(sum(p * (1 - p) for p in chances))
    assert abs(wrong - sum(chances)) < 4 * spread


def test_margins_are_the_distance_of_the_golden_rewards():
    assert all(row.margin == abs(row.gold[0] - row.gold[1]) for row in made(20, margins=True))
    assert all(row.margin == 0 for row in made(20))


def test_a_rule_that_tells_nothing_apart_is_refused(tmp_path):
    (tmp_path / "flat.py").write_text("def flat(task, transcript):\n    return 1.0\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="gave 1 for 1000 answers"):
        made(1, gold=f"{tmp_path}/flat.py:flat")


def test_rows_come_back_as_they_were_written(tmp_path):
    rows = made(20)
    assert write_preferences(rows, tmp_path / "pairs.jsonl") == 20
    assert list(read_preferences(tmp_path / "pairs.jsonl", most=100)) == rows
    assert list(read_preferences(tmp_path / "pairs.jsonl", most=3)) == rows[:3]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2"),
        ('{"prompt": "a", "chosen": "b"}', "line 2.*rejected"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c", "margin": NaN}', "line 2"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c", "margin": -1}', "line 2.*margin = -1"),
        ('{"prompt": "a", "chosen": " ", "rejected": "c"}', "line 2.*'chosen' is empty"),
        ('{"prompt": "", "chosen": "b", "rejected": "c"}', "line 2.*'prompt' is empty"),
    ],
)
def test_a_broken_row_is_refused_by_its_line(tmp_path, line, said):
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        list(read_preferences(file, most=10))


def test_a_file_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_preferences(Path("nowhere.jsonl"), most=1))


def test_equal_answers_and_long_ones_are_left_out_and_counted(tmp_path):
    tokenizer = build_char_tokenizer(tmp_path, "0123456789+=")
    rows = [
        Preference(prompt="1+1=", chosen="2", rejected="3", margin=0.5),
        Preference(prompt="1+1=", chosen="2", rejected=" 2"),
        Preference(prompt="1+1=", chosen="2", rejected="3" * 50),
    ]
    found = encode_pairs(rows, Preferences(max_tokens=20), tokenizer)
    assert (len(found.pairs), found.same, found.long) == (1, 1, 1)
    assert found.told() == "1 with two equal answers left out, 1 too long left out"
    assert found.pairs[0].margin == 0.0
    assert found.pairs[0].chosen == [*tokenizer.encode("1+1=2"), tokenizer.eos]
    assert encode_pairs(rows[:1], Preferences(margins=True), tokenizer).pairs[0].margin == 0.5


def test_a_pair_that_the_tokenizer_cannot_write_is_named(tmp_path):
    tokenizer = build_char_tokenizer(tmp_path, "0123456789+=")
    with pytest.raises(ModelError, match="preference 1"):
        encode_pairs([Preference(prompt="1=", chosen="x", rejected="3")], Preferences(), tokenizer)
