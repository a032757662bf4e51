"""One run from start to end: opens the parts, runs the loop, feeds the view, turns Ctrl-C into a clean stop.

Takes a checked recipe and a folder, gives an `Outcome`. RUN/metrics.jsonl gets a record per step, look, refresh and
death from the loop, and from here one of every process's seconds a tick. Does not decide anything about the run.
"""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from contraflow.buffer.counts import Counts
from contraflow.buffer.service import Buffer
from contraflow.config import Recipe
from contraflow.errors import ConfigError, DeadlineExceeded, NoticeError, WorkerDied
from contraflow.loop import Loop
from contraflow.progress import Outcome
from contraflow.rollout.report import RolloutReport
from contraflow.rollout.worker import RolloutWorker
from contraflow.runtime.base import OWNER
from contraflow.runtime.notice import Metadata, first_notice
from contraflow.system import open_system
from contraflow.telemetry import Clock, Journal
from contraflow.train.worker import Trainer
from contraflow.view.base import Snapshot, View, Worker

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TICK_S = 1.0  # between two snapshots
ANSWER_S = 5.0  # a worker that takes longer to report is left out of one snapshot; its death is noticed elsewhere


def run_recipe(recipe: Recipe, folder: Path, *, resume: bool, clock: Clock, view: View) -> Outcome:
    """Run a recipe to its end, in this process and the workers it starts.

    When the trainer or the buffer dies or hangs, all stop and start again from the last cut and the ledger,
    `run.restarts` times in a row without a newer cut.

    Raises: ConfigError, RunFolderError, ModelError before anything is trained; later WorkerDied (trainer or buffer),
    DeadlineExceeded, TrainingError, CarrierError, CheckpointError. The folder can then be resumed from its last cut.
    """
    return asyncio.run(_run(recipe, folder, resume=resume, clock=clock, view=view))


async def _run(recipe: Recipe, folder: Path, *, resume: bool, clock: Clock, view: View) -> Outcome:
    life = _Life(recipe, folder, clock=clock, view=view, machine=await _machine(recipe))
    left = recipe.run.restarts
    while True:
        try:
            return await life.live(resume=resume)
        except (WorkerDied, DeadlineExceeded) as failure:
            if life.stopping:
                failure.add_note(f"the run had been told to stop; contraflow resume {folder} goes on from its last cut")
                raise
            left = (recipe.run.restarts if life.saved else left) - 1
            if left < 0 or not (life.began or resume) or not mendable(failure):
                raise
            life.because, resume = str(failure), True


async def _machine(recipe: Recipe) -> Metadata | None:
    """Who is to be asked whether this machine goes. Raises ConfigError if that cannot be asked."""
    section = recipe.runtime
    if not section.notice_url:
        return None
    machine = Metadata(section.notice_url, deadline_s=section.notice_every_s)
    try:
        await machine.ask()
    except NoticeError as fault:
        raise ConfigError(f"runtime.notice_url: {fault}; correct it, or leave it empty to ask nobody") from fault
    return machine


def mendable(failure: WorkerDied | DeadlineExceeded) -> bool:
    """Whether a new start may help: a worker died or did not answer. Waiting in vain for groups would repeat itself."""
    return isinstance(failure, WorkerDied) or failure.owner == OWNER


class _Life:
    """A run from one start of its parts to their end.

    `began`: the parts answered once, so they can. `saved`: the last life got as far as a cut of its own.
    `stopping`: it was told to stop. A SIGTERM to a whole group takes workers with it, and nobody wants those again.
    """

    def __init__(
        self, recipe: Recipe, folder: Path, *, clock: Clock, view: View, machine: Metadata | None = None
    ) -> None:
        """`machine` knows whether this machine is to go."""
        self._machine = machine
        self._recipe, self._folder, self._clock, self._view = recipe, folder, clock, view
        self.began = self.saved = self.stopping = False
        self.because = ""  # why it had to start again

    async def live(self, *, resume: bool) -> Outcome:
        clock, view, asked = self._clock, self._view, self._clock()
        self.saved = False
        async with open_system(self._recipe, self._folder, resume=resume, clock=clock) as system:
            self.began = True
            journal = Journal(self._folder / "metrics.jsonl")
            if self.because:
                system.note = f"started again since {self.because}; {system.note}"
                took = round(clock() - asked, 3)
                journal.write({"kind": "restart", "at": round(clock(), 3), "seconds": took, "because": self.because})
            if system.scored_by is not None:
                journal.write({"kind": "scorer", "at": round(clock(), 3), **msgspec.to_builtins(system.scored_by)})
            loop = Loop(system, self._recipe, journal=journal, clock=clock)
            watcher = Watcher(loop, journal, clock)
            running, heeding = asyncio.ensure_future(loop.run()), asyncio.ensure_future(self._heed(loop, journal))
            try:
                with _interrupts(lambda: self._stop(loop)):
                    while not (await asyncio.wait({running}, timeout=TICK_S))[0]:
                        view.show(await watcher.look())
                outcome = running.result()
                view.show(await watcher.look())
                return outcome
            except DeadlineExceeded as late:
                for path in await system.runtime.stacks():
                    late.add_note(f"what a worker was doing then: {path}")
                raise
            finally:
                running.cancel()
                heeding.cancel()
                await asyncio.wait({running, heeding})
                self.saved = bool(loop.saver.newest)
                journal.close()

    async def _heed(self, loop: Loop, journal: Journal) -> None:
        """When the machine is to go, the run ends as it does at SIGTERM. A service that fails is told of, no more."""
        if self._machine is None:
            return

        def trouble(text: str) -> None:
            journal.write({"kind": "notice_trouble", "at": round(self._clock(), 3), "detail": text})
            loop.progress.note = text

        said = await first_notice(self._machine, self._recipe.runtime.notice_every_s, trouble)
        journal.write({"kind": "notice", "at": round(self._clock(), 3), "worker": "machine", "detail": said})
        loop.progress.note = f"the machine is to go: {said}"
        self._stop(loop)

    def _stop(self, loop: Loop) -> None:
        self.stopping = True
        loop.stop()


class Watcher:
    """Gathers what views show. Invariant: it only reads; a run that nobody watches goes the same way."""

    def __init__(self, loop: Loop, journal: Journal, clock: Clock) -> None:
        self._loop = loop
        self._journal = journal
        self._clock = clock
        self._began = clock()
        self._counts: Counts | None = None
        self._last: dict[str, float] = {"at": clock(), "rollout": 0.0, "train": 0.0}

    async def look(self) -> Snapshot:
        """One snapshot, also written to the journal as a record of kind `pools`."""
        loop, now = self._loop, self._clock()
        workers, rollouts, forms, carried = await self._workers()
        engines = {name: rollout.engine for name, rollout in rollouts.items()}
        rollout_tokens = sum(engine.tokens for engine in engines.values())
        self._counts = counts = await self._count()
        progress = loop.progress
        train_tokens = progress.trained_tokens
        groups = _states(counts)
        self._journal.write(
            {
                "kind": "pools",
                "at": round(now, 3),
                "elapsed_s": round(now - self._began, 3),
                "workers": [{"name": w.name, "doing": w.doing, "seconds": w.seconds} for w in workers],
                "rollout_tokens": rollout_tokens,
                "train_tokens": train_tokens,
                "groups": groups,
                "solve_rates": {kind: round(rate, 4) for kind, rate in counts.solve_rates.items()},
                "placed": {
                    name: {
                        "times": engine.placed,
                        "in_order": engine.in_order,
                        "before": engine.imbalance,
                        "after": engine.promised,
                    }
                    for name, engine in engines.items()
                    if engine.placed
                },
                "forms": forms,
                "carried": carried,
            }
        )
        rollout_rate, train_rate = self._rates(now, rollout_tokens, train_tokens)
        done, steps = progress.steps, loop.recipe.run.steps
        first, elapsed = loop.system.first_step, now - self._began
        left = elapsed / (done - first) * (steps - done) if done > first else None
        return Snapshot(
            elapsed_s=elapsed,
            left_s=left,
            step=done,
            steps=steps,
            rewards=tuple(progress.rewards),
            accuracies=tuple(progress.accuracies),
            age_mean=progress.age_mean,
            age_max=progress.age_max,
            age_bound=loop.recipe.buffer.max_age,
            rollout_tokens_s=rollout_rate,
            train_tokens_s=train_rate,
            tickets_busy=counts.tickets_busy,
            tickets=counts.tickets_busy + counts.tickets_free,
            groups=groups,
            workers=tuple(workers),
            note=progress.note,
        )

    async def _count(self) -> Counts:
        """What the buffer holds; what it held last when it is late or dead, which is for the loop to find out."""
        try:
            return await self._loop.system.buffer.call(ANSWER_S, Buffer.counts)
        except (DeadlineExceeded, WorkerDied):
            if self._counts is None:
                raise
            return self._counts

    async def _workers(self) -> tuple[list[Worker], dict[str, RolloutReport], dict[str, list[str]], dict[str, Any]]:
        """Every process, what rollout workers report, how each pool's tokens reach experts on other ranks, and what
        parts of versions each trainer rank sent.

        One that does not answer in time says so.
        """
        workers, rollouts, forms, carried = [], {}, {}, {}
        for name, ref in list(self._loop.system.rollouts.items()):
            try:
                rollouts[name] = rollout = await ref.call(ANSWER_S, RolloutWorker.report)
                workers.append(Worker(name, f"{rollout.engine.doing} ({rollout.doing})", rollout.engine.seconds))
            except (DeadlineExceeded, WorkerDied) as silence:
                workers.append(Worker(name, str(silence), {}))
        for rank, trainer in enumerate(self._loop.system.trainer.refs):
            try:
                train = await trainer.call(ANSWER_S, Trainer.report)
                workers.append(Worker(f"trainer-{rank}", train.doing, train.seconds))
                if train.sent or train.failed:
                    told = {"sent": train.sent, "skipped": train.skipped, "failed": train.failed, "fault": train.fault}
                    carried[f"trainer-{rank}"] = told
                if train.forms:
                    forms[f"trainer-{rank}"] = list(train.forms)
            except (DeadlineExceeded, WorkerDied) as silence:
                workers.append(Worker(f"trainer-{rank}", str(silence), {}))
        forms |= {name: list(rollout.engine.forms) for name, rollout in rollouts.items() if rollout.engine.forms}
        return workers, rollouts, forms, carried

    def _rates(self, now: float, rollout: float, train: float) -> tuple[float, float]:
        last, passed = self._last, max(now - self._last["at"], 1e-9)
        self._last = {"at": now, "rollout": rollout, "train": train}
        return max(0.0, rollout - last["rollout"]) / passed, (train - last["train"]) / passed


def _states(counts: Counts) -> dict[str, int]:
    held = {"waiting": counts.waiting, "running": counts.running, "ready": counts.ready, "taken": counts.taken}
    held |= {"due": counts.due} if counts.due else {}
    return held | {"trained": counts.trained} | {f"dropped: {why}": n for why, n in counts.dropped.items()}


@contextmanager
def _interrupts(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C, SIGTERM or SIGHUP ends the run after the step it is in; a second one acts as ever."""
    events = asyncio.get_running_loop()

    def release() -> None:
        for number in STOPS:
            events.remove_signal_handler(number)

    def first() -> None:
        release()
        stop()

    for number in STOPS:
        events.add_signal_handler(number, first)
    try:
        yield
    finally:
        release()
