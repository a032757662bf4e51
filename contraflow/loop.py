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
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import msgspec

from contraflow.alarms import Alarms
from contraflow.buffer.service import Buffer
from contraflow.config import Recipe
from contraflow.ending import end, first, unless_set
from contraflow.errors import CarrierError, DeadlineExceeded, TrainingError, WorkerDied
from contraflow.looks import Looks
from contraflow.progress import Outcome, Progress
from contraflow.rollout.report import Drained
from contraflow.rollout.worker import RolloutWorker
from contraflow.runtime.base import OWNER, Ref
from contraflow.saving import Saver
from contraflow.system import SCORER, System
from contraflow.telemetry import Clock, Journal
from contraflow.train.worker import StepReport, Trainer
from contraflow.types import Take, Ticket
from contraflow.versions import Versions

CALL_S = 30.0  # deadline of a call that has nothing to wait for
GRACE_S = 10.0  # the way there and back for a call that bounds its own wait
MAX_DEATHS = 3  # deaths of one rollout worker without a finished group in between


class Loop:
    """Runs a started `System` from its first step to its last.

    Invariant: a worker starts a group only while it serves the newest version that anyone serves: the window's proof
    rests on it (docs/staleness.md).
    """

    def __init__(self, system: System, recipe: Recipe, *, journal: Journal, clock: Clock) -> None:
        self.system = system
        self.recipe = recipe
        self.journal = journal
        self.clock = clock
        self.versions = Versions(system.manifest, wait_s=recipe.run.stall_s)
        self.progress = Progress(system.first_step, note=system.note)
        self.looks = Looks(system, recipe, self.progress, self._record)
        self._alarms = Alarms(recipe.alarms)
        self._stop = asyncio.Event()
        self._admitted: asyncio.Queue[Ticket] = asyncio.Queue()
        self._playing: dict[str, set[Ticket]] = {}  # by worker; two attempts at a group may overlap
        self._deaths: dict[str, int] = {}
        self.saver = Saver(system, recipe)
        self._leaving: set[str] = set()
        self._halted = asyncio.Event()  # nobody plays, so that what is under way can lie in a cut
        self._tending: dict[str, asyncio.Task[None]] = {}  # by worker
        self._asking: asyncio.Task[None] | None = None
        self._roster = asyncio.Lock()  # held by whoever starts a worker's coroutines anew
        self._exact = recipe.train.exact_checkpoints
        self._synchronous = recipe.buffer.max_age == 0
        looks_first = (self._synchronous or self._exact) and recipe.run.eval_tasks > 0  # groups wait for it
        self._patience_s = recipe.run.stall_s * (2 if looks_first else 1)

    def stop(self) -> None:
        """Finish the step that is running, save, and end: what Ctrl-C asks for."""
        self._stop.set()

    async def run(self) -> Outcome:
        """Play, learn and refresh until the last step, a stop, or the first failure that nobody below could mend."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tending = {name: tasks.create_task(self._tend(name)) for name in self.system.rollouts}
                if not self._exact:
                    self._asking = tasks.create_task(self.ask())
                others = [tasks.create_task(work) for work in (self.mourn(tasks), self.heed(tasks))]
                await self.learn(tasks)
                for task in [*others, *filter(None, [self._asking]), *self._tending.values()]:
                    task.cancel()
        except BaseExceptionGroup as failures:
            raise first(failures) from None
        progress = self.progress
        return Outcome(progress.steps, progress.accuracy, self._stop.is_set(), progress.model, progress.because)

    async def ask(self) -> None:
        """Consumes free tickets, produces admitted groups."""
        stall_s = self._patience_s
        if self._synchronous:  # groups start alike at every version, the first too
            await self.versions.until(
                lambda: bool(self.versions.served), "ask", "a first version to be served", stall_s
            )
        again = await self.system.buffer.call(CALL_S, Buffer.steps_due)
        wait_s = stall_s + again * self.recipe.train.step_deadline_s  # tickets are out until steps are done again
        while True:
            self._admitted.put_nowait(await self.system.buffer.call(wait_s + GRACE_S, Buffer.admit, wait_s))
            wait_s = stall_s

    async def play(self, name: str) -> None:
        """Consumes admitted groups, produces ready ones in the buffer, by way of worker `name`."""
        worker, playing = self.system.rollouts[name], self._playing[name]
        while not (self._halted.is_set() or name in self._leaving):
            cause = "its engine to serve the newest version"
            await self.versions.until(lambda: self.versions.fresh(name), f"play on {name}", cause, self._patience_s)
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
            if self._halted.is_set():
                await self.versions.note()

    async def learn(self, tasks: asyncio.TaskGroup) -> None:
        """Consumes takes of P groups, produces versions; ends with a cut that holds everything learned.

        Cuts are written by one of `tasks` while it goes on, but for exact ones: these it waits for. A run that is
        stopped ends what is under way.
        """
        bad = 0
        last = self.recipe.run.steps
        for step in range(self.system.first_step, last):
            if self._stands_at(step):
                await self._stand(step, tasks)
            take = await unless_set(self._stop, self._take(step))
            if take is None:
                break
            report = await self._train(take)
            bad = 0 if report.applied else bad + 1
            if bad >= self.recipe.run.max_bad_steps:
                await self.saver.begin(step, tasks)
                await self.saver.settle()
                raise TrainingError(f"{bad} steps in a row gave no finite loss; the batches are in bad_batches/")
            if not self._exact and self.progress.steps % self.recipe.train.checkpoint_every == 0:
                await self.saver.begin(self.progress.steps, tasks)
            if 0 < self.recipe.run.stop_at_accuracy <= self.progress.accuracy:
                break
        if self._stop.is_set() or self._exact:
            await self._call_in()
        await self.saver.begin(self.progress.steps, tasks)
        await self.saver.settle()
        if not self._stop.is_set():
            self.progress.model = await self.saver.export()
            await self.looks.last(self.versions)

    async def refresh(self, name: str) -> None:
        """Consumes manifests (only the newest), produces served versions and tickets that come home."""
        worker, section = self.system.rollouts[name], self.recipe.weights
        wait_s = self.recipe.run.stall_s + self.recipe.train.step_deadline_s
        owner, cause = f"refresh of {name}", "a newer manifest"
        while True:
            await self.versions.until(lambda: self.versions.behind(name), owner, cause, wait_s)
            manifest = self.versions.newest
            try:
                report = await worker.call(section.refresh_deadline_s + GRACE_S, RolloutWorker.refresh, manifest)
            except DeadlineExceeded as late:
                if late.owner != OWNER:
                    raise
                return await self._give_up(name, late)
            self._record("refresh", worker=name, **msgspec.to_builtins(report))
            if report.gone:  # the trainer has a newer one, of which word is on its way here
                await self.versions.until(lambda: self.versions.newer(manifest), owner, cause)  # noqa: B023
            if not report.served and self.versions.newer(manifest):
                continue  # overtaken while it waited
            if not report.served:
                raise CarrierError(f"{name} refused version {manifest.version}: {report.reason}")
            if report.differs:
                self.progress.note = f"{name}: {report.differs}"
            due = self.looks.due(name, manifest.version.n)
            alone = self._synchronous or self._stands_at(manifest.version.n)
            if due and alone:  # it repeats bit for bit: no group may share the engine with a look
                await self.looks.look(name)
            await self.system.buffer.call(CALL_S, Buffer.served, manifest.version)
            await self.versions.note(served=(name, manifest.version))
            if due and not alone:
                await self.looks.look(name)

    async def mourn(self, tasks: asyncio.TaskGroup) -> None:
        """Consumes deaths. A rollout worker is replaced and its groups posed again, the reward model started again;
        any other death ends the run."""
        while True:
            death = await self.system.runtime.next_death()
            heard, name = self.clock(), self.system.role_of(death.worker)
            self._record("death", worker=death.worker, detail=death.detail)
            self.progress.note = str(death)
            if name not in (*self._tending, SCORER) or self._deaths.get(name, 0) >= MAX_DEATHS:
                raise death
            self._deaths[name] = self._deaths.get(name, 0) + 1
            if name == SCORER:
                await self.system.start_scorer()
            else:
                async with self._roster:
                    await self._clear(name, "worker_died")
                    await self._start_again(name, tasks)
            self._record("replaced", worker=name, seconds=round(self.clock() - heard, 3))

    async def heed(self, tasks: asyncio.TaskGroup) -> None:
        """Consumes notices to leave. A rollout worker is drained; for any other process, the run ends with a cut."""
        while True:
            process = await self.system.runtime.next_notice()
            name = self.system.role_of(process)
            self._record("notice", worker=process)
            self.progress.note = f"{process} was told to leave"
            if name in self._tending and name not in self._leaving:
                tasks.create_task(self.drain(name, tasks))
            elif name not in self._tending:
                self.stop()

    async def drain(self, name: str, tasks: asyncio.TaskGroup) -> None:
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
        async with self._roster:
            await self._see_out(name, drained, began, tasks)

    async def _see_out(self, name: str, drained: Drained, began: float, tasks: asyncio.TaskGroup) -> None:
        await self._clear(name, "drained")
        fault = await self.system.stop_rollout(name)
        told = {"finished": drained.finished, "handed_back": drained.handed_back, "fault": fault}
        self._record("drained", worker=name, seconds=round(self.clock() - began, 3), **told)
        self.progress.note = f"{name} left: {drained.finished} groups finished, {drained.handed_back} go on elsewhere"
        if self.recipe.rollout.replace and not self._stop.is_set():
            await self._start_again(name, tasks)
        else:
            del self._tending[name]
            if not self._tending:
                self.stop()

    def _stands_at(self, step: int) -> bool:
        """Whether nothing is under way between step `step` - 1 and this one: where an exact run is cut, or began."""
        return self._exact and (step == self.system.first_step or step % self.recipe.train.checkpoint_every == 0)

    async def _stand(self, step: int, tasks: asyncio.TaskGroup) -> None:
        """Bring the run to where one that is resumed from this cut begins; then both go on alike (docs/checkpoints.md).

        Nothing is under way, engines serve the newest version and remember nothing, coroutines begin in their order.
        """
        await self._call_in()
        wait_s = self._patience_s + self.recipe.weights.refresh_deadline_s
        await self.versions.until(self._all_current, "learn", "all engines to serve the newest version", wait_s)
        if step > self.system.first_step:
            await self.saver.begin(step, tasks)
            await self.saver.settle()
        async with self._roster:
            await end(self._tending.values(), CALL_S)
            for worker in self.system.rollouts.values():
                with suppress(WorkerDied):  # `mourn` hears of it
                    await worker.call(CALL_S, RolloutWorker.set_out)
            self._halted.clear()
            self._admitted = asyncio.Queue()
            self._tending = {name: tasks.create_task(self._tend(name)) for name in sorted(self._tending)}
            self._asking = tasks.create_task(self.ask())

    async def _call_in(self) -> None:
        """What is under way comes into the buffer, to go on after the cut that follows: here, or in a resumed run."""
        self._halted.set()
        if self._asking is not None:
            await end([self._asking], CALL_S)
        await asyncio.gather(*(self._halt(worker) for worker in self.system.rollouts.values()))
        ended = "all groups under way to have ended"
        await self.versions.until(lambda: not any(self._playing.values()), "learn", ended)
        await self.system.buffer.call(CALL_S, Buffer.call_in)

    async def _halt(self, worker: Ref[RolloutWorker]) -> None:
        with suppress(WorkerDied, DeadlineExceeded):  # what is not handed back is played anew
            await worker.call(CALL_S, RolloutWorker.halt)

    def _all_current(self) -> bool:
        return not any(self.versions.behind(name) for name in self.system.rollouts)

    async def _start_again(self, name: str, tasks: asyncio.TaskGroup) -> None:
        for left in reversed(range(MAX_DEATHS)):
            try:
                await self.system.start_rollout(name)
                break
            except WorkerDied:  # it, or the trainer that it was to meet, died meanwhile
                if not left:
                    raise
        self._tending[name] = tasks.create_task(self._tend(name))

    async def _clear(self, name: str, reason: str) -> None:
        """Worker `name` plays no more: its groups are posed again."""
        await end([self._tending[name]], CALL_S)
        await self.versions.note(gone=name)
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
        await self.versions.note(newest=report.manifest)
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

    def _record(self, kind: str, **fields: Any) -> None:
        self.journal.write({"kind": kind, "at": round(self.clock(), 3), **fields})
