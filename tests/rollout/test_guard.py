"""Environments and rewards that answer nonsense."""

import asyncio
import math
import threading

import msgspec
import pytest

from contraflow import config
from contraflow.envs.base import Observation
from contraflow.errors import RewardError, TaskError
from contraflow.rewards.base import Said, Transcript
from contraflow.rewards.mix import Mix
from contraflow.rewards.registry import make_mix
from contraflow.rollout.guard import make_guard
from contraflow.types import StopReason, Task

TASK = Task(key="train/0", prompt="1+1=", reference="2")
RIGHT = Transcript((Said("model", "2"),), StopReason.STOP)


class Scripted:
    """An environment that answers what the test wants."""

    name = "scripted"

    def __init__(self, *, task=TASK, answer=None, bounded=False):
        self._task, self._answer, self.bounded = task, answer, bounded

    def task(self, split, index):
        return self._task

    def open(self, task):
        return self

    def step(self, action):
        return self._answer


def ask(env, question, *, mix=None):
    async def main():
        guard = make_guard(env, mix or make_mix({"correct": 1.0}), deadline_s=0.2, context_tokens=16)
        try:
            return await question(guard)
        finally:
            guard.close()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "step gave a NoneType, not an Observation"),
        ("64", "step gave a str, not an Observation"),
        (("64", True), "step gave a tuple, not an Observation"),
        (Observation(64, False), "an Observation of int and bool"),
        (Observation("64", None), "an Observation of str and NoneType"),
        (Observation("x" * 513, False), "step gave 513 characters; at most 512"),
    ],
)
@pytest.mark.parametrize("bounded", [True, False])
def test_nonsense_for_an_observation_is_named(answer, words, bounded):
    with pytest.raises(TaskError, match=words):
        ask(Scripted(answer=answer, bounded=bounded), lambda guard: guard.step(Scripted(answer=answer), "1"))


@pytest.mark.parametrize("bounded", [True, False])
def test_sense_passes(bounded):
    env = Scripted(answer=Observation("x" * 512, False), bounded=bounded)
    assert ask(env, lambda guard: guard.task("train", 0)) == TASK
    assert ask(env, lambda guard: guard.open(TASK)) is env
    assert ask(env, lambda guard: guard.step(env, "1")).text == "x" * 512
    assert ask(env, lambda guard: guard.score(TASK, RIGHT)) == (1.0, {"correct": 1.0})


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (None, "gave a NoneType, not a Task"),
        (msgspec.structs.replace(TASK, prompt=7), r"cannot travel: Expected `str`, got `int` - at `\$\.prompt`"),
        (msgspec.structs.replace(TASK, facts={"carries": 1}), "cannot travel"),
        (msgspec.structs.replace(TASK, facts={"self": object()}), "cannot travel"),
    ],
)
def test_nonsense_for_a_task_is_named(task, words):
    with pytest.raises(TaskError, match=words):
        ask(Scripted(task=task), lambda guard: guard.task("train", 0))


def test_a_session_without_a_step_is_named():
    env = Scripted()
    env.open = lambda task: 7
    with pytest.raises(TaskError, match=r"env\.open gave a int, which has no step"):
        ask(env, lambda guard: guard.open(TASK))


@pytest.mark.parametrize("bounded", [True, False])
def test_a_reward_that_is_not_finite_is_named(bounded):
    mix = Mix({"mine": lambda task, transcript: math.nan}, {"mine": 1.0}, bounded=bounded)
    with pytest.raises(RewardError, match="part 'mine' gave nan"):
        ask(Scripted(), lambda guard: guard.score(TASK, RIGHT), mix=mix)


def test_a_reward_that_hangs_is_given_up():
    release = threading.Event()
    mix = Mix({"mine": lambda task, transcript: release.wait()}, {"mine": 1.0}, bounded=False)

    async def question(guard):
        with pytest.raises(RewardError, match="the reward did not answer"):
            await guard.score(TASK, RIGHT)
        assert guard.lost_threads == 1
        release.set()

    ask(Scripted(), question, mix=mix)


def test_a_reward_that_runs_programs_has_its_own_time_and_ends_with_the_guard():
    mix = make_mix({"code": 1.0}, correct_part="code", sandbox=config.Sandbox(processes=2))
    task = msgspec.structs.replace(TASK, facts={"tests": '[{"assert": "assert f(2) == 4"}]'})
    slow = "import time; time.sleep(0.4)\ndef f(x): return x * x"  # longer than the environment's deadline

    async def question(guard):
        answers = ["def f(x): return x * x", "def f(x): return x", slow, "import os; os._exit(0)"]
        said = [Transcript((Said("model", answer),), StopReason.STOP) for answer in answers]
        scores = await asyncio.gather(*(guard.score(task, transcript) for transcript in said))
        return [reward for reward, _ in scores]

    assert ask(Scripted(), question, mix=mix) == [1.0, 0.0, 1.0, 0.0]
    with pytest.raises(RewardError, match="closed"):
        mix.score(task, RIGHT)
