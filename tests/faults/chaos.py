"""A run that is killed again and again, at random moments, by a seed; and what its ledger says in the end.

Takes a recipe and a folder; kills one process or all of them with SIGKILL, resumes what cannot go on by itself, and
times how long it takes until the next step is trained. Waits end: a run that makes no step in time has hung.
"""

import os
import random
import signal
import sqlite3
import time
from dataclasses import dataclass, field
from pathlib import Path

from contraflow.buffer.accounts import accounts
from contraflow.telemetry import read_journal
from tests.faults.test_processes import Running

ROLES = ("rollout", "trainer", "buffer", "loop", "all")
HUNG_S = 120.0  # without a step; on a busy machine a start takes 10
SETTINGS = ("--set", "run.restarts=1000000")


@dataclass
class Chaos:
    """One run under fire.

    `recovered` has seconds by role: of a rollout worker, until another has started in its place; of the others, until
    the run, started again, has trained its next step.
    """

    recipe: Path
    folder: Path
    draws: random.Random
    recovered: dict[str, list[float]] = field(default_factory=lambda: {role: [] for role in ROLES})
    kills: int = 0
    resumes: int = 0
    born: float = 0.0  # when the process of the run was started last

    def run(self, kills: int) -> None:
        """Kill so many times, then let the run end by Ctrl-C, as a person would."""
        running = Running(self.recipe, self.folder, *SETTINGS)
        try:
            self._until(running, 0.0, "step")
            while self.kills < kills:
                running = self._strike(running)
            running.process.send_signal(signal.SIGINT)
            said = running.end(HUNG_S)
            assert running.process.returncode == 130, said
        finally:
            if running.process.poll() is None:
                os.killpg(running.process.pid, signal.SIGKILL)
                running.process.communicate()

    def _strike(self, running: Running) -> Running:
        """One blow, after a random while, and the way back; now and then two blows before anything came back."""
        time.sleep(self.draws.random() * 1.5)
        role, began = self.draws.choice(ROLES), time.monotonic()
        running, role = self._kill(running, role)
        if self.draws.random() < 0.2:
            time.sleep(self.draws.random() * 3.0)
            began = time.monotonic()
            running, role = self._kill(running, self.draws.choice(ROLES))
        if role == "rollout":
            back = self._until(running, began, "replaced", "restart")
        elif role in ("trainer", "buffer"):
            back = self._until(running, self._until(running, began, "restart"), "step")
        else:
            back = self._until(running, self.born, "step")
        self.recovered[role].append(back - began)
        return running

    def _kill(self, running: Running, role: str) -> tuple[Running, str]:
        """The run that goes on, and whom the blow struck."""
        self.kills += 1
        if role in ("rollout", "trainer", "buffer"):
            names = {"rollout": f"rollout-{self.draws.randrange(2)}", "trainer": "trainer-0", "buffer": "buffer"}
            try:
                os.kill(running.worker(names[role]), signal.SIGKILL)
                return running, role
            except (AssertionError, ProcessLookupError):  # it is dead already: whoever is there is struck instead
                role = "loop"
        if role == "all":
            os.killpg(running.process.pid, signal.SIGKILL)
        else:
            running.process.kill()
        running.process.communicate()
        self.resumes += 1
        self.born = time.monotonic()
        return Running(self.recipe, self.folder, "--resume", *SETTINGS), role

    def _until(self, running: Running, since: float, *kinds: str) -> float:
        """When the first record of these kinds after a moment was written."""
        journal, deadline = self.folder / "metrics.jsonl", time.monotonic() + HUNG_S
        while time.monotonic() < deadline:
            if running.process.poll() is not None:
                raise AssertionError(f"the run ended by itself after {self.kills} kills: {running.end(5)}")
            found = [r["at"] for r in read_journal(journal) if r["kind"] in kinds] if journal.is_file() else []
            if after := [at for at in found if at > since]:
                return float(after[0])
            time.sleep(0.05)
        raise AssertionError(f"hung: no {kinds} for {HUNG_S} s after {self.kills} kills")


def check_ledger(folder: Path, groups_per_step: int) -> int:
    """Nothing lost, nothing trained twice, judged by the package and by SQL of our own; gives the steps trained."""
    totals = accounts(folder)
    assert totals.posed == totals.trained + sum(totals.dropped.values()) + totals.held
    assert totals.trained == totals.final
    db = sqlite3.connect(f"{(folder / 'ledger.sqlite').as_uri()}?mode=ro", uri=True)
    lines = {line: (parent, start) for line, parent, start in db.execute("SELECT line, parent, from_step FROM lines")}
    alive, line, end = [], totals.line, totals.cut  # what is behind the last cut is not trained for good
    while line is not None:
        parent, start = lines[line]
        alive += [(step, group) for step, group in _trained(db, line) if step < end]
        line, end = parent, min(end, start)
    db.close()
    groups = [group for _, group in alive]
    assert len(groups) == len(set(groups)), "a group was trained twice on the history that survives"
    by_step = {step: sum(s == step for s, _ in alive) for step, _ in alive}
    assert sorted(by_step) == list(range(len(by_step))), "a step is missing"
    assert set(by_step.values()) == {groups_per_step}
    assert len(groups) == totals.trained
    return len(by_step)


def _trained(db: sqlite3.Connection, line: int) -> list[tuple[int, int]]:
    """(step, group) of what a line took: what was taken before the cut that the next line began with, it trained."""
    query = "SELECT step, group_id FROM events WHERE kind = 'taken' AND line = ?"
    return [(step, group) for step, group in db.execute(query, (line,))]
