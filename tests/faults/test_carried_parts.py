"""A run whose versions travel in parts between two trainer ranks and two engine ranks: what if one of them dies."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from contraflow.buffer.accounts import accounts
from contraflow.telemetry import read_journal
from tests.faults.test_processes import Running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
RECIPE = """
[run]
steps = 30
restarts = 0
eval_every = 10
eval_tasks = 16
[model]
folder = "{model}"
[engine]
context_tokens = 64
parallel = {{ {engine}deadline_s = 8.0 }}
[rollout]
episodes = 4
workers = {workers}
[buffer]
groups_per_step = 4
no_signal = "keep"
[train]
parallel = {{ dp = 2, deadline_s = 8.0 }}
[weights]
carrier = "collective"
bucket_bytes = 4096
"""


@pytest.fixture(params=["one spread engine"])
def running(request: pytest.FixtureRequest, tiny_moe: Path, tmp_path: Path) -> Iterator[Running]:
    recipe = tmp_path / "recipe.toml"
    workers, engine = (1, "dp = 2, ep = 2, ") if request.param == "one spread engine" else (2, "")
    recipe.write_text(RECIPE.format(model=tiny_moe, workers=workers, engine=engine), encoding="utf-8")
    run = Running(recipe, tmp_path / "run")
    yield run
    if run.process.poll() is None:
        os.killpg(run.process.pid, signal.SIGKILL)
    run.process.communicate()


@pytest.mark.parametrize("victim", ["rollout-0-0", "rollout-0-1"])
def test_a_killed_engine_rank_is_replaced_and_brought_versions_anew(running: Running, victim: str) -> None:
    running.until_step(5)
    os.kill(running.worker(victim), signal.SIGKILL)
    said = running.end(150)
    assert running.process.returncode == 0, said
    records = read_journal(running.folder / "metrics.jsonl")
    (death,) = [record for record in records if record["kind"] == "death"]
    assert death["worker"] == victim or f"rank {victim[-1]}" in death["detail"]
    assert accounts(running.folder).trained == 30 * 4
    refreshed = [record for record in records if record["kind"] == "refresh" and record["served"]]
    assert refreshed[-1]["version"]["n"] == 30
    assert any(record["at"] > death["at"] for record in refreshed)


def test_a_killed_trainer_rank_ends_the_run_by_name(running: Running) -> None:
    running.until_step(5)
    os.kill(running.worker("trainer-1"), signal.SIGKILL)
    said = running.end(60)
    assert running.process.returncode == 1, said
    assert "'trainer-1'" in said


@pytest.mark.parametrize("running", ["two engines"], indirect=True)
def test_of_two_engines_one_is_killed_and_the_other_is_brought_every_version(running: Running) -> None:
    running.until_step(5)
    os.kill(running.worker("rollout-1"), signal.SIGKILL)
    said = running.end(150)
    assert running.process.returncode == 0, said
    records = read_journal(running.folder / "metrics.jsonl")
    (death,) = [record for record in records if record["kind"] == "death"]
    assert death["worker"] == "rollout-1"
    assert accounts(running.folder).trained == 30 * 4
    refreshed = [record for record in records if record["kind"] == "refresh" and record["served"]]
    mine = [record["version"]["n"] for record in refreshed if record["worker"] == "rollout-0"]
    assert mine == sorted(mine)
    assert mine[-1] == 30
    assert any(record["worker"] == "rollout-1" and record["at"] > death["at"] for record in refreshed)
