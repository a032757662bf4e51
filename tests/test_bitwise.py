"""Bitwise mode in whole runs: engine and trainer differ by nothing at all, and a replay by nothing in another batch."""

import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from contraflow.config import check_recipe
from contraflow.errors import ConfigError, ReplayError
from contraflow.model.builtin import model_folder
from contraflow.model.decoder import new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.folder import save_folder
from contraflow.model.invariant_cpu import built_invariant
from contraflow.model.tokenizer import Tokenizer, build_char_tokenizer
from contraflow.run import run_recipe
from contraflow.types import Episode
from contraflow.view.inspect import mismatch
from tests.test_loop import Silent, recipe_of, run, steps_of
from tests.test_replay import TURNS, again, alter, rows

BITWISE = {"bitwise": True, "on_refresh": "recompute"}
SMALL = {"kind": "native", "context_tokens": 48, "kv_tokens": 4096, "max_sequences": 32, "routes": True}
COMPILED = pytest.mark.skipif(isinstance(built_invariant(), str), reason=str(built_invariant()))


def bitwise(folder: Path, **sections: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of a run whose weights move fast, and that looks at every step where log-ratios come from."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"steps": 4, "eval_tasks": 0, "mismatch_every": 1, "mismatch_tokens": 300},
        "engine": SMALL | BITWISE,
        "train": {"warmup_updates": 0, "learning_rate": 1e-3},
        "rollout": {"temperature": 0.8},
        "loss": {"entropy_weight": 0.01},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    recipe = recipe_of(model_folder("builtin:tiny-moe"), **tree)
    if recipe.runtime.kind == "inline":
        run(recipe, folder)
    else:
        run_recipe(recipe, folder, resume=False, clock=time.monotonic, view=Silent())
    (folder / "recipe.toml").touch()
    return steps_of(folder)


def largest(steps: list[dict[str, Any]], cause: str) -> float:
    return max(step["mismatch"]["parts"][cause]["largest"] for step in steps)


@COMPILED
def test_a_synchronous_run_has_no_log_ratio_but_zero(tmp_path: Path) -> None:
    steps = bitwise(tmp_path, buffer={"max_age": 0})
    assert len(steps) == 4
    assert all(step["mismatch"]["tokens"] >= 60 for step in steps)
    assert [largest(steps, cause) for cause in ("numerics", "cache", "staleness", "all")] == [0.0] * 4
    assert all(sum(step["mismatch"]["routes_differ"]) == 0.0 < step["mismatch"]["routed"] for step in steps)
    assert all((step["ratio_mean"], step["ratio_effective"], step["behaviour_kl"]) == (1.0, 1.0, 0.0) for step in steps)
    told = next(line for line in mismatch(tmp_path).splitlines() if line.strip().startswith("numerics"))
    assert "0.00e+00" in told


@COMPILED
@pytest.mark.parametrize("runtime", ["inline", pytest.param("local", marks=pytest.mark.slow)])
def test_behind_refreshes_numerics_are_exactly_zero_and_all_is_staleness(tmp_path: Path, runtime: str) -> None:
    steps = bitwise(
        tmp_path, buffer={"max_age": 2}, rollout={"max_new_tokens": 24}, run={"steps": 6}, runtime={"kind": runtime}
    )
    assert (largest(steps, "numerics"), largest(steps, "cache")) == (0.0, 0.0)
    assert largest(steps, "staleness") > 1e-2
    assert all(sum(step["mismatch"]["routes_differ"]) == 0.0 < step["mismatch"]["routed"] for step in steps)


@COMPILED
@pytest.mark.slow
def test_without_it_the_same_run_is_not_exact(tmp_path: Path) -> None:
    """Or the tests above show nothing."""
    steps = bitwise(tmp_path, buffer={"max_age": 0}, engine={"bitwise": False})
    assert 0.0 < largest(steps, "numerics") < 1e-4


@pytest.fixture(scope="module")
def recorded(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with several turns and refreshes in the midst of answers, all its payloads kept."""
    place = tmp_path_factory.mktemp("recorded")
    env = place / "turns.py"
    env.write_text(TURNS)
    recipe = recipe_of(
        tiny_moe,
        run={"steps": 5, "eval_tasks": 0},
        train={"checkpoint_every": 2, "keep_checkpoints": 9},
        buffer={"keep_payloads": "all"},
        engine=SMALL | BITWISE,
        env={"name": f"{env}:ThreeTurns"},
        rollout={"max_new_tokens": 40, "max_turns": 3},
        reward={"parts": {f"{env}:letters": 1.0}},
    )
    run(recipe, place / "run")
    return place / "run"


@COMPILED
@pytest.mark.parametrize(
    "other",
    [
        {},
        {"max_sequences": 3, "block_tokens": 5, "prefill_tokens": 7},
        {"max_sequences": 256, "block_tokens": 32, "kv_tokens": 65536},
    ],
    ids=str,
)
def test_a_replay_samples_the_same_bits_in_another_batch(recorded: Path, tmp_path: Path, other: dict[str, int]) -> None:
    folder = Path(shutil.copytree(recorded, tmp_path / "run"))
    text = (folder / "recipe.toml").read_text(encoding="utf-8")
    engine = text.index("[engine]")
    for key, value in other.items():
        before = next(line for line in text[engine:].splitlines() if line.startswith(f"{key} = "))
        text = text[:engine] + text[engine:].replace(before, f"{key} = {value}", 1)
    (folder / "recipe.toml").write_text(text, encoding="utf-8")
    equal, told = again(folder, sample=True)
    same, kept, gone = rows(told)
    assert equal == 2
    assert same[0] == same[1] != "0"
    assert same[2] == same[3] != "0"
    assert "within 0.0e+00" in told[-3]
    assert kept[0] == "0"
    assert int(gone[0]) > 0


@COMPILED
def test_a_log_probability_that_is_off_by_one_bit_is_found(recorded: Path, tmp_path: Path) -> None:
    def off_by_a_bit(episode: Episode) -> Episode:
        logprobs, at = episode.logprobs.copy(), int(np.flatnonzero(episode.trained)[1])
        logprobs[at] = np.nextafter(logprobs[at], np.float32(-np.inf))
        return msgspec.structs.replace(episode, logprobs=logprobs)

    folder = Path(shutil.copytree(recorded, tmp_path / "run"))
    for later in (folder / "checkpoints" / "manifests").iterdir():
        if later.name != "line-0-step-2":
            later.unlink()  # they would find it too
    alter(folder, off_by_a_bit, oldest=2)
    with pytest.raises(ReplayError, match=r"log-probability of token .* \(log-probabilities may differ by 0\)"):
        again(folder, sample=True)


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"engine": {"on_refresh": "keep"}}, "on_refresh = 'keep', use 'recompute'"),
        ({"engine": {"kind": "vllm"}, "weights": {"refresh_deadline_s": 400.0}}, "kind = 'vllm', use 'native'"),
        ({"engine": {"kind": "scripted"}}, "kind = 'scripted', use 'native'"),
        ({"engine": {"compute": "bfloat16"}}, "compute = 'bfloat16', use 'float32'"),
        ({"engine": {"device": "cuda"}}, "device = 'cuda', use 'cpu'"),
        ({"engine": {"kernels": "off"}}, "kernels = 'off', use 'auto'"),
        ({"engine": {"parallel": {"dp": 2, "ep": 2}}, "runtime": {"kind": "local"}}, "parallel has 2 ranks, use one"),
        ({"train": {"parallel": {"dp": 2}}, "runtime": {"kind": "local"}}, "train.parallel has 2 ranks, use one"),
        ({"train": {"compute": "bfloat16"}}, "train.compute = 'bfloat16', use 'float32'"),
        ({"train": {"device": "cuda:1"}}, "train.device = 'cuda:1', use 'cpu'"),
        ({"train": {"compile": "blocks"}}, "train.compile = 'blocks', use 'none'"),
    ],
    ids=str,
)
def test_what_is_not_one_cpu_in_full_precision_is_refused_by_name(sections: dict[str, Any], named: str) -> None:
    tree = {"engine": {**BITWISE, **sections.get("engine", {})}, **{k: v for k, v in sections.items() if k != "engine"}}
    with pytest.raises(ConfigError) as caught:
        check_recipe(tree)
    assert f"bitwise = true with {named}" in str(caught.value)
    assert "bitwise = false" in str(caught.value)
    check_recipe({**tree, "engine": {**tree["engine"], "bitwise": False}})


def test_a_model_with_other_parts_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build_char_tokenizer(folder)
    config = ModelConfig(
        family="glm4_moe", vocab=Tokenizer.load(folder).size, dim=16, layers=2, heads=2, kv_heads=1, head_dim=8,
        ffn=16, experts=4, top_k=2, expert_ffn=8, dense_layers=(0,), shared_experts=1, context=64,
    )  # fmt: skip
    save_folder(new_decoder(config, seed=0), folder)
    with pytest.raises(ConfigError, match=r"engine\.bitwise = true with a glm4_moe model"):
        run(recipe_of(folder, engine=SMALL | BITWISE), tmp_path / "run")
    assert not (tmp_path / "run").exists()
