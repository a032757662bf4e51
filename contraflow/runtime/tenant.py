"""One worker's process on another machine, from the outside; see house.py. What is known of it, its warden said."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from contraflow.errors import ChannelError, DeadlineExceeded, WorkerDied
from contraflow.runtime.actor import Door
from contraflow.runtime.base import Address, Ref
from contraflow.runtime.channel import Caller, ChannelRef
from contraflow.runtime.cluster import Machine, Process, Reservation
from contraflow.runtime.faults import from_fault
from contraflow.runtime.house import House, describe_end
from contraflow.runtime.pools import Berths
from contraflow.runtime.process import Control
from contraflow.runtime.status import LEFT, Status
from contraflow.runtime.warden import End, Warden

SETTLE_S = 5.0  # for a start that is not wanted any more to end
STRIKE_S = 1.0  # for a warden to end a process; then the cluster is asked to


MoveIn = Callable[["Tenant"], Coroutine[Any, Any, None]]
Plan = Callable[[], Coroutine[Any, Any, tuple[Berths, Reservation]]]


class Berth:
    """The places of one start. Workers of a gang wait for the same reservation, and learn where rank 0 is met."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._reserving: asyncio.Future[tuple[Berths, Reservation]] | None = None
        self.meeting: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def reserved(self) -> tuple[Berths, Reservation]:
        """All or nothing. Raises: ClusterError."""
        self._reserving = self._reserving or asyncio.ensure_future(self._plan())
        return await asyncio.shield(self._reserving)

    def release(self) -> None:
        """No worker is here any more."""
        self.meeting.cancel()
        if self._reserving and not self._reserving.cancel() and self._reserving.exception() is None:
            self._reserving.result()[1].release()


class Keeper:
    """A machine that workers live on, by its warden."""

    def __init__(self, machine: Machine, door: Door, caller: Caller, process: Process) -> None:
        """`process`: the warden's, behind its `door`."""
        self.host, self.offers = machine.host, machine.offers
        self.address, self.pid, self.folder, self.process = (
            warden_address(machine, door),
            door.pid,
            door.folder,
            process,
        )
        self.warden: Ref[Warden] = ChannelRef(self.address, caller)
        self.control: Ref[Control] = ChannelRef(self.address, caller, control=True)
        self.known = 0  # ends that were heard of
        self.silent_s = 0.0
        self.lost = ""  # why it is not there any more


def warden_address(machine: Machine, door: Door) -> Address:
    return Address(f"warden-{machine.host}", door.endpoint)


class Tenant(House):
    """A process that a cluster made. `ended` has 0 if it left in order."""

    def __init__(self, name: str, *, number: int, rank: int, berth: Berth, caller: Caller, move_in: "MoveIn") -> None:
        """`move_in` starts the process, and sets `process`, `keeper` and `address` as they become known."""
        super().__init__(name, number=number)
        self.rank, self.berth = rank, berth
        self.keeper: Keeper | None = None
        self.process: Process | None = None
        self._caller, self._move_in = caller, move_in
        self._moving: asyncio.Task[None] | None = None
        self._striking: asyncio.Task[None] | None = None
        self._last: Status | None = None
        self.trouble = ""  # why it may be slow to answer

    @property
    def control(self) -> Ref[Control]:
        """See `House.control`."""
        return ChannelRef(self.address, self._caller, control=True)

    async def open(self) -> None:
        """See `House.open`. Raises ClusterError too."""
        if self.ended.done():
            raise ChannelError(f"worker {self.name!r} was stopped before it began")
        self._moving = asyncio.get_running_loop().create_task(self._move_in(self))
        await asyncio.shield(self._moving)
        fault = await self.control.call(float("inf"), Control.ready)
        if fault:
            raise from_fault(fault)

    async def stop(self, stop_s: float) -> None:
        """See `House.stop`."""
        if self.entered:
            return await super().stop(stop_s)
        await self.leave(willing=False)

    async def settle(self) -> bool:
        """See `House.settle`."""
        if self._moving and not self._moving.done():
            self._moving.cancel()
            await asyncio.wait({self._moving}, timeout=SETTLE_S)
        if self.process and not self.entered:
            self.process.kill()
        return self.entered

    @property
    def entered(self) -> bool:
        """A process is there, and its warden has it in view."""
        return bool(self.keeper and self.address.endpoint)

    def kill(self, reason: str = "") -> None:
        """See `House.kill`."""
        if self.ended.done():
            return
        self._blame = self._blame or reason
        if self.entered:
            self._striking = asyncio.get_running_loop().create_task(self._strike())
        elif self.process:
            self.process.kill()

    async def _strike(self) -> None:
        assert self.keeper is not None
        assert self.process is not None
        try:
            await self.keeper.warden.call(STRIKE_S, Warden.kill, self.number)
        except (DeadlineExceeded, WorkerDied, ChannelError):
            self.process.kill()

    def end(self, end: End) -> None:
        """Its warden saw it go."""
        if not self.ended.done():
            self._last = end.last
            self.ended.set_result(0 if end.last and end.last.running == LEFT else 1)

    def lose(self) -> None:
        """Its machine is gone, as its keeper says."""
        if not self.ended.done():
            self.ended.set_result(1)

    def epitaph(self, code: int) -> str:
        """See `House.epitaph`."""
        lost = self.keeper.lost if self.keeper else ""
        return self._blame or lost or describe_end("its process ended", self._last)
