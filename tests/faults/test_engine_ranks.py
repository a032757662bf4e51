"""A run whose engine has two ranks: what becomes of it when one of them dies or hangs."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contraflow.buffer.accounts import accounts
from contraflow.telemetry import read_journal
from tests.faults.test_processes import Running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
RECIPE = """
[run]
steps = 30
eval_every = 10
eval_tasks = 16
[model]
folder = "{model}"
[engine]
context_tokens = 64
parallel = {{ dp = 2, ep = 2, deadline_s = 8.0 }}
[rollout]
episodes = 4
[buffer]
groups_per_step = 4
no_signal = "keep"
"""


@pytest.fixture
def running(tiny_moe: Path, tmp_path: Path) -> Iterator[Running]:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(model=tiny_moe), encoding="utf-8")
    run = Running(recipe, tmp_path / "run")
    yield run
    if run.process.poll() is None:
        os.killpg(run.process.pid, signal.SIGKILL)
    run.process.communicate()


def deaths(running: Running) -> list[dict[str, Any]]:
    return [record for record in read_journal(running.folder / "metrics.jsonl") if record["kind"] == "death"]


@pytest.mark.parametrize("victim", ["rollout-0-0", "rollout-0-1"])
def test_a_killed_rank_is_named_and_its_worker_replaced(running: Running, victim: str) -> None:
    running.until_step(5)
    os.kill(running.worker(victim), signal.SIGKILL)
    said = running.end(120)
    assert running.process.returncode == 0, said
    (death,) = deaths(running)
    # Whoever is noticed first: the rank itself, or the other that cannot go on without it.
    assert death["worker"] == victim or f"rank {victim[-1]}" in death["detail"]
    assert accounts(running.folder).trained == 30 * 4
    refreshed = [r for r in read_journal(running.folder / "metrics.jsonl") if r["kind"] == "refresh"]
    assert {r["worker"] for r in refreshed} == {"rollout-0"}


@pytest.mark.parametrize("victim", ["rollout-0-0", "rollout-0-1"])
def test_a_rank_that_hangs_is_named_and_its_worker_replaced(running: Running, victim: str) -> None:
    running.until_step(5)
    stopped = running.worker(victim)
    os.kill(stopped, signal.SIGSTOP)
    said = running.end(120)
    assert running.process.returncode == 0, said
    (death,) = deaths(running)
    assert f"rank {victim[-1]}" in death["detail"]
    assert "gave up" in death["detail"]
    assert accounts(running.folder).trained == 30 * 4
    deadline = time.monotonic() + 10
    while Path(f"/proc/{stopped}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{stopped}").exists()
