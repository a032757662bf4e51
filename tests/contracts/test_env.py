"""What every environment promises: pure tasks without end, splits that never meet, sessions that share nothing."""

import inspect
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contraflow.envs.base import Observation
from contraflow.envs.registry import ENVS, make_env
from contraflow.types import Task

CASES = {
    "arithmetic": {},
    "arithmetic, one digit": {"kinds": [{"digits_a": 1, "digits_b": 1}], "test_share": 0.3},
    "arithmetic, mixed": {
        "kinds": [{"op": op, "digits_a": a, "digits_b": b} for op in "+-*" for a in (1, 2) for b in (1, 3)]
    },
    "calculator": {},
    "calculator, small": {"kinds": [{"operands": 2, "digits": 1, "ops": ["+", "*"]}], "test_share": 0.3, "seed": 1},
    "harness": {"tasks": {"name": "calculator", "options": {}}, "reward": "recipe"},
    "reasoning_gym": {"datasets": [{"name": "chain_sum"}, {"name": "word_sorting", "weight": 0.5}]},
    "verifiers": {"taskset": "tiny_sums", "options": {"most": 40}},
}
TASKSETS = str(Path(__file__).parent.parent / "envs" / "tasksets")
EXTRA = {"reasoning_gym", "verifiers"}  # environments that need a package of the same name
INDICES = st.integers(0, 2**62)


@pytest.fixture(params=CASES)
def make(request, monkeypatch):
    name = request.param.split(",")[0]
    if name in EXTRA:
        pytest.importorskip(name)
    monkeypatch.syspath_prepend(TASKSETS)
    return lambda: make_env(name, CASES[request.param])


def test_every_shipped_environment_is_held_to_this_contract():
    assert {case.split(",")[0] for case in CASES} == set(ENVS)


def test_tasks_are_pure_and_travel(make):
    env, other = make(), make()

    @settings(max_examples=50)
    @given(INDICES, st.sampled_from(["train", "test"]))
    def check(index, split):
        task = env.task(split, index)
        assert task == other.task(split, index)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(task), type=Task) == task
        assert task.prompt
        assert task.key == f"{split}/{index}"

    check()


def test_no_train_task_poses_a_test_question(make):
    env = make()
    held_out = {env.task("test", index).prompt for index in range(500)}
    assert held_out

    @settings(max_examples=300)
    @given(INDICES)
    def check(index):
        assert env.task("train", index).prompt not in held_out

    check()
    assert not held_out & {env.task("train", index).prompt for index in range(5000)}


def test_neighbouring_tasks_differ(make):
    env = make()
    assert len({env.task("train", index).prompt for index in range(50)}) > 10


def test_sessions_share_nothing(make):
    env = make()
    task = env.task("train", 1)
    ended, fresh = env.open(task), env.open(task)
    for _ in range(20):
        ended.step("[1+1]")
    first = env.open(task).step("[1+1]")
    assert fresh.step("[1+1]") == first


def test_any_action_is_answered_and_the_reference_ends_the_episode(make):
    env = make()
    task = env.task("test", 3)

    @settings(max_examples=100)
    @given(st.text(max_size=100))
    def check(action):
        observation = env.open(task).step(action)
        assert not inspect.isawaitable(observation)  # shipped sessions answer at once
        assert isinstance(observation, Observation)
        assert len(observation.text) <= 1000

    check()
    assert env.open(task).step(task.reference).done
