"""The `inline` runtime: every worker in this process, on this event loop. For tests, replay and debugging.

Deterministic: no threads, no sockets, only the order of the event loop. Every call goes through the same encoding as
between processes, so that nothing is shared by accident, and fails in the same ways. Deadlines hold; a worker that
blocks the loop cannot be interrupted.
"""

import asyncio
import copy
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar

from contraflow.errors import ChannelError, DeadlineExceeded, WorkerDied
from contraflow.runtime.base import OWNER, Address, Gang, Ref, Rendezvous
from contraflow.runtime.faults import from_fault, to_fault
from contraflow.runtime.gang import RefGang
from contraflow.runtime.method import method_of
from contraflow.runtime.names import check_names, factory_name, unknown
from contraflow.runtime.service import Service, open_answer
from contraflow.runtime.status import GAVE_UP
from contraflow.runtime.wire import Frame, Frames
from contraflow.telemetry import Clock

W_co = TypeVar("W_co", covariant=True)
W = TypeVar("W")
P = ParamSpec("P")
T = TypeVar("T")


_Reply: TypeAlias = asyncio.Future[tuple[bool, Frames] | WorkerDied]


class _Place:
    """One worker. Invariant: once `death` is set, no call is pending, and none will be answered."""

    def __init__(self, address: Address, service: Service) -> None:
        self.address, self.service = address, service
        self.mates: Sequence[_Place] = (self,)
        self.death: WorkerDied | None = None
        self._pending: dict[_Reply, tuple[asyncio.Task[None], Address | None]] = {}

    async def exchange(self, method: str, frames: Frames, caller: Address | None) -> tuple[bool, Frames]:
        """Run a method as a task of its own; cancelled with its caller."""
        if self.death:
            raise _again(self.death)
        loop = asyncio.get_running_loop()
        reply: _Reply = loop.create_future()
        task = loop.create_task(self._answer(method, frames, reply))
        self._pending[reply] = (task, caller)
        try:
            outcome = await reply
        finally:
            del self._pending[reply]
            task.cancel()  # does nothing once it has answered
        if isinstance(outcome, WorkerDied):
            raise outcome
        return outcome

    def bury(self, death: WorkerDied) -> None:
        """The worker is dead: end its methods and fail its calls."""
        self.death = death
        self._drop(list(self._pending), death)

    def forget(self, caller: Address, death: WorkerDied) -> None:
        """A caller is dead: end the methods it called."""
        self._drop([reply for reply, (_, whose) in self._pending.items() if whose == caller], death)

    def _drop(self, replies: Sequence[_Reply], death: WorkerDied) -> None:
        for reply in replies:
            self._pending[reply][0].cancel()
            if not reply.done():
                reply.set_result(_again(death))

    async def _answer(self, method: str, frames: Frames, reply: _Reply) -> None:
        ok, answer = await self.service.answer(method, frames)
        if not reply.done():
            reply.set_result((ok, _copied(answer)))


class _Switch:
    """Who answers at which address. Invariant: an address, once given out, stays known, dead or alive."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}

    def new_address(self, worker: str) -> Address:
        return Address(worker, f"inline://{len(self._places)}")

    def add(self, place: _Place) -> None:
        self._places[place.address.endpoint] = place

    def find(self, address: Address) -> _Place:
        if address.endpoint not in self._places:
            raise ChannelError(f"no worker {address.worker!r} at {address.endpoint!r} in this runtime")
        return self._places[address.endpoint]

    def bury(self, place: _Place, death: WorkerDied) -> None:
        """A worker is dead: nobody waits for it, and nothing is done for it, any more."""
        place.bury(death)
        for other in self._places.values():
            other.forget(place.address, death)


class InlineRef(Generic[W_co]):
    """A worker of the same process, called as if it were far away."""

    def __init__(self, address: Address, switch: _Switch, caller: Address | None) -> None:
        self._address, self._switch, self._caller = address, switch, caller

    @property
    def address(self) -> Address:
        return self._address

    async def call(
        self,
        deadline_s: float,
        method: Callable[Concatenate[W_co, P], Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """See `Ref.call`."""
        known = method_of(method)
        frames = _copied(known.pack(args, kwargs))
        if self._caller and (death := self._switch.find(self._caller).death):
            raise _again(death)  # the dead call nobody, not even from tasks they left behind
        try:
            async with asyncio.timeout(deadline_s):
                ok, answer = await self._switch.find(self._address).exchange(known.name, frames, self._caller)
        except TimeoutError:
            owner = self._caller.worker if self._caller else OWNER
            raise DeadlineExceeded(owner, f"{self._address.worker}.{known.name}", deadline_s) from None
        result: T = open_answer(known, ok, answer)
        return result


class _InlineHost:
    def __init__(self, address: Address, switch: _Switch, clock: Clock, end: Callable[[str, str], None]) -> None:
        self._address, self._switch, self._clock, self._end = address, switch, clock, end

    @property
    def name(self) -> str:
        return self._address.worker

    @property
    def clock(self) -> Clock:
        return self._clock

    def connect(self, address: Address) -> Ref[Any]:
        return InlineRef(address, self._switch, self._address)

    def give_up(self, reason: str) -> None:
        """See `Host.give_up`."""
        self._end(self._address.worker, f"it {GAVE_UP}{reason}")


class InlineRuntime:
    """Workers in this process. Ranks of a gang share it too, so `torch.distributed` can join only gangs of one.

    Invariant: a name is held from its start until its worker is dead.
    """

    def __init__(self, clock: Clock = time.monotonic, *, stop_s: float = 10.0) -> None:
        """`clock` is what workers see; deadlines use the event loop's own. A worker's `close()` has `stop_s`."""
        self._clock, self._stop_s = clock, stop_s
        self._switch = _Switch()
        self._started: dict[str, list[_Place]] = {}
        self._deaths: asyncio.Queue[WorkerDied] = asyncio.Queue()
        self._notices: asyncio.Queue[str] = asyncio.Queue()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._gangs = 0

    async def start(self, name: str, factory: Callable[..., W], /, **kwargs: Any) -> Ref[W]:
        """See `Runtime.start`."""
        return self._launch(name, {name: kwargs}, factory)[0]

    async def start_gang(self, name: str, size: int, factory: Callable[..., W], /, **kwargs: Any) -> Gang[W]:
        """See `Runtime.start_gang`."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="contraflow-")
        self._gangs += 1
        meeting = f"file://{self._folder.name}/{self._gangs}"
        ranks = {f"{name}-{r}": {**kwargs, "rendezvous": Rendezvous(r, size, meeting)} for r in range(size)}
        return RefGang(self._launch(name, ranks, factory))

    async def stop(self, name: str) -> None:
        """See `Runtime.stop`. Raises, once the worker is gone, what `close()` raised or that it took too long."""
        if name not in self._started:
            raise unknown(name, self._started)
        await self._stop(self._started[name])

    def kill(self, name: str, reason: str = "") -> None:
        """See `Runtime.kill`: no `close()`, its calls fail, its gang dies."""
        places = [place for place in self._all() if place.address.worker == name]
        if not places:
            raise unknown(name, [place.address.worker for place in self._all()])
        self._end(name, reason or f"killed; was running {places[-1].service.running or 'nothing'}")

    async def next_death(self) -> WorkerDied:
        """See `Runtime.next_death`."""
        return await self._deaths.get()

    def notice(self, name: str) -> None:
        """Tell a worker to leave, as SIGTERM tells a process."""
        self._notices.put_nowait(name)

    async def next_notice(self) -> str:
        """See `Runtime.next_notice`."""
        return await self._notices.get()

    async def stacks(self, name: str = "") -> Sequence[Path]:
        """None: everything here is one thread, whose stack is that of whoever asks."""
        return ()

    async def close(self) -> None:
        """See `Runtime.close`. Raises like `stop`, once everything is gone."""
        try:
            await self._stop(self._all())
        finally:
            if self._folder:
                self._folder.cleanup()

    def _end(self, name: str, detail: str) -> None:
        """The latest worker of this name is dead, unless it was already; its gang with it."""
        place = [place for place in self._all() if place.address.worker == name][-1]
        if place.death:
            return
        death = WorkerDied(name, detail)
        for mate in place.mates:
            self._switch.bury(mate, death)
        self._deaths.put_nowait(death)

    def _all(self) -> list[_Place]:
        return [place for places in self._started.values() for place in places]

    def _launch(self, name: str, members: Mapping[str, Mapping[str, Any]], factory: Callable[..., W]) -> list[Ref[W]]:
        alive = {begun: [p.address.worker for p in places if not p.death] for begun, places in self._started.items()}
        check_names(name, members, alive)
        places: list[_Place] = []
        try:
            for member, kwargs in members.items():
                places.append(self._make(member, factory, kwargs))
        except Exception:
            for place in places:
                self._switch.bury(
                    place, WorkerDied(place.address.worker, f"killed: another rank of {name!r} could not start")
                )
            raise
        for place in places:
            place.mates = places
        self._started[name] = places
        return [InlineRef(place.address, self._switch, None) for place in places]

    def _make(self, name: str, factory: Callable[..., Any], kwargs: Mapping[str, Any]) -> _Place:
        address = self._switch.new_address(name)
        try:
            # Copied as another process would have them; functions stay what they are.
            worker = factory(_InlineHost(address, self._switch, self._clock, self._end), **copy.deepcopy(dict(kwargs)))
        except Exception as error:
            raise from_fault(to_fault(error, worker=name, method=factory_name(factory))) from error
        place = _Place(address, Service(name, worker))
        self._switch.add(place)
        return place

    async def _stop(self, places: Sequence[_Place]) -> None:
        failures: list[Exception] = []
        for place in [place for place in places if not place.death]:
            try:
                async with asyncio.timeout(self._stop_s):
                    await place.service.close()
            except TimeoutError:
                failures.append(DeadlineExceeded(OWNER, f"{place.address.worker}.close", self._stop_s))
            except Exception as error:  # noqa: BLE001 - raised below, when all are gone
                failures.append(from_fault(to_fault(error, worker=place.address.worker, method="close")))
            self._switch.bury(place, WorkerDied(place.address.worker, "stopped"))
        if failures:
            raise failures[0]


def _copied(frames: Frames) -> list[Frame]:
    """Frames of their own, writable like those that come out of a socket."""
    return [bytearray(frame) for frame in frames]


def _again(death: WorkerDied) -> WorkerDied:
    return WorkerDied(death.worker, death.detail)
