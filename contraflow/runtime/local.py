"""The `local` runtime: a process per worker on this machine, called over ZeroMQ sockets in a private folder.

Processes come from a fork server that has torch in memory. A process that ends unasked is noticed by its sentinel,
named to whoever waits in `next_death`, and made known to every other worker; one that hangs is killed (watch.py), and
named likewise. All of them end with `close`.
"""

import asyncio
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import zmq

from contraflow.runtime import process
from contraflow.runtime.base import OWNER, Address, Gang, Ref, Rendezvous
from contraflow.runtime.channel import Caller, ChannelRef
from contraflow.runtime.gang import RefGang
from contraflow.runtime.house import ProcessHouse
from contraflow.runtime.housed import HousedRuntime, pack_plan
from contraflow.runtime.process import Control, Setup
from contraflow.runtime.status import read_status
from contraflow.runtime.watch import DUMP_S, LOOK_S, keep_stacks
from contraflow.telemetry import Clock

W = TypeVar("W")

MAX_PATH = 90  # bytes of a socket's path; the system allows about 107


class LocalRuntime(HousedRuntime[ProcessHouse]):
    """Starts and watches worker processes of this machine."""

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
        self._context = zmq.Context()
        caller = Caller(self._context, owner=OWNER, identity=OWNER, trouble=lambda a: process.trouble(a, clock))
        super().__init__(caller, start_s=start_s, stop_s=stop_s)
        self._threads, self._clock = threads, clock
        self._hang_s, self._stacks = hang_s, folder / "stacks"
        self._folder = _private_folder(folder)
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["contraflow.runtime.preload", *preload])
        self._hand = ThreadPoolExecutor(1, thread_name_prefix="processes")

    async def start_gang(self, name: str, size: int, factory: Callable[..., W], /, **kwargs: Any) -> Gang[W]:
        """See `Runtime.start_gang`. The ranks meet in a file."""
        meeting = f"file://{self._folder}/{self._born}.rendezvous"
        return RefGang(await self._launch(name, [f"{name}-{r}" for r in range(size)], factory, kwargs, meeting))

    async def stacks(self, name: str = "") -> Sequence[Path]:
        """See `Runtime.stacks`. Takes `DUMP_S`; workers that are stopped have none to give."""
        asked = [h for h in self._all() if h.watched and name in ("", h.name) and not h.ask_for_stacks()]
        if asked:
            await asyncio.sleep(DUMP_S)
        paths = {house: self._stacks / f"{house.name}-{house.number}.txt" for house in asked}
        return [path for house, path in paths.items() if keep_stacks(process.stack_path(house.files), path)]

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

    def _build(
        self, members: Sequence[str], factory: Callable[..., Any], kwargs: Mapping[str, Any], meeting: str
    ) -> list[ProcessHouse]:
        houses = []
        for rank, name in enumerate(members):
            place = {"rendezvous": Rendezvous(rank, len(members), meeting)} if meeting else {}
            plan = pack_plan(name, factory, {**kwargs, **place})
            self._born += 1
            address = Address(name, f"ipc://{self._folder}/{self._born}")
            setup = Setup(
                address=address,
                files=f"{self._folder}/{self._born}",
                threads=self._threads,
                clock=self._clock,
                environment=dict(os.environ),
                graves=tuple(self._graves),
                plan=plan,
            )
            child = self._processes.Process(target=process.main, args=(setup,), name=name, daemon=True)
            control: Ref[Control] = ChannelRef(address, self._caller, control=True)
            houses.append(ProcessHouse(address, child, self._hand, control, number=self._born))
        return houses

    def _clean(self, house: ProcessHouse) -> None:
        house.clean()

    async def _watch_all(self) -> None:
        """Look at every worker's page from time to time: heartbeats wake nobody."""
        while True:
            await asyncio.sleep(LOOK_S)
            for house in [house for house in self._all() if house.watched and not house.death]:
                status = read_status(process.status_path(house.files))
                if status is None:
                    continue
                if status.leaving and not house.noticed:
                    house.noticed = True
                    self._notices.put_nowait(house.name)
                if trouble := house.patient.look(self._clock(), status, self._hang_s):
                    await self._give_up(house, trouble)

    async def _give_up(self, house: ProcessHouse, trouble: str) -> None:
        """Kill a worker that hangs; what can be had of its stack is kept."""
        paths = await self.stacks(house.name)
        why = house.ask_for_stacks() or "it wrote none"
        house.kill(f"{trouble}; its stacks: {paths[0] if paths else why}")


def _private_folder(folder: Path) -> Path:
    """A new folder that only this user can enter (mode 0700), with a path short enough for a socket."""
    folder.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix=".workers-", dir=folder.resolve()))
    if len(os.fsencode(path)) <= MAX_PATH:
        return path
    path.rmdir()
    return Path(tempfile.mkdtemp(prefix="contraflow-"))
