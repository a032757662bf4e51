"""What is refused before a run starts, and with which words."""

import asyncio

import pytest

from contraflow.config import check_recipe
from contraflow.envs.registry import ENVS, make_env
from contraflow.errors import ConfigError, ModelError
from contraflow.model.tokenizer import build_char_tokenizer
from contraflow.rewards.registry import make_mix
from contraflow.rollout.preflight import check_reference, check_tasks

MINE = """
import time
from contraflow.envs.base import Observation
from contraflow.types import Task

class Mine:
    name = "mine"
    bounded = False
    def __init__(self, options): pass
    def task(self, split, index): return Task(key=f"{split}/{index}", prompt="1+1=", reference="2")
    def open(self, task): return self
    def step(self, action): return Observation("", True)

"""


def check(env, *, parts=None, n=5, deadline_s=0.5):
    return asyncio.run(check_reference(env, make_mix(parts or {"correct": 1.0}), n, deadline_s=deadline_s))


@pytest.mark.parametrize(
    "name", sorted(set(ENVS) - {"verifiers"})
)  # poses a taskset of yours: tests/envs/test_verifiers.py
@pytest.mark.parametrize("backwards", [True, False])
def test_every_shipped_environment_gives_its_own_references_full_marks(name, backwards):
    options = {"reversed": backwards} if name == "arithmetic" else {}
    parts = {"correct": 1.0, "format": 1.0, "partial": 1.0}
    if name == "harness":
        options = {"tasks": {"name": "arithmetic"}, "reward": "recipe" if backwards else "harness"}
    if name == "reasoning_gym":
        pytest.importorskip(name)
        options = {"datasets": [{"name": "chain_sum"}], "answer": "whole" if backwards else "tagged"}
        parts = {"correct": 1.0, "score": 1.0}
    tasks = check(make_env(name, options), parts=parts, n=200)
    assert len(tasks) == 400
    assert {task.key.split("/")[0] for task in tasks} == {"train", "test"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("task = lambda self, split, index: 1 / 0", "env 'mine', task train/0: env.task raised ZeroDivisionError"),
        ("task = lambda self, split, index: time.sleep(1.5)", "task train/0: env.task did not answer within 0.5 s"),
        ("open = lambda self, task: None", "env.open gave a NoneType, which has no step"),
        ("step = lambda self, action: action", "step gave a str, not an Observation"),
        ("step = lambda self, action: Observation('', False)", "its own reference '2' does not end the episode"),
    ],
)
def test_a_broken_environment_is_refused_by_name(tmp_path, change, words):
    (tmp_path / "mine.py").write_text(f"{MINE}class Broken(Mine):\n    {change}\n")
    env = make_env(f"{tmp_path}/mine.py:Broken", {})
    with pytest.raises(ConfigError) as refusal:
        check(env)
    assert words in str(refusal.value)


def test_a_broken_reward_is_refused_by_name(tmp_path):
    (tmp_path / "parts.py").write_text("def nan(task, transcript): return float('nan')")
    with pytest.raises(ConfigError, match=r"env 'arithmetic', task train/0: part '.*:nan' gave nan"):
        check(make_env("arithmetic", {}), parts={f"{tmp_path}/parts.py:nan": 1.0})


def test_a_reward_that_needs_what_the_environment_does_not_state_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    with pytest.raises(ConfigError, match=r"needs facts\['format'\]"):
        check(make_env(f"{tmp_path}/mine.py:Mine", {}), parts={"format": 1.0})


@pytest.fixture
def folder(tmp_path):
    build_char_tokenizer(tmp_path / "model", "0123456789+-=")
    return tmp_path / "model"


def checked(folder, **sections):
    return asyncio.run(check_tasks(check_recipe(sections), folder))


def test_the_defaults_fit_together(folder):
    checked(folder)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"env": {"options": {"kinds": [{"op": "*"}]}}}, "cannot write"),
        (
            {"engine": {"context_tokens": 9}},
            r"prompt and answer take 6 \+ [23] tokens and an end token; engine\.context",
        ),
        (
            {"rollout": {"max_new_tokens": 2}},
            r"its answer takes [23] tokens and an end token; rollout\.max_new_tokens = 2",
        ),
        ({"env": {"name": "arithmetik"}}, "did you mean 'arithmetic'"),
        ({"reward": {"parts": {"corect": 1.0}}}, "did you mean 'correct'"),
    ],
)
def test_a_recipe_whose_parts_do_not_fit_is_refused(folder, sections, words):
    with pytest.raises(ConfigError, match=words):
        checked(folder, **sections)


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        checked(tmp_path)
