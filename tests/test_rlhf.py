"""A run that is rewarded by a reward model: its process, its record, its death."""

from pathlib import Path

import pytest
import torch

from contraflow.buffer.accounts import accounts
from contraflow.errors import ConfigError, WorkerDied
from contraflow.loop import MAX_DEATHS, Loop
from contraflow.model.folder import copy_companions, load_folder
from contraflow.model.reward import RewardModel, Scale, digest_of, save_reward_model
from contraflow.model.value import ValueHead
from contraflow.rewards.scorer import Scorer
from contraflow.run import run_recipe
from contraflow.runtime.inline import InlineRuntime
from contraflow.system import SCORER
from contraflow.telemetry import read_journal
from tests.test_loop import STEPS, Silent, Ticks, recipe_of, run, steps_of, until_step


def reward_model(start: Path, folder: Path, seed: int = 0) -> Path:
    decoder = load_folder(start)
    head = ValueHead(decoder.config.dim)
    with torch.no_grad():
        head.weight.copy_(torch.randn(decoder.config.dim, generator=torch.Generator().manual_seed(seed)))
    save_reward_model(RewardModel(decoder, head), Scale(mean=0.0, std=1.0), folder)
    copy_companions(start, folder)
    return folder


def rewarded(start: Path, folder: Path, **sections):
    reward = {"parts": {"model": 1.0, "even": 0.0}, "model": {"folder": str(folder), "deadline_s": 10.0}}
    return recipe_of(start, reward=reward, **sections)


def test_a_run_is_rewarded_by_the_model_and_says_which_one_it_was(tiny_moe: Path, tmp_path: Path) -> None:
    folder = reward_model(tiny_moe, tmp_path / "reward_model")
    recipe = rewarded(tiny_moe, folder, rollout={"workers": 2}, run={"steps": 3})
    run_recipe(recipe, tmp_path / "run", resume=False, clock=Ticks(), view=Silent())
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 3
    for step in steps:
        assert step["reward"] == pytest.approx(step["parts"]["model"])
        assert -5 <= step["parts"]["model"] <= 5
        assert "even" in step["parts"]
    (said,) = [record for record in read_journal(tmp_path / "run/metrics.jsonl") if record["kind"] == "scorer"]
    assert (said["digest"], said["folder"], said["clip"]) == (digest_of(folder), str(folder), 5.0)


def test_a_reward_model_that_dies_is_started_again_and_no_episode_is_lost(tiny_moe: Path, tmp_path: Path) -> None:
    async def kill(loop: Loop) -> None:
        await until_step(loop, 3)
        assert isinstance(loop.system.runtime, InlineRuntime)
        loop.system.runtime.kill(SCORER)

    folder = reward_model(tiny_moe, tmp_path / "reward_model")
    outcome = run(rewarded(tiny_moe, folder), tmp_path / "run", meddle=kill)
    assert outcome.steps == STEPS
    assert accounts(tmp_path / "run").trained == STEPS * 4
    records = read_journal(tmp_path / "run/metrics.jsonl")
    assert [r["worker"] for r in records if r["kind"] == "death"] == [SCORER]
    assert [r["worker"] for r in records if r["kind"] == "replaced"] == [SCORER]
    assert sum(step["failed"] for step in steps_of(tmp_path / "run")) == 0


def test_another_reward_model_in_its_place_ends_the_run(tiny_moe: Path, tmp_path: Path) -> None:
    folder = reward_model(tiny_moe, tmp_path / "reward_model")

    async def change(loop: Loop) -> None:
        await until_step(loop, 2)
        reward_model(tiny_moe, folder, seed=1)
        assert isinstance(loop.system.runtime, InlineRuntime)
        loop.system.runtime.kill(SCORER)

    with pytest.raises(ConfigError, match="was changed while the run went on"):
        run(rewarded(tiny_moe, folder, run={"steps": 200}), tmp_path / "run", meddle=change)


def test_a_reward_model_that_dies_again_and_again_ends_the_run(tiny_moe: Path, tmp_path: Path) -> None:
    folder = reward_model(tiny_moe, tmp_path / "reward_model")

    async def kill(loop: Loop) -> None:
        runtime = loop.system.runtime
        assert isinstance(runtime, InlineRuntime)
        for died in range(1, MAX_DEATHS + 2):
            await until_step(loop, 5 * died)  # more steps than there are groups under way: the one before is back
            runtime.kill(SCORER)

    with pytest.raises(WorkerDied, match=SCORER):
        run(rewarded(tiny_moe, folder, run={"steps": 200}), tmp_path / "run", meddle=kill)


def test_the_process_answers_whoever_asks_by_its_reference(tiny_moe: Path, tmp_path: Path) -> None:
    folder = reward_model(tiny_moe, tmp_path / "reward_model")
    counted: list[int] = []

    async def look(loop: Loop) -> None:
        await until_step(loop, STEPS - 1)
        assert loop.system.scorer is not None
        report = await loop.system.scorer.call(10, Scorer.report)
        counted.append(report.scored)

    run(rewarded(tiny_moe, folder), tmp_path / "run", meddle=look)
    assert counted[0] > 0
