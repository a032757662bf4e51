"""The `local` runtime: a process per worker on this machine, called over ZeroMQ sockets in a private folder.

Processes come from a fork server that has torch in memory. A process that ends unasked is noticed by its sentinel,
named to whoever waits in `next_death`, and made known to every other worker; one that hangs is killed (watch.py), and
named likewise. All of them end with `close`.
"""

import asyncio
import multiprocessing
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeVar

import zmq

from contraflow.errors import ChannelError, DeadlineExceeded, WorkerDied
from contraflow.runtime import process
from contraflow.runtime.base import OWNER, Address, Gang, Ref, Rendezvous
from contraflow.runtime.channel import Caller, ChannelRef
from contraflow.runtime.gang import GRACE_S, RefGang, together
from contraflow.runtime.house import House
from contraflow.runtime.names import check_names, unknown
from contraflow.runtime.process import Control, Grave, Setup
from contraflow.runtime.status import read_status
from contraflow.runtime.watch import DUMP_S, LOOK_S, keep_stacks
from contraflow.telemetry import Clock

W = TypeVar("W")

MAX_PATH = 90  # bytes of a socket's path; the system allows about 107
TELL_S = 60.0  # a worker that has not heard of a death by then is hung, and some call to it will say so


class LocalRuntime:
    """Starts and watches worker processes. Belongs to one event loop.

    Invariant: every process started here is in `_started` until it has ended, and none outlives `close`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        threads: int = 1,
        clock: Clock = time.monotonic,
        start_s: float = 120.0,
        stop_s: float = 10.0,
        hang_s: float = 60.0,
        preload: Sequence[str] = (),
    ) -> None:
        """`folder` gets a private sub-folder for sockets, and `stacks/`; `threads` are torch threads of each worker.

        `clock` is one that processes share. A start has `start_s` seconds, a worker's `close()` has `stop_s`; a worker
        that shows no sign of life for `hang_s` is killed.
        `preload` names modules that workers need: the first runtime of a process has its fork server import them.
        """
        self._threads, self._clock, self._start_s, self._stop_s = threads, clock, start_s, stop_s
        self._hang_s, self._stacks = hang_s, folder / "stacks"
        self._folder = _private_folder(folder)
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["contraflow.runtime.preload", *preload])
        self._hand = ThreadPoolExecutor(1, thread_name_prefix="processes")
        self._context = zmq.Context()
        self._caller = Caller(
            self._context, owner=OWNER, identity=OWNER, trouble=lambda address: process.trouble(address, clock)
        )
        self._born = 0
        self._started: dict[str, list[House]] = {}
        self._graves: list[Grave] = []
        self._deaths: asyncio.Queue[WorkerDied] = asyncio.Queue()
        self._notices: asyncio.Queue[str] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None

    async def start(self, name: str, factory: Callable[..., W], /, **kwargs: Any) -> Ref[W]:
        """See `Runtime.start`."""
        (ref,) = await self._launch(name, {name: kwargs}, factory)
        return ref

    async def start_gang(self, name: str, size: int, factory: Callable[..., W], /, **kwargs: Any) -> Gang[W]:
        """See `Runtime.start_gang`. The ranks meet in a file."""
        meeting = f"file://{self._folder}/{self._born}.rendezvous"
        ranks = {f"{name}-{r}": {**kwargs, "rendezvous": Rendezvous(r, size, meeting)} for r in range(size)}
        return RefGang(await self._launch(name, ranks, factory))

    async def stop(self, name: str) -> None:
        """See `Runtime.stop`. Raises, once the process is gone, what `close()` raised or that it took too long."""
        if name not in self._started:
            raise unknown(name, self._started)
        await self._stop(self._started[name])

    def kill(self, name: str, reason: str = "") -> None:
        """See `Runtime.kill`."""
        houses = [house for house in self._all() if house.name == name]
        if not houses:
            raise unknown(name, [house.name for house in self._all()])
        houses[-1].kill(reason)

    async def next_death(self) -> WorkerDied:
        """See `Runtime.next_death`."""
        return await self._deaths.get()

    async def next_notice(self) -> str:
        """See `Runtime.next_notice`."""
        return await self._notices.get()

    async def stacks(self, name: str = "") -> Sequence[Path]:
        """See `Runtime.stacks`. Takes `DUMP_S`; workers that are stopped have none to give."""
        asked = [h for h in self._all() if h.watched and name in ("", h.name) and not h.ask_for_stacks()]
        if asked:
            await asyncio.sleep(DUMP_S)
        paths = {house: self._stacks / f"{house.name}-{house.number}.txt" for house in asked}
        return [path for house, path in paths.items() if keep_stacks(process.stack_path(house.address), path)]

    async def close(self) -> None:
        """See `Runtime.close`. Raises like `stop`, once everything is gone."""
        if self._watch:
            self._watch.cancel()
        try:
            await self._stop(self._all())
        finally:
            await asyncio.gather(*[house.leave(willing=False) for house in self._all()])
            for task in self._tasks:
                task.cancel()
            self._caller.close()
            self._context.destroy(linger=0)
            self._hand.shutdown(wait=False)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _all(self) -> list[House]:
        return [house for houses in self._started.values() for house in houses]

    async def _launch(
        self, name: str, members: Mapping[str, Mapping[str, Any]], factory: Callable[..., W]
    ) -> list[Ref[W]]:
        alive = {begun: [h.name for h in houses if not h.death] for begun, houses in self._started.items()}
        check_names(name, members, alive)
        houses = [self._build(member, factory, kwargs) for member, kwargs in members.items()]
        dying = self._started.get(name, [])
        self._started[name] = houses
        try:
            await asyncio.gather(*[house.leave(willing=True) for house in dying])
            await together([self._open(house) for house in houses], GRACE_S)
            for house in houses:
                if house.death:  # while its mates were still being made
                    raise house.death
        except BaseException:
            await asyncio.gather(*[house.leave(willing=False) for house in houses])
            raise
        for house in houses:
            house.watched = True
        self._watch = self._watch or asyncio.get_running_loop().create_task(self._watch_all())
        return [ChannelRef(house.address, self._caller) for house in houses]

    def _build(self, name: str, factory: Callable[..., Any], kwargs: Mapping[str, Any]) -> House:
        try:
            plan = bytes(ForkingPickler.dumps((factory, kwargs)))
        except (pickle.PicklingError, AttributeError, TypeError) as fault:
            raise ChannelError(
                f"cannot send the factory of {name!r} or its arguments to another process: {fault}; "
                "give a function of a module, and plain values"
            ) from fault
        self._born += 1
        address = Address(name, f"ipc://{self._folder}/{self._born}")
        setup = Setup(
            address=address,
            threads=self._threads,
            clock=self._clock,
            environment=dict(os.environ),
            graves=tuple(self._graves),
            plan=plan,
        )
        child = self._processes.Process(target=process.main, args=(setup,), name=name, daemon=True)
        control: Ref[Control] = ChannelRef(address, self._caller, control=True)
        house = House(address, child, self._hand, control, number=self._born)
        house.ended.add_done_callback(lambda ended: self._on_end(house, ended.result()))
        return house

    async def _open(self, house: House) -> None:
        try:
            async with asyncio.timeout(self._start_s):
                await house.open()
        except TimeoutError:
            raise DeadlineExceeded(OWNER, f"the start of worker {house.name!r}", self._start_s) from None

    async def _stop(self, houses: Iterable[House]) -> None:
        ends = []
        for house in houses:
            house.watched = False
            ends.append(house.leave(willing=True) if house.death else house.stop(self._stop_s))
        outcomes = await asyncio.gather(*ends, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                outcome.__suppress_context__ = False  # show also what was being handled, when this ends a failed run
                raise outcome

    async def _watch_all(self) -> None:
        """Look at every worker's page from time to time: heartbeats wake nobody."""
        while True:
            await asyncio.sleep(LOOK_S)
            for house in [house for house in self._all() if house.watched and not house.death]:
                status = read_status(process.status_path(house.address))
                if status is None:
                    continue
                if status.leaving and not house.noticed:
                    house.noticed = True
                    self._notices.put_nowait(house.name)
                if trouble := house.patient.look(self._clock(), status, self._hang_s):
                    await self._give_up(house, trouble)

    async def _give_up(self, house: House, trouble: str) -> None:
        """Kill a worker that hangs; what can be had of its stack is kept."""
        paths = await self.stacks(house.name)
        why = house.ask_for_stacks() or "it wrote none"
        house.kill(f"{trouble}; its stacks: {paths[0] if paths else why}")

    def _on_end(self, house: House, code: int) -> None:
        epitaph = house.epitaph(code)
        house.clean()
        if house.death:
            return
        if not house.watched:
            how = f"while it was started or stopped: {epitaph}" if code else "stopped"
            self._bury(house, WorkerDied(house.name, how))
            return
        death = WorkerDied(house.name, epitaph)
        for mate in next(houses for houses in self._started.values() if house in houses):
            self._bury(mate, death)
        self._deaths.put_nowait(death)

    def _bury(self, house: House, death: WorkerDied) -> None:
        """Nobody may wait for this worker any longer; a rank of a broken gang is still alive, but not for long."""
        house.death, house.watched = death, False
        house.kill()
        grave = Grave(house.address.endpoint, death.worker, death.detail)
        self._graves.append(grave)
        self._caller.bury(grave.endpoint, death)
        for other in self._all():
            if not other.death:
                telling = asyncio.get_running_loop().create_task(_tell(other, grave))
                self._tasks.add(telling)
                telling.add_done_callback(self._tasks.discard)


async def _tell(house: House, grave: Grave) -> None:
    try:
        await house.control.call(TELL_S, Control.bury, grave)
    except (WorkerDied, DeadlineExceeded):
        return  # it calls nobody any more


def _private_folder(folder: Path) -> Path:
    """A new folder that only this user can enter (mode 0700), with a path short enough for a socket."""
    folder.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix=".workers-", dir=folder.resolve()))
    if len(os.fsencode(path)) <= MAX_PATH:
        return path
    path.rmdir()
    return Path(tempfile.mkdtemp(prefix="contraflow-"))
