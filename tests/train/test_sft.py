import json

import numpy as np
import pytest
import torch

from contraflow import config
from contraflow.errors import ConfigError, ModelError, TrainingError
from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.folder import load_folder
from contraflow.model.tokenizer import Tokenizer, build_char_tokenizer
from contraflow.rewards.base import Said
from contraflow.telemetry import Account
from contraflow.train.sft import HeldOut, encode, look_at, make_model, planned, sft
from contraflow.types import Sample

SHAPE = {
    "model_type": "qwen3_moe",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}


@pytest.fixture
def tokenizer(tmp_path):
    return build_char_tokenizer(tmp_path / "tokenizer", "0123456789+-=[]ab")


def fresh(tokenizer, seed=0):
    return new_decoder(ModelConfig.from_hf(SHAPE | {"vocab_size": tokenizer.size}), seed=seed, std=0.1)


def copies(tokenizer, count=20):
    """Say the letter again: easy enough for a model this small."""
    rng = np.random.default_rng(0)
    return [encode([Said("prompt", f"{x}="), Said("model", x)], tokenizer) for x in rng.choice(list("ab0123"), count)]


def account():
    return Account(lambda: 0.0)


def section(**fields):
    return config.Sft(**{"examples_per_update": 16, "updates": 60, "look_every": 10, "learning_rate": 1e-2} | fields)


def test_only_the_model_s_turns_are_learned_each_with_its_end_token(tokenizer):
    sample = encode([Said("prompt", "1+2="), Said("model", "[1+2]"), Said("env", "3="), Said("model", "3")], tokenizer)
    eos = tokenizer.eos
    assert sample.tokens.tolist() == [
        *tokenizer.encode("1+2=[1+2]"),
        eos,
        *tokenizer.encode("3=3"),
        eos,
    ]
    assert sample.mask.tolist() == [False] * 4 + [True] * 6 + [False] * 2 + [True] * 2


@pytest.mark.parametrize("example", [[], [Said("prompt", "1=")], [Said("model", "1")], [Said("prompt", "")]])
def test_an_example_with_nothing_to_learn_from_is_refused(tokenizer, example):
    with pytest.raises(ModelError, match="must begin with a prompt"):
        encode(example, tokenizer)


def greedy(decoder, prompt, count):
    """Plain greedy decoding: the whole sequence again for every token."""
    tokens = list(prompt)
    for _ in range(count):
        ids = torch.tensor(tokens)
        hidden = decoder(ids, torch.arange(len(tokens)), PackedPlan([0, len(tokens)]))
        tokens.append(int(decoder.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("budget", [1, 24, 1000])
def test_accuracy_is_that_of_greedy_decoding(tokenizer, budget):
    decoder = fresh(tokenizer, seed=3)
    rng = np.random.default_rng(1)
    samples = []
    for place in range(30):
        prompt = rng.integers(2, tokenizer.size, int(rng.integers(1, 6))).tolist()
        answer = greedy(decoder, prompt, 3)
        if place % 3:  # two of three are made wrong, at one place each
            answer[place % 3] = (answer[place % 3] + 1) % tokenizer.size
        length = len(prompt) + 3
        zeros = np.zeros(length, np.float32)
        samples.append(
            Sample(
                tokens=np.array(prompt + answer, np.int32),
                mask=np.arange(length) >= len(prompt),
                behaviour=zeros,
                advantages=zeros,
                versions=zeros.astype(np.int32),
            )
        )
    assert look_at(decoder, samples, budget).accuracy == pytest.approx(10 / 30)
    assert look_at(decoder, [], budget) == HeldOut(0.0, 0.0)


def test_it_learns_looks_and_stops_where_it_is_told_to(tokenizer):
    decoder, examples = fresh(tokenizer), copies(tokenizer)
    looks = list(sft(decoder, examples, section(stop_at_accuracy=0.9, updates=400), account(), held_out=examples))
    assert [look.update for look in looks] == [10 * (i + 1) for i in range(len(looks))]
    assert looks[-1].update < 400
    assert looks[-1].held_out.accuracy >= 0.9
    assert all(look.held_out.accuracy < 0.9 for look in looks[:-1])
    assert looks[-1].loss < looks[0].loss
    assert looks[0].tokens == 10 * 16 * 2


def test_the_loss_is_the_mean_cross_entropy_of_the_learned_tokens(tokenizer):
    decoder, examples = fresh(tokenizer), copies(tokenizer, count=16)
    total, count = 0.0, 0
    for sample in examples:
        ids = torch.from_numpy(sample.tokens.astype(np.int64))
        logits = decoder.logits(decoder(ids, torch.arange(len(ids)), PackedPlan([0, len(ids)])))
        at = np.flatnonzero(sample.mask)
        total += float(torch.nn.functional.cross_entropy(logits[at - 1], ids[at], reduction="sum").detach())
        count += len(at)
    assert look_at(decoder, examples, 20).loss == pytest.approx(total / count, rel=1e-5)
    (look,) = sft(decoder, examples, section(updates=1, balance_weight=0.3, tokens_per_batch=20), account())
    assert look.loss == pytest.approx(total / count, rel=1e-5)
    assert (look.held_out, look.tokens) == (None, count)


def test_a_seed_gives_the_same_bytes_and_another_one_does_not(tokenizer):
    ends = []
    for seed in (1, 1, 2):
        decoder = fresh(tokenizer)
        list(sft(decoder, copies(tokenizer), section(seed=seed, updates=5), account()))
        ends.append(torch.cat([p.detach().flatten() for p in decoder.parameters()]))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_every_example_is_seen_once_a_pass(tokenizer):
    # 20 examples, 16 an update, five updates: four passes, so each example exactly four times.
    decoder, examples = fresh(tokenizer), copies(tokenizer)
    (look,) = sft(decoder, examples, section(updates=5, look_every=5), account())
    assert look.tokens == 4 * sum(int(s.mask.sum()) for s in examples)


def test_nothing_to_learn_from_and_a_ruinous_rate_are_typed_errors(tokenizer):
    with pytest.raises(ConfigError, match="at least one example"):
        list(sft(fresh(tokenizer), [], section(), account()))
    with pytest.raises(TrainingError):
        list(sft(fresh(tokenizer), copies(tokenizer), section(learning_rate=1e38, clip_norm=1e38), account()))


def recipe(**sections):
    tree = {
        "model": {"config": SHAPE},
        "env": {"name": "arithmetic", "options": {"kinds": [{"digits_a": 1, "digits_b": 1}]}},
        "sft": {"examples": 64, "updates": 4, "look_every": 2, "held_out": 8, "examples_per_update": 16},
    }
    return config.SftRecipe.model_validate_json(json.dumps(tree | sections))


def test_a_recipe_makes_a_model_folder_that_others_read(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "made"
    lines = list(make_model(recipe(), folder, clock=lambda: 0.0))
    assert "64 examples, 8 held out" in lines[0]
    assert lines[1].startswith("update     2")
    assert "held-out" in lines[1]
    assert lines[-1] == f"wrote {folder}"
    decoder, tokenizer = load_folder(folder), Tokenizer.load(folder)
    assert decoder.config.vocab == tokenizer.size
    assert decoder.config.eos == (tokenizer.eos,)
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == tokenizer.eos
    assert torch.equal(AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight, decoder.embed)


def test_a_recipe_goes_on_from_a_folder_and_looks_at_other_tasks(tmp_path, model_folder):
    look = {"name": "arithmetic", "options": {"kinds": [{"digits_a": 2, "digits_b": 2}]}}
    folder = tmp_path / "made"
    lines = list(make_model(recipe(model={"folder": str(model_folder)}, look=look), folder, clock=lambda: 0.0))
    assert len(lines) == 4
    before, after = load_folder(model_folder), load_folder(folder)
    assert before.config.digest() == after.config.digest()
    assert not torch.equal(before.embed, after.embed)
    assert (folder / "tokenizer.json").read_bytes() == (model_folder / "tokenizer.json").read_bytes()


def test_a_recipe_that_does_not_fit_leaves_nothing_behind(tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "something").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="not empty"):
        list(make_model(recipe(), tmp_path / "used", clock=lambda: 0.0))
    with pytest.raises(ConfigError, match="arithmetics"):
        list(make_model(recipe(env={"name": "arithmetics"}), tmp_path / "new", clock=lambda: 0.0))
    with pytest.raises(ModelError, match="top_k = 9"):
        list(
            make_model(
                recipe(model={"config": SHAPE | {"num_experts_per_tok": 9}}), tmp_path / "new", clock=lambda: 0.0
            )
        )
    assert [path.name for path in tmp_path.iterdir()] == ["used"]


def test_passes_end_the_training_when_every_example_was_seen_so_often(tokenizer):
    # 20 examples, 16 an update, three passes: 60 examples in four updates, the last of them of 12.
    few = section(passes=3, updates=50, look_every=50)
    assert (planned(20, few), planned(20, section(updates=3, passes=3)), planned(20, section(updates=7))) == (4, 3, 7)
    examples = copies(tokenizer)
    (look,) = sft(fresh(tokenizer), examples, few, account())
    assert look.update == 4
    assert look.tokens == 3 * sum(int(s.mask.sum()) for s in examples)


def test_a_copy_is_kept_on_the_way_and_one_can_go_on_from_it(tmp_path):
    sizes = {"examples": 64, "updates": 5, "look_every": 1, "held_out": 0, "examples_per_update": 16, "save_every": 2}
    list(make_model(recipe(sft=sizes), tmp_path / "made", clock=lambda: 0.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "made.update-4"]
    further = recipe(model={"folder": str(tmp_path / "made.update-4")}, sft=sizes | {"save_every": 0})
    assert list(make_model(further, tmp_path / "further", clock=lambda: 0.0))[-1].startswith("wrote")
