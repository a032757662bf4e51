"""The whole system on one page: groups flow one way, versions the other, and nobody waits longer than he must.

    ask --ticket--> play x N --group--> (buffer) --take--> learn --manifest--> refresh --tickets come home--> ask

| coroutine | waits for                         | woken by                                            |
|-----------|-----------------------------------|-----------------------------------------------------|
| `ask`     | a free ticket                     | `refresh`, or the buffer dropping a group           |
| `play`    | an admitted group, a fresh engine | `ask`, `refresh`                                    |
| `learn`   | P ready groups inside the window  | `play`                                              |
| `refresh` | a newer manifest                  | `learn`                                             |
| `mourn`   | a death                           | the runtime                                         |
| `heed`    | a notice to leave                 | the runtime                                         |

Payloads do not pass through here: rollout workers put into the buffer, the trainer fetches from it, engines fetch
weights from a carrier; the loop moves ids. buffer/window.py decides which group may leave, train/ what is learned.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from contraflow.alarms import Alarms
from contraflow.buffer.service import Buffer
from contraflow.config import Recipe
from contraflow.errors import CarrierError, DeadlineExceeded, TrainingError, WorkerDied
from contraflow.progress import Outcome, Progress
from contraflow.rollout.worker import RolloutWorker
from contraflow.runtime.base import OWNER, Ref
from contraflow.saving import Saver
from contraflow.system import SCORER, System
from contraflow.telemetry import Clock, Journal
from contraflow.train.worker import StepReport, Trainer
from contraflow.types import Manifest, Take, Ticket, Version

CALL_S = 30.0  # deadline of a call that has nothing to wait for
GRACE_S = 10.0  # the way there and back for a call that bounds its own wait
MAX_DEATHS = 3  # deaths of one rollout worker without a finished group in between

T = TypeVar("T")


class Loop:
    """Runs a started `System` from its first step to its last.

    Invariants: `newest` only grows. `served[name]` is a version that worker has proved. A worker starts a group only
    while it serves the newest version that anyone serves: the window's proof rests on it (docs/staleness.md).
    """

    def __init__(self, system: System, recipe: Recipe, *, journal: Journal, clock: Clock) -> None:
        self.system = system
        self.recipe = recipe
        self.journal = journal
        self.clock = clock
        self.newest: Manifest = system.manifest
        self.served: dict[str, Version] = {}
        self.progress = Progress(system.first_step, note=system.note)
        self._alarms = Alarms(recipe.alarms)
        self._stop = asyncio.Event()
        self._admitted: asyncio.Queue[Ticket] = asyncio.Queue()
        self._playing: dict[str, set[Ticket]] = {}  # by worker; two attempts at a group may overlap
        self._deaths: dict[str, int] = {}
        self.saver = Saver(system, recipe)
        self._leaving: set[str] = set()
        self.changed = asyncio.Condition()  # guards newest and served
        self._synchronous = recipe.buffer.max_age == 0
        looks_first = self._synchronous and recipe.run.eval_tasks > 0  # then groups wait for a look as well
        self._patience_s = recipe.run.stall_s * (2 if looks_first else 1)

    def stop(self) -> None:
        """Finish the step that is running, save, and end: what Ctrl-C asks for."""
        self._stop.set()

    async def run(self) -> Outcome:
        """Play, learn and refresh until the last step, a stop, or the first failure that nobody below could mend."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tending = {name: tasks.create_task(self._tend(name)) for name in self.system.rollouts}
                asking = tasks.create_task(self.ask())
                others = (self.mourn(tending, tasks), self.heed(tending, tasks))
                background = [asking, *(tasks.create_task(work) for work in others)]
                await self.learn(tasks, asking)
                for task in [*background, *tending.values()]:
                    task.cancel()
        except BaseExceptionGroup as failures:
            raise _first(failures) from None
        progress = self.progress
        return Outcome(progress.steps, progress.accuracy, self._stop.is_set(), progress.model, progress.because)

    async def ask(self) -> None:
        """Consumes free tickets, produces admitted groups."""
        stall_s = self._patience_s
        if self._synchronous:  # groups start alike at every version, the first too
            await self._until(lambda: bool(self.served), "ask", "a first version to be served", stall_s)
        again = await self.system.buffer.call(CALL_S, Buffer.steps_due)
        wait_s = stall_s + again * self.recipe.train.step_deadline_s  # tickets are out until steps are done again
        while True:
            self._admitted.put_nowait(await self.system.buffer.call(wait_s + GRACE_S, Buffer.admit, wait_s))
            wait_s = stall_s

    async def play(self, name: str) -> None:
        """Consumes admitted groups, produces ready ones in the buffer, by way of worker `name`."""
        worker, playing = self.system.rollouts[name], self._playing[name]
        while name not in self._leaving:
            cause = "its engine to serve the newest version"
            await self._until(lambda: self._fresh(name), f"play on {name}", cause, self._patience_s)
            ticket = await self._admitted.get()
            playing.add(ticket)
            deadline_s = self.recipe.rollout.group_deadline_s + GRACE_S  # the worker's own comes first
            try:
                summary = await worker.call(deadline_s, RolloutWorker.run_group, ticket)
            except DeadlineExceeded:
                await self._lost(ticket, "deadline")
            else:
                self.progress.posed.add(summary.lengths)
                self.progress.cut += summary.cut
                if summary.continued:
                    told = {"group": ticket.group, "episodes": summary.continued, "tokens": summary.saved}
                    self._record("continued", worker=name, **told)
                if summary.lagging:  # a newer version got served elsewhere between check and start, or it leaves
                    self._admitted.put_nowait(ticket)
                elif summary.given_up:
                    await self._lost(ticket, summary.given_up)
                elif not summary.handed_back:
                    self._deaths[name] = 0
            playing.discard(ticket)

    async def learn(self, tasks: asyncio.TaskGroup, asking: asyncio.Task[None]) -> None:
        """Consumes takes of P groups, produces versions; ends with a cut that holds everything learned.

        Cuts are written by one of `tasks` while it goes on. A run that is stopped ends `asking`, and what is under way.
        """
        bad = 0
        last = self.recipe.run.steps
        for step in range(self.system.first_step, last):
            take = await self._unless_stopped(self._take(step))
            if take is None:
                break
            report = await self._train(take)
            bad = 0 if report.applied else bad + 1
            if bad >= self.recipe.run.max_bad_steps:
                await self.saver.begin(step, tasks)
                await self.saver.settle()
                raise TrainingError(f"{bad} steps in a row gave no finite loss; the batches are in bad_batches/")
            if self.progress.steps % self.recipe.train.checkpoint_every == 0:
                await self.saver.begin(self.progress.steps, tasks)
            if 0 < self.recipe.run.stop_at_accuracy <= self.progress.accuracy:
                break
        if self._stop.is_set():
            asking.cancel()
            await asyncio.gather(*(self._break_off(name, ref) for name, ref in self.system.rollouts.items()))
        await self.saver.begin(self.progress.steps, tasks)
        await self.saver.settle()
        if not self._stop.is_set():
            self.progress.model = await self.saver.export()
            await self._look_last()

    async def refresh(self, name: str) -> None:
        """Consumes manifests (only the newest), produces served versions and tickets that come home."""
        worker, section = self.system.rollouts[name], self.recipe.weights
        wait_s = self.recipe.run.stall_s + self.recipe.train.step_deadline_s
        while True:
            await self._until(lambda: self._behind(name), f"refresh of {name}", "a newer manifest", wait_s)
            manifest = self.newest
            try:
                report = await worker.call(section.refresh_deadline_s + GRACE_S, RolloutWorker.refresh, manifest)
            except DeadlineExceeded as late:
                if late.owner != OWNER:
                    raise
                return await self._give_up(name, late)
            self._record("refresh", worker=name, **msgspec.to_builtins(report))
            if report.gone:  # the trainer has a newer one, of which word is on its way here
                await self._until(lambda: self._newer(manifest), f"refresh of {name}", "a newer manifest")  # noqa: B023
            if not report.served and self._newer(manifest):
                continue  # overtaken while it waited
            if not report.served:
                raise CarrierError(f"{name} refused version {manifest.version}: {report.reason}")
            if report.differs:
                self.progress.note = f"{name}: {report.differs}"
            due = self._look_due(name, manifest.version.n)
            if due and self._synchronous:  # it repeats bit for bit: no group may share the engine with a look
                await self.look(name)
            await self.system.buffer.call(CALL_S, Buffer.served, manifest.version)
            await self._note(served=(name, manifest.version))
            if due and not self._synchronous:
                await self.look(name)

    async def look(self, name: str) -> None:
        """Held-out accuracy of the version that `name` serves, which stays the same; the same tasks every time."""
        run = self.recipe.run
        asked = (0, run.eval_tasks, run.eval_samples, run.eval_temperature)
        report = await self.system.rollouts[name].call(run.stall_s, RolloutWorker.evaluate, *asked)
        self._record("eval", **msgspec.to_builtins(report))
        self.progress.accuracy = report.accuracy
        self.progress.accuracies.append(report.accuracy)

    async def mourn(self, tending: dict[str, asyncio.Task[None]], tasks: asyncio.TaskGroup) -> None:
        """Consumes deaths. A rollout worker is replaced and its groups posed again, the reward model started again;
        any other death ends the run."""
        while True:
            death = await self.system.runtime.next_death()
            heard, name = self.clock(), self.system.role_of(death.worker)
            self._record("death", worker=death.worker, detail=death.detail)
            self.progress.note = str(death)
            if name not in (*tending, SCORER) or self._deaths.get(name, 0) >= MAX_DEATHS:
                raise death
            self._deaths[name] = self._deaths.get(name, 0) + 1
            if name == SCORER:
                await self.system.start_scorer()
            else:
                await self._clear(name, tending, "worker_died")
                await self._start_again(name, tending, tasks)
            self._record("replaced", worker=name, seconds=round(self.clock() - heard, 3))

    async def heed(self, tending: dict[str, asyncio.Task[None]], tasks: asyncio.TaskGroup) -> None:
        """Consumes notices to leave. A rollout worker is drained; for any other process, the run ends with a cut."""
        while True:
            process = await self.system.runtime.next_notice()
            name = self.system.role_of(process)
            self._record("notice", worker=process)
            self.progress.note = f"{process} was told to leave"
            if name in tending and name not in self._leaving:
                tasks.create_task(self.drain(name, tending, tasks))
            elif name not in tending:
                self.stop()

    async def drain(self, name: str, tending: dict[str, asyncio.Task[None]], tasks: asyncio.TaskGroup) -> None:
        """Let worker `name` finish what it can within its grace, pose the rest elsewhere, see it out, replace it."""
        began, grace_s = self.clock(), self.recipe.rollout.grace_s
        self._leaving.add(name)
        try:
            drained = await self.system.rollouts[name].call(grace_s + GRACE_S, RolloutWorker.drain, grace_s)
        except WorkerDied:
            return  # `mourn` hears of it
        except DeadlineExceeded as late:
            return await self._give_up(name, late)
        finally:
            self._leaving.discard(name)
        await self._clear(name, tending, "drained")
        fault = await self.system.stop_rollout(name)
        told = {"finished": drained.finished, "handed_back": drained.handed_back, "fault": fault}
        self._record("drained", worker=name, seconds=round(self.clock() - began, 3), **told)
        self.progress.note = f"{name} left: {drained.finished} groups finished, {drained.handed_back} go on elsewhere"
        if self.recipe.rollout.replace and not self._stop.is_set():
            await self._start_again(name, tending, tasks)
        else:
            del tending[name]
            if not tending:
                self.stop()

    async def _break_off(self, name: str, worker: Ref[RolloutWorker]) -> None:
        """What `name` has under way goes on when the run is resumed: it is handed back, and rides in the cut."""
        self._leaving.add(name)
        with suppress(WorkerDied, DeadlineExceeded):  # what is not handed back is played anew
            await worker.call(CALL_S, RolloutWorker.drain, 0.0)

    async def _start_again(self, name: str, tending: dict[str, asyncio.Task[None]], tasks: asyncio.TaskGroup) -> None:
        for left in reversed(range(MAX_DEATHS)):
            try:
                await self.system.start_rollout(name)
                break
            except WorkerDied:  # it, or the trainer that it was to meet, died meanwhile
                if not left:
                    raise
        tending[name] = tasks.create_task(self._tend(name))

    async def _clear(self, name: str, tending: dict[str, asyncio.Task[None]], reason: str) -> None:
        """Worker `name` plays no more: its groups are posed again."""
        tending[name].cancel()
        await asyncio.wait({tending[name]}, timeout=CALL_S)
        await self._note(gone=name)
        for ticket in sorted(self._playing[name], key=lambda ticket: ticket.group):
            await self._lost(ticket, reason)

    async def _give_up(self, name: str, late: DeadlineExceeded) -> None:
        """Worker `name` does not answer: it is killed, and what follows is for `mourn`."""
        process = self.system.rollouts[name].address.worker
        paths = await self.system.runtime.stacks(process)
        self.system.runtime.kill(process, f"hung: {late}; its stacks: {', '.join(map(str, paths)) or 'it wrote none'}")

    async def _tend(self, name: str) -> None:
        self._playing[name] = set()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._till_death(name, self.refresh(name)))
            for _ in range(self.recipe.rollout.concurrency):
                tasks.create_task(self._till_death(name, self.play(name)))

    async def _till_death(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """A worker's death ends its coroutines here; what follows from it is for `mourn`, who hears of it too."""
        try:
            await work
        except WorkerDied as death:
            if self.system.role_of(death.worker) != name:
                raise

    async def _take(self, step: int) -> Take:
        return await self.system.buffer.call(self._patience_s + GRACE_S, Buffer.take, step, self._patience_s)

    async def _train(self, take: Take) -> StepReport:
        deadline_s = self.recipe.train.step_deadline_s
        if self.recipe.engine.offload != "none":
            await asyncio.gather(*(self._rest(name) for name in self.system.rollouts))
        report = (await self.system.trainer.call(deadline_s, Trainer.step, take))[0]
        if self.recipe.engine.offload != "none":
            await asyncio.gather(*(self._wake(name) for name in self.system.rollouts))
        assert report is not None, "rank 0 answers for all"
        await self.system.buffer.call(CALL_S, Buffer.trained, take.step, report.manifest.version)
        self.progress.count(report)
        self._record("step", **report.record())
        self._record("lengths", step=report.step, **self.progress.lengths())
        self._heed_alarms(report)
        await self._note(newest=report.manifest)
        return report

    def _heed_alarms(self, report: StepReport) -> None:
        for heard in self._alarms.hear(report):
            self._record("alarm", step=report.step, **heard._asdict())
            self.progress.note = heard.text
            if heard.sound == "stop":
                self.progress.because = heard.text
                self.stop()

    async def _rest(self, name: str) -> None:
        with suppress(WorkerDied):  # `mourn` hears of it
            began = self.clock()
            freed = await self.system.rollouts[name].call(self.recipe.run.stall_s, RolloutWorker.rest)
            self._record("rest", worker=name, bytes=freed, seconds=round(self.clock() - began, 4))

    async def _wake(self, name: str) -> None:
        with suppress(WorkerDied):
            began = self.clock()
            await self.system.rollouts[name].call(self.recipe.run.stall_s, RolloutWorker.wake)
            self._record("wake", worker=name, seconds=round(self.clock() - began, 4))

    async def _lost(self, ticket: Ticket, reason: str) -> None:
        await self.system.buffer.call(CALL_S, Buffer.lost, ticket.group, ticket.attempt, reason)

    def _fresh(self, name: str) -> bool:
        return name in self.served and self.served[name] == max(self.served.values())

    def _behind(self, name: str) -> bool:
        return name not in self.served or self.served[name] < self.newest.version

    def _newer(self, manifest: Manifest) -> bool:
        return self.newest.version > manifest.version

    def _look_due(self, name: str, n: int) -> bool:
        run = self.recipe.run
        return name == self._first and run.eval_tasks > 0 and n % run.eval_every == 0 and n < run.steps

    async def _look_last(self) -> None:
        first, final = self._first, self.newest.version
        await self._until(lambda: self.served.get(first) == final, "learn", f"{first} to serve version {final}")
        if self.recipe.run.eval_tasks > 0:
            await self.look(first)

    @property
    def _first(self) -> str:
        return min(self.system.rollouts)

    async def _note(
        self, *, newest: Manifest | None = None, served: tuple[str, Version] | None = None, gone: str = ""
    ) -> None:
        async with self.changed:
            self.served.pop(gone, None)
            if newest is not None:
                self.newest = newest
            if served is not None:
                self.served[served[0]] = served[1]
            self.changed.notify_all()

    async def _until(self, ready: Callable[[], bool], owner: str, cause: str, wait_s: float | None = None) -> None:
        wait_s = wait_s or self.recipe.run.stall_s
        try:
            async with asyncio.timeout(wait_s), self.changed:
                await self.changed.wait_for(ready)
        except TimeoutError:
            raise DeadlineExceeded(owner, cause, wait_s) from None

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        working, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return None if self._stop.is_set() else working.result()
        finally:
            working.cancel()
            stopped.cancel()

    def _record(self, kind: str, **fields: Any) -> None:
        self.journal.write({"kind": kind, "at": round(self.clock(), 3), **fields})


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that started the others: task groups nest, and cancel siblings in the order they were struck."""
    failure = failures.exceptions[0]
    return _first(failure) if isinstance(failure, BaseExceptionGroup) else failure
