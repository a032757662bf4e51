"""A run whose trainer or buffer dies or hangs goes on by itself from its last cut, a bounded number of times."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from contraflow.buffer.accounts import accounts
from contraflow.errors import DeadlineExceeded, WorkerDied
from contraflow.run import mendable
from contraflow.telemetry import read_journal
from tests.faults.test_processes import RECIPE, Running

Start = Callable[..., Running]


@pytest.fixture
def start(tiny_moe: Path, tmp_path: Path) -> Iterator[Start]:
    started: list[Running] = []

    def begin(*extra: str, steps: int = 60) -> Running:
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(RECIPE.format(model=tiny_moe, steps=steps), encoding="utf-8")
        started.append(Running(recipe, tmp_path / "run", "--set", "run.restarts=2", *extra))
        return started[-1]

    yield begin
    for running in started:
        if running.process.poll() is None:
            os.killpg(running.process.pid, signal.SIGKILL)
        running.process.communicate()


@pytest.mark.parametrize("victim", ["trainer-0", pytest.param("buffer", marks=pytest.mark.slow)])
def test_a_killed_trainer_or_buffer_is_named_and_the_run_goes_on_from_its_cut(start: Start, victim: str) -> None:
    running = start()
    running.until_step(8)
    os.kill(running.worker(victim), signal.SIGKILL)
    said = running.end(90)
    assert running.process.returncode == 0, said
    assert "done: 60 steps" in said
    (restart,) = [r for r in read_journal(running.folder / "metrics.jsonl") if r["kind"] == "restart"]
    assert restart["because"].startswith(f"worker '{victim}' died: ")
    totals = accounts(running.folder)
    assert (totals.line, totals.trained, totals.final) == (1, 60 * 4, 60 * 4)
    assert totals.posed == totals.trained + sum(totals.dropped.values()) + totals.held


@pytest.mark.slow
def test_a_trainer_that_hangs_is_named_in_time_and_the_run_goes_on_from_its_cut(start: Start) -> None:
    running = start("--set", "runtime.hang_s=5")
    running.until_step(8)
    began = time.monotonic()
    os.kill(running.worker("trainer-0"), signal.SIGSTOP)
    said = running.end(90)
    assert running.process.returncode == 0, said
    (restart,) = [r for r in read_journal(running.folder / "metrics.jsonl") if r["kind"] == "restart"]
    assert restart["because"].startswith("worker 'trainer-0' died: hung: its process has not moved for 5 s")
    assert restart["at"] - restart["seconds"] - began <= 5 + 5
    assert accounts(running.folder).trained == 60 * 4


@pytest.mark.slow
def test_a_run_that_gets_no_further_ends_after_its_restarts(start: Start) -> None:
    running = start("--set", "train.checkpoint_every=1000", steps=100000)
    for life in range(3):
        deadline = time.monotonic() + 60
        while running.lines() < life and time.monotonic() < deadline:
            time.sleep(0.05)
        running.until_step(life)
        os.kill(running.worker("trainer-0"), signal.SIGKILL)
    said = running.end(60)
    assert running.process.returncode == 1, said
    assert len([r for r in read_journal(running.folder / "metrics.jsonl") if r["kind"] == "restart"]) == 2


def test_a_sigterm_to_the_whole_group_ends_the_run_and_starts_nothing_again(start: Start) -> None:
    running = start(steps=100000)
    running.until_step(8)
    os.killpg(running.process.pid, signal.SIGTERM)
    said = running.end(60)
    assert running.process.returncode in (1, 130), said
    assert "contraflow resume" in said
    assert running.lines() == 0


def test_only_a_death_or_a_call_without_answer_is_worth_a_new_start() -> None:
    assert mendable(WorkerDied("trainer-0", "SIGKILL"))
    assert mendable(DeadlineExceeded("loop", "trainer-0.step", 120.0))
    assert not mendable(DeadlineExceeded("learn", "4 more groups for step 0", 120.0))
