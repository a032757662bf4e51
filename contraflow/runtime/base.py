"""What every runtime offers: start a worker, call its methods, know when it dies.

A worker is a plain object whose public methods are `async def` with annotated arguments and result; the annotations are
the wire format (msgspec). A factory makes it: `factory(host, **kwargs) -> worker`, run where the worker lives.
A `Ref` is how anyone calls it, from the loop or from another worker; it travels as an `Address`.
"""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import msgspec

from contraflow.errors import WorkerDied
from contraflow.telemetry import Clock

W_co = TypeVar("W_co", covariant=True)
P = ParamSpec("P")
T = TypeVar("T")

OWNER = "loop"  # who waits, in errors of calls that no worker made: of those that the runtime's own process makes


class Address(msgspec.Struct, frozen=True):
    """Where a worker answers: its name, and an endpoint only the runtime understands."""

    worker: str
    endpoint: str


class Ref(Protocol[W_co]):
    """A worker, from the outside."""

    @property
    def address(self) -> Address: ...

    async def call(
        self,
        deadline_s: float,
        method: Callable[Concatenate[W_co, P], Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run `method` on the worker and give its result.

        Raises: DeadlineExceeded (naming worker and method), WorkerDied, ChannelError, the worker's own ContraflowError,
        or RemoteError for any other exception it raised.

        >>> take = await buffer.call(60, Buffer.take, step)
        """
        ...


class Host(Protocol):
    """What a worker may use of the place it lives in."""

    @property
    def name(self) -> str: ...

    @property
    def clock(self) -> Clock: ...

    def connect(self, address: Address) -> Ref[Any]:
        """A reference to another worker; calls go worker to worker, not through the loop."""
        ...

    def give_up(self, reason: str) -> None:
        """End this worker as one that died, with `reason` in its `WorkerDied`; from any thread. Calls fail at once."""
        ...


class Rendezvous(msgspec.Struct, frozen=True):
    """A gang member's place: `rank` of `world`, and the `torch.distributed` init method they share."""

    rank: int
    world: int
    init_method: str


class Gang(Protocol[W_co]):
    """Workers that live and die together: ranks of a trainer, ranks of one engine."""

    @property
    def refs(self) -> Sequence[Ref[W_co]]: ...

    async def call(
        self,
        deadline_s: float,
        method: Callable[Concatenate[W_co, P], Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """Run `method` on every rank at once; results by rank. One failure fails the call; one death kills the gang."""
        ...


class Runtime(Protocol):
    """Starts workers and watches them."""

    async def start(self, name: str, factory: Callable[..., W_co], /, **kwargs: Any) -> Ref[W_co]:
        """Start one worker; `factory(host, **kwargs)` runs in its place. Raises what the factory raised."""
        ...

    async def start_gang(self, name: str, size: int, factory: Callable[..., W_co], /, **kwargs: Any) -> Gang[W_co]:
        """Start `size` workers `name-0`, `name-1`, ...: `factory(host, rendezvous=Rendezvous(...), **kwargs)`."""
        ...

    async def stop(self, name: str) -> None:
        """Stop one worker or gang, by the name it was started with; its `close()` runs first if it has one."""
        ...

    async def next_death(self) -> WorkerDied:
        """Wait for the next worker that dies unasked. Never raises it: the caller decides by role.

        A worker that shows no sign of life for the runtime's `hang_s` is killed, and dies unasked too.
        """
        ...

    async def next_notice(self) -> str:
        """Wait for the next worker whose process is told to leave, as by the notice that a machine goes; its name."""
        ...

    def kill(self, name: str, reason: str = "") -> None:
        """Kill one worker process, as a fault would; `next_death` reports it, with `reason` if there is one."""
        ...

    async def stacks(self, name: str = "") -> Sequence[Path]:
        """Have worker `name`, or every worker, write the stacks of its threads to RUN/stacks; the files written."""
        ...

    async def close(self) -> None:
        """Stop everything; safe to call twice."""
        ...
