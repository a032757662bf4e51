"""Request and reply between processes over ZeroMQ: many calls in flight, cancellation, back-pressure.

A `Server` answers for one worker on one endpoint; a `Caller` holds the connections of one process to others.
Endpoints are URLs (`ipc://`, or `tcp://` with a key, see seal.py; nothing here knows the transport). Who is dead is not
found out here: whoever knows says so with `bury`, and every call to that endpoint, pending or new, then fails at once.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar

import msgspec
import zmq

from contraflow.errors import ChannelError, DeadlineExceeded, WorkerDied
from contraflow.runtime import wire
from contraflow.runtime.allowance import Allowance
from contraflow.runtime.base import Address
from contraflow.runtime.link import Link
from contraflow.runtime.method import method_of
from contraflow.runtime.seal import Key, connect
from contraflow.runtime.service import Service, open_answer
from contraflow.runtime.wire import Frame, Frames

W_co = TypeVar("W_co", covariant=True)
P = ParamSpec("P")
T = TypeVar("T")

MAX_CALLS = 1024  # outstanding calls of one process to one worker; more wait, within their deadlines
MAX_BYTES = 256 << 20  # outstanding bytes of arguments of the same
RECONNECT_MS = 10  # a worker is called while it is still binding its endpoint
FLUSH_MS = 1000  # answers already given are still sent when a server closes


class _Call(msgspec.Struct, tag="call", array_like=True, frozen=True):
    id: int
    method: str
    control: bool  # for the process that houses the worker, not for the worker itself
    body: msgspec.Raw  # the first frame of the arguments; the others follow as frames


class _Cancel(msgspec.Struct, tag="cancel", array_like=True, frozen=True):
    id: int


class _Reply(msgspec.Struct, array_like=True, frozen=True):
    id: int
    ok: bool
    body: msgspec.Raw


Answer = tuple[bool, Frames]
Trouble = Callable[[Address], str]
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Socket: TypeAlias = "zmq.Socket[bytes]"
_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(_Call | _Cancel).decode
_decode_reply = msgspec.msgpack.Decoder(_Reply).decode


class Server:
    """Answers calls on one endpoint. Invariant: every call that arrives while it serves is answered exactly once."""

    def __init__(self, socket: Socket) -> None:
        """`socket` is a bound ROUTER of `new_socket`."""
        self._link = Link(socket)
        self._tasks: dict[tuple[bytes, int], asyncio.Task[None]] = {}

    async def serve(self, *, worker: Service | None, control: Service) -> None:
        """Receive until cancelled; each call is a task of its own. Running calls are then cancelled, unanswered."""

        def receive(message: Sequence[zmq.Frame]) -> None:
            caller, head, *frames = message
            request = _decode_request(head.buffer)
            if isinstance(request, _Cancel):
                self._cancel((caller.bytes, request.id))
                return
            service = control if request.control or worker is None else worker
            answering = self._answer(service, caller.bytes, request, _join(request.body, frames))
            self._tasks[caller.bytes, request.id] = group.create_task(answering)

        async with asyncio.TaskGroup() as group:
            self._link.open(receive)
            try:
                await self._link.broken
            finally:
                self._link.close(FLUSH_MS)

    def forget(self, caller: str) -> None:
        """A caller died: nobody waits for its calls."""
        for key in [key for key in self._tasks if key[0] == caller.encode()]:
            self._cancel(key)

    def _cancel(self, key: tuple[bytes, int]) -> None:
        if key in self._tasks:  # soon, not now: a task cancelled before its first step would never answer
            asyncio.get_running_loop().call_soon(self._tasks[key].cancel)

    async def _answer(self, service: Service, caller: bytes, call: _Call, frames: Frames) -> None:
        try:
            ok, answer = await service.answer(call.method, frames)
            reply = _Reply(call.id, ok, msgspec.Raw(answer[0]))
            self._link.send([caller, _encode(reply), *answer[1:]])
        finally:
            del self._tasks[caller, call.id]


class Connection:
    """One process's calls to one endpoint.

    Invariant: a call holds its allowance until the worker answered it, even when its caller gave up; once `grave` is
    set no call is pending and none will be.
    """

    def __init__(self, link: Link, address: Address, owner: str, trouble: Trouble) -> None:
        self._link, self._address, self._owner, self._trouble = link, address, owner, trouble
        self._allowance = Allowance(calls=MAX_CALLS, nbytes=MAX_BYTES)
        self._ids = itertools.count(1)
        self._pending: dict[int, tuple[int, asyncio.Future[Answer | WorkerDied]]] = {}
        self._grave: WorkerDied | None = None
        link.open(self._receive)
        link.broken.add_done_callback(self._on_broken)

    async def call(
        self, deadline_s: float, method: Callable[..., Awaitable[Any]], args: Sequence[Any], kwargs: Any, control: bool
    ) -> Any:
        known = method_of(method)
        frames = known.pack(args, kwargs)
        try:
            async with asyncio.timeout(deadline_s):
                ok, answer = await self._exchange(known.name, control, frames)
        except TimeoutError:
            trouble = self._trouble(self._address)
            cause = f"{self._address.worker}.{known.name}" + (f" ({trouble})" if trouble else "")
            raise DeadlineExceeded(self._owner, cause, deadline_s) from None
        return open_answer(known, ok, answer)

    def bury(self, death: WorkerDied) -> None:
        """The worker is dead: fail every call with a copy of `death`."""
        self._grave = death
        self.close()
        for call in list(self._pending):
            self._finish(call, _again(death))

    def close(self) -> None:
        self._link.close(0)

    async def _exchange(self, method: str, control: bool, frames: list[Frame]) -> Answer:
        size = wire.nbytes(frames)
        await self._allowance.take(size)
        if self._grave:
            self._allowance.give(size)
            raise _again(self._grave)
        call = next(self._ids)
        reply: asyncio.Future[Answer | WorkerDied] = asyncio.get_running_loop().create_future()
        self._pending[call] = (size, reply)
        try:
            request = _Call(call, method, control, msgspec.Raw(frames[0]))
            self._link.send([_encode(request), *frames[1:]])
            outcome = await reply
        except asyncio.CancelledError:
            if call in self._pending:
                self._link.send([_encode(_Cancel(call))])
            raise
        if isinstance(outcome, WorkerDied):
            raise outcome
        return outcome

    def _receive(self, message: Sequence[zmq.Frame]) -> None:
        head, *frames = message
        reply = _decode_reply(head.buffer)
        self._finish(reply.id, (reply.ok, _join(reply.body, frames)))

    def _on_broken(self, broken: asyncio.Future[None]) -> None:
        self.bury(WorkerDied(self._address.worker, f"its channel broke: {broken.exception()!r}"))

    def _finish(self, call: int, outcome: Answer | WorkerDied) -> None:
        size, reply = self._pending.pop(call)
        self._allowance.give(size)
        if not reply.done():  # done: its caller gave up
            reply.set_result(outcome)


class Caller:
    """The connections of one process: one per endpoint, shared by all references to it."""

    def __init__(
        self, context: Context, *, owner: str, identity: str, trouble: Trouble, key: Key | None = None
    ) -> None:
        """`owner` is who waits, in errors; `identity` is unique among callers; `trouble` explains a late answer.

        `key`: that of the run's callers, where channels are sealed.
        """
        self._context, self._owner, self._identity, self._trouble = context, owner, identity, trouble
        self._key = key
        self._connections: dict[str, Connection] = {}
        self._graves: dict[str, WorkerDied] = {}

    def connect(self, address: Address) -> "ChannelRef[Any]":
        return ChannelRef(address, self)

    def bury(self, endpoint: str, death: WorkerDied) -> None:
        """A worker is dead, by the word of the runtime."""
        self._graves[endpoint] = death
        connection = self._connections.pop(endpoint, None)
        if connection:
            connection.bury(death)

    def connection(self, address: Address) -> Connection:
        """The open connection to an address. Raises: WorkerDied, ChannelError for an endpoint that cannot be one."""
        if address.endpoint in self._graves:
            raise _again(self._graves[address.endpoint])
        if address.endpoint not in self._connections:
            socket = new_socket(self._context, zmq.DEALER)
            socket.setsockopt(zmq.ROUTING_ID, self._identity.encode())
            socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
            try:
                connect(socket, address.endpoint, self._key)
            except (zmq.ZMQError, ChannelError) as fault:
                socket.close(linger=0)
                raise ChannelError(f"no channel to {address.worker!r} at {address.endpoint!r}: {fault}") from fault
            self._connections[address.endpoint] = Connection(Link(socket), address, self._owner, self._trouble)
        return self._connections[address.endpoint]

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


class ChannelRef(Generic[W_co]):
    """A worker behind a channel."""

    def __init__(self, address: Address, caller: Caller, *, control: bool = False) -> None:
        self._address, self._caller, self._control = address, caller, control

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
        connection = self._caller.connection(self._address)
        result: T = await connection.call(deadline_s, method, args, kwargs, self._control)
        return result


def bind(context: Context, endpoint: str) -> Socket:
    """A server's socket at an endpoint that only this machine reaches."""
    socket = new_socket(context, zmq.ROUTER)
    socket.bind(endpoint)
    return socket


def new_socket(context: Context, kind: int) -> Socket:
    """A socket without high-water marks, as `Link` wants it."""
    socket = context.socket(kind)
    socket.set_hwm(0)  # the callers' allowances bound what is queued; at a mark ZeroMQ would drop answers silently
    return socket


def _join(body: msgspec.Raw, frames: Sequence[zmq.Frame]) -> list[Frame]:
    return [memoryview(body), *[frame.buffer for frame in frames]]


def _again(death: WorkerDied) -> WorkerDied:
    return WorkerDied(death.worker, death.detail)
