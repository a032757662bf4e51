"""What runtimes of worker processes have in common: starts, ends, and who is told of a death.

Takes houses (house.py) that a runtime builds, gives what base.py promises except stacks, hang watch and closing.
Does not start a process or look after one: that is `local` and `ray`.
"""

import asyncio
import functools
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Generic, TypeVar

from contraflow.errors import ChannelError, DeadlineExceeded, WorkerDied
from contraflow.runtime.base import OWNER, Ref
from contraflow.runtime.channel import Caller, ChannelRef
from contraflow.runtime.gang import GRACE_S, together
from contraflow.runtime.house import House
from contraflow.runtime.names import check_names, unknown
from contraflow.runtime.process import Control, Grave

W = TypeVar("W")
H = TypeVar("H", bound=House)

TELL_S = 60.0  # a worker that has not heard of a death by then is hung, and some call to it will say so


class HousedRuntime(ABC, Generic[H]):
    """Belongs to one event loop.

    Invariant: every process started here is in `_started` until it has ended, and none outlives `close`.
    """

    def __init__(self, caller: Caller, *, start_s: float, stop_s: float) -> None:
        """A start has `start_s` seconds, a worker's `close()` has `stop_s`."""
        self._caller, self._start_s, self._stop_s = caller, start_s, stop_s
        self._born = 0
        self._started: dict[str, list[H]] = {}
        self._graves: list[Grave] = []
        self._deaths: asyncio.Queue[WorkerDied] = asyncio.Queue()
        self._notices: asyncio.Queue[str] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None

    async def start(self, name: str, factory: Callable[..., W], /, **kwargs: Any) -> Ref[W]:
        """See `Runtime.start`."""
        (ref,) = await self._launch(name, [name], factory, kwargs, meeting="")
        return ref

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

    @abstractmethod
    def _build(
        self, members: Sequence[str], factory: Callable[..., Any], kwargs: Mapping[str, Any], meeting: str
    ) -> list[H]:
        """Houses for the workers of one start, in order; those of a gang have a `meeting`, where its ranks meet."""

    @abstractmethod
    async def _watch_all(self) -> None:
        """Look after every worker until cancelled."""

    @abstractmethod
    def _clean(self, house: H) -> None:
        """A house's process is gone: let go of what it held."""

    def _all(self) -> list[H]:
        return [house for houses in self._started.values() for house in houses]

    async def _launch(
        self, name: str, members: Sequence[str], factory: Callable[..., W], kwargs: Mapping[str, Any], meeting: str
    ) -> list[Ref[W]]:
        alive = {begun: [h.name for h in houses if not h.death] for begun, houses in self._started.items()}
        check_names(name, members, alive)
        houses = self._build(members, factory, kwargs, meeting)
        for house in houses:
            house.ended.add_done_callback(functools.partial(self._on_ended, house))
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

    async def _open(self, house: H) -> None:
        try:
            async with asyncio.timeout(self._start_s):
                await house.open()
        except TimeoutError:
            raise DeadlineExceeded(OWNER, f"the start of worker {house.name!r}", self._start_s) from None

    async def _stop(self, houses: Iterable[H]) -> None:
        ends = []
        for house in houses:
            house.watched = False
            ends.append(house.leave(willing=True) if house.death else house.stop(self._stop_s))
        outcomes = await asyncio.gather(*ends, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                outcome.__suppress_context__ = False  # show also what was being handled, when this ends a failed run
                raise outcome

    def _on_ended(self, house: H, ended: "asyncio.Future[int]") -> None:
        code = ended.result()
        epitaph = house.epitaph(code)
        self._clean(house)
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

    def _bury(self, house: H, death: WorkerDied) -> None:
        """Nobody may wait for this worker any longer; a rank of a broken gang is still alive, but not for long."""
        house.death, house.watched = death, False
        house.kill()
        if not house.address.endpoint:  # nobody ever knew it
            return
        grave = Grave(house.address.endpoint, death.worker, death.detail)
        self._graves.append(grave)
        self._caller.bury(grave.endpoint, death)
        for other in self._all():
            if not other.death and other.address.endpoint:
                self._spawn(_tell(other.control, grave))

    def _spawn(self, telling: Any) -> None:
        """Run something small that nobody waits for; it ends with `close`."""
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(telling)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _tell(control: Ref[Control], grave: Grave) -> None:
    try:
        await control.call(TELL_S, Control.bury, grave)
    except (WorkerDied, DeadlineExceeded):
        return  # it calls nobody any more


def pack_plan(name: str, factory: Callable[..., Any], kwargs: Mapping[str, Any]) -> bytes:
    """A factory and its arguments for another process. Raises: ChannelError for what cannot go there."""
    try:
        return bytes(ForkingPickler.dumps((factory, kwargs)))
    except (pickle.PicklingError, AttributeError, TypeError) as fault:
        raise ChannelError(
            f"cannot send the factory of {name!r} or its arguments to another process: {fault}; "
            "give a function of a module, and plain values"
        ) from fault
