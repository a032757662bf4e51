"""Real processes and real signals: what dies is named, what can go on goes on, what cannot is resumed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from contraflow.buffer.accounts import accounts
from contraflow.config import Weights
from contraflow.telemetry import read_journal
from contraflow.weights import open_carrier
from contraflow.weights.memory import MemoryCarrier

RECIPE = """
[run]
steps = {steps}
restarts = 0
eval_every = 10
eval_tasks = 16
[model]
folder = "{model}"
[engine]
kind = "scripted"
[rollout]
episodes = 4
[buffer]
groups_per_step = 4
no_signal = "keep"
[train]
checkpoint_every = 5
"""


class Running:
    """A `contraflow run` in a process group of its own, as a terminal would start it."""

    def __init__(self, recipe: Path, folder: Path, *extra: str) -> None:
        command = [sys.executable, "-c", "from contraflow.cli import main; main()", "run", str(recipe), "--plain"]
        self.folder = folder
        self.process = subprocess.Popen(
            [*command, "--folder", str(folder), *extra],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def until_step(self, step: int, *, within_s: float = 60.0) -> None:
        """Follow the journal until a step is in it."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline and self.process.poll() is None:
            path = self.folder / "metrics.jsonl"
            if path.is_file() and any(r["kind"] == "step" and r["step"] >= step for r in read_journal(path)):
                return
            time.sleep(0.02)
        raise AssertionError(f"step {step} was not reached: {self.end(5)}")

    def worker(self, name: str) -> int:
        """The process id of a worker of this run, from its title."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and self._is(entry, name):
                return int(entry.name)
        raise AssertionError(f"no process of worker {name!r}")

    def _is(self, entry: Path, name: str) -> bool:
        try:
            ours = os.getsid(int(entry.name)) == self.process.pid
            return ours and (entry / "comm").read_text().strip() == name
        except (ProcessLookupError, FileNotFoundError):
            return False

    def lines(self) -> int:
        """How often it was started again by itself."""
        path = self.folder / "metrics.jsonl"
        return sum(r["kind"] == "restart" for r in read_journal(path)) if path.is_file() else 0

    def end(self, within_s: float) -> str:
        """What it printed, once it has ended."""
        return self.process.communicate(timeout=within_s)[0]


Start = Callable[..., Running]


@pytest.fixture
def start(tiny_moe: Path, tmp_path: Path) -> Iterator[Start]:
    started: list[Running] = []

    def begin(*extra: str, steps: int = 4000) -> Running:
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(RECIPE.format(model=tiny_moe, steps=steps), encoding="utf-8")
        started.append(Running(recipe, tmp_path / "run", *extra))
        return started[-1]

    yield begin
    for running in started:
        if running.process.poll() is None:
            os.killpg(running.process.pid, signal.SIGKILL)
        running.process.communicate()


def test_ctrl_c_ends_cleanly_and_the_run_goes_on_from_there(start: Start) -> None:
    running = start()
    running.until_step(7)
    os.killpg(running.process.pid, signal.SIGINT)
    said = running.end(30)
    assert running.process.returncode == 130, said
    assert f"contraflow resume {running.folder}" in said
    done = accounts(running.folder).trained // 4
    again = start("--resume", steps=done + 3)
    said = again.end(60)
    assert f"done: {done + 3} steps" in said
    totals = accounts(running.folder)
    assert (totals.trained, totals.line) == ((done + 3) * 4, 1)


def test_a_killed_rollout_worker_is_named_and_replaced(start: Start) -> None:
    running = start(steps=40)
    running.until_step(5)
    os.kill(running.worker("rollout-0"), signal.SIGKILL)
    said = running.end(60)
    assert running.process.returncode == 0, said
    assert "worker 'rollout-0' died: " in said
    assert "SIGKILL" in said
    assert accounts(running.folder).trained == 40 * 4


@pytest.mark.slow
def test_a_rollout_worker_that_gets_sigterm_leaves_in_order_and_is_replaced(start: Start) -> None:
    running = start(steps=40)
    running.until_step(5)
    os.kill(running.worker("rollout-0"), signal.SIGTERM)
    said = running.end(90)
    assert running.process.returncode == 0, said
    records = read_journal(running.folder / "metrics.jsonl")
    kinds = [record["kind"] for record in records]
    assert (kinds.count("notice"), kinds.count("drained"), kinds.count("death")) == (1, 1, 0)
    assert accounts(running.folder).trained == 40 * 4


def test_a_killed_trainer_ends_the_run_by_name_and_nothing_is_lost(start: Start) -> None:
    running = start()
    running.until_step(8)
    published = open_carrier(Weights(), running.folder)
    assert isinstance(published, MemoryCarrier)
    assert published.folder.is_dir()
    os.kill(running.worker("trainer-0"), signal.SIGKILL)
    said = running.end(30)
    assert running.process.returncode == 1
    assert not published.folder.exists()  # who published it could not remove it: it would hold memory
    assert "contraflow: worker 'trainer-0' died: " in said
    cut = accounts(running.folder).cut
    assert cut >= 5
    said = start("--resume", steps=cut + 6).end(60)
    assert f"done: {cut + 6} steps" in said
    totals = accounts(running.folder)
    assert totals.trained == totals.final == (cut + 6) * 4
    assert totals.posed == totals.trained + sum(totals.dropped.values()) + totals.held


def test_a_killed_run_leaves_no_worker_behind(start: Start) -> None:
    running = start()
    running.until_step(2)
    workers = [running.worker(name) for name in ("rollout-0", "trainer-0", "buffer")]
    os.kill(running.process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [worker for worker in workers if Path(f"/proc/{worker}").exists()]


def test_a_second_run_in_a_folder_in_use_is_refused(start: Start) -> None:
    running = start()
    running.until_step(1)
    said = start("--resume").end(30)
    assert "in use by the run of process" in said
    assert running.process.poll() is None
