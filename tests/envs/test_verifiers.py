"""Tasksets of the verifiers package as tasks: pure, disjoint, each once an epoch; and refusals that say what to do."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from contraflow.envs.registry import make_env
from contraflow.errors import ConfigError

TASKSETS = str(Path(__file__).parent / "tasksets")


@pytest.fixture
def made(monkeypatch):
    pytest.importorskip("verifiers.v1")
    monkeypatch.syspath_prepend(TASKSETS)
    return lambda taskset="tiny_sums", **rest: make_env("verifiers", {"taskset": taskset, **rest})


def test_without_the_package_it_is_refused_with_what_to_install():
    code = (
        "import sys; sys.modules['verifiers'] = None\n"
        "from contraflow.envs.registry import make_env\n"
        "make_env('verifiers', {'taskset': 'x'})"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert "ConfigError: env.name = 'verifiers' needs pip install 'contraflow[verifiers]'" in told.stderr


def test_every_task_comes_once_an_epoch_and_in_another_order_the_next_time(made):
    env = made(test_share=0.25)
    held_out, seen = {env.task("test", index).prompt for index in range(400)}, []
    whole = 400 - len(held_out)
    for epoch in range(2):
        seen.append([env.task("train", epoch * whole + place).prompt for place in range(whole)])
        assert Counter(seen[-1]).most_common(1)[0][1] == 1
        assert not set(seen[-1]) & held_out
    assert sorted(seen[0]) == sorted(seen[1]) != seen[0] != seen[1]
    assert 60 < len(held_out) < 140
    first = [made(test_share=0.25, seed=seed).task("train", 0).prompt for seed in range(4)]
    assert len(set(first)) > 1


def test_a_task_names_its_taskset_its_row_and_what_it_holds(made):
    env = made(options={"most": 12})
    task = env.task("train", 3)
    assert task.facts.keys() == {"kind", "row", "hash", "scored"}
    assert (task.facts["kind"], task.facts["scored"]) == ("tiny_sums", "env")
    a, b = divmod(int(task.facts["row"]), 12)
    assert task.prompt == f"{a}+{b}="
    assert made(options={"most": 12}).task("train", 3) == task
    shifted = made(options={"most": 12, "first": 1})
    same = next(n for n in range(140) if shifted.task("train", n).facts["row"] == task.facts["row"])
    assert shifted.task("train", same).facts["hash"] != task.facts["hash"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"taskset": "no_such_taskset"}, r"taskset 'no_such_taskset' not found"),
        ({"taskset": "tiny_old"}, r"the interface of verifiers before 0\.4"),
        ({"taskset": "tiny_refused", "options": {"tools": True}}, "serves tools"),
        ({"taskset": "tiny_boxed"}, "needs a container"),
        ({"taskset": "tiny_sums", "env": "user-sim"}, r"lets 2 agents speak \(assistant, user\)"),
        ({"taskset": "tiny_sums", "env_options": {"agent": {"harness": {"id": "null"}}}}, "no harness or runtime"),
        ({"taskset": "tiny_sums", "options": {"moat": 3}}, "moat"),
        ({"taskset": "tiny_sums", "env_options": {"agents": {}}}, "agents"),
        ({"taskset": "tiny_sums", "options": {"most": 1}}, "none of its 1 tasks is a"),
        ({"taskset": ""}, r"env\.options\.taskset"),
        ({"taskset": "tiny_sums", "shar": 0.1}, "unknown key"),
        ({}, r"env\.options\.taskset is missing"),
    ],
)
def test_what_cannot_be_played_is_refused_by_name(made, options, says):
    with pytest.raises(ConfigError, match=says):
        make_env("verifiers", options)
