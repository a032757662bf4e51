"""The whole loop under kill -9 of any process, or all of them: nothing lost, nothing trained twice, nothing hangs."""

import os
import random
from pathlib import Path

import pytest

from tests.faults.chaos import Chaos, check_ledger

RECIPE = """
[run]
steps = 1000000
eval_every = 100
eval_tasks = 8
[model]
folder = "{model}"
[engine]
kind = "{engine}"
context_tokens = 64
kv_tokens = 8192
[rollout]
episodes = 4
workers = 2
[buffer]
groups_per_step = 4
no_signal = "keep"
[train]
checkpoint_every = 5
"""
KILLS = int(os.environ.get("CONTRAFLOW_CHAOS_KILLS", "200"))  # of the long form


def under_fire(model: Path, folder: Path, *, engine: str, seed: int, kills: int) -> Chaos:
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(model=model, engine=engine), encoding="utf-8")
    chaos = Chaos(recipe, folder / "run", random.Random(seed))
    chaos.run(kills)
    assert chaos.kills >= kills
    assert check_ledger(folder / "run", 4) > 0
    return chaos


@pytest.mark.timeout(400)
def test_a_run_that_is_killed_at_random_loses_nothing_and_trains_nothing_twice(tiny_moe: Path, tmp_path: Path) -> None:
    under_fire(tiny_moe, tmp_path, engine="scripted", seed=3, kills=3)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("engine", "share"), [("scripted", 0.9), ("native", 0.1)])
def test_hundreds_of_kills_lose_nothing_and_train_nothing_twice(
    tiny_moe: Path, tmp_path: Path, engine: str, share: float
) -> None:
    chaos = under_fire(tiny_moe, tmp_path, engine=engine, seed=11, kills=max(1, round(KILLS * share)))
    print({role: sorted(round(s, 1) for s in times) for role, times in chaos.recovered.items()}, chaos.resumes)
