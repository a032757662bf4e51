"""Evaluation inside a run, native engine, inline: it is of one version, and training does not notice it."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from contraflow.config import Recipe, check_recipe
from contraflow.errors import ConfigError
from contraflow.telemetry import read_journal
from tests.test_loop import run

STEPS = 4


def recipe_of(model: Path, max_age: int = 0, **keys: Any) -> Recipe:
    return check_recipe(
        {
            "run": {"steps": STEPS, "eval_every": 1, "eval_tasks": 6, "stall_s": 20.0, "keep_episodes": 9} | keys,
            "model": {"folder": str(model)},
            "engine": {"context_tokens": 32, "kv_tokens": 1024, "max_sequences": 24},
            "rollout": {"episodes": 4, "concurrency": 6},
            "buffer": {"groups_per_step": 4, "no_signal": "keep", "max_age": max_age},
            "train": {"checkpoint_every": 100, "learning_rate": 1e-2, "warmup_updates": 1},
            "runtime": {"kind": "inline"},
        }
    )


def test_training_is_the_same_bit_for_bit_with_and_without_evaluation(tiny_moe: Path, tmp_path: Path) -> None:
    """Of a synchronous run: in an asynchronous one, which version samples a token is a matter of time."""
    ends = []
    for name, keys in {"without": {"eval_tasks": 0}, "with": {"eval_samples": 3, "eval_temperature": 0.7}}.items():
        outcome = run(recipe_of(tiny_moe, **keys), tmp_path / name)
        episodes = [
            {key: value for key, value in record.items() if key != "at"}
            for record in read_journal(tmp_path / name / "episodes.jsonl")
        ]
        ends.append((load_file(Path(outcome.model) / "model.safetensors"), episodes))
    (weights, episodes), (weights_too, episodes_too) = ends
    assert episodes == episodes_too
    assert len(episodes) >= STEPS * 4
    assert {name for name in weights if not weights[name].equal(weights_too[name])} == set()


@pytest.mark.parametrize("max_age", [0, 2])
def test_every_look_is_of_the_version_it_names_and_tells_intervals(
    tiny_moe: Path, tmp_path: Path, max_age: int
) -> None:
    run(recipe_of(tiny_moe, max_age, eval_samples=2, eval_temperature=1.0), tmp_path)
    looks = [record for record in read_journal(tmp_path / "metrics.jsonl") if record["kind"] == "eval"]
    versions = [look["version"]["n"] for look in looks]
    assert versions == sorted(versions)
    assert versions[-1] == STEPS
    for look in looks:
        assert (look["count"], look["samples"], look["temperature"]) == (6, 2, 1.0)
        assert set(look["passed"]) == {"1", "2"}
        assert set(look["intervals"]) == {"pass@1", "pass@2", "reward", "correct"}
        low, high = look["intervals"]["pass@2"]
        assert low <= look["passed"]["2"] <= high


def test_several_greedy_answers_are_refused(tiny_moe: Path) -> None:
    with pytest.raises(ConfigError, match="all the same"):
        recipe_of(tiny_moe, eval_samples=2)
