"""What the `ray` runtime needs of a cluster: places, processes in them, and whether its head lives.

The one implementation is ray.py.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from contraflow.runtime.actor import Door
from contraflow.runtime.pools import Berths
from contraflow.runtime.process import Setup

T = TypeVar("T")

CONNECT_S = 1.0  # for a machine to say that a port is closed, or open


class Machine(msgspec.Struct, frozen=True):
    """One machine of a cluster: its id and address, and what it offers, by name of resource."""

    id: str
    host: str
    offers: Mapping[str, float]


class Process(Protocol):
    """A process on a machine of the cluster; see actor.py for what it is asked to do."""

    async def open(self, host: str, callers: bytes, folder: str) -> Door:
        """Raises: ClusterError when there is no process, or it died."""
        ...

    def live(self, setup: Setup, keeper: int) -> None: ...

    def kill(self) -> None:
        """End it, without waiting for anything."""
        ...


class Reservation(Protocol):
    """Resources that are held for workers."""

    @property
    def machines(self) -> Sequence[str]:
        """The machine's id of each bundle."""
        ...

    def start(self, bundle: int) -> Process: ...

    def release(self) -> None: ...


class Cluster(Protocol):
    """A cluster. Raises ClusterError wherever it cannot do what it is asked."""

    async def join(self) -> None: ...

    async def machines(self) -> list[Machine]: ...

    async def reserve(self, berths: Berths, within_s: float) -> Reservation: ...

    def start_on(self, machine: str) -> Process:
        """A process that takes nothing of the machine's resources."""
        ...

    @property
    def head(self) -> tuple[str, int]:
        """Host and port at which the head answers while it lives."""
        ...

    async def leave(self) -> None: ...


async def knock(host: str, port: int) -> bool | None:
    """Whether somebody listens there, as the machine says; None when it says nothing for `CONNECT_S`."""
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return False
    except (OSError, TimeoutError):
        return None
    writer.close()
    return True


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Run a blocking call in a thread of its own. It keeps nobody: not who stops waiting, not the interpreter."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if done.done():  # nobody waits any more
            return
        if error is None:
            done.set_result(result)  # type: ignore[arg-type]
        else:
            done.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = function(*args)
        except BaseException as error:  # noqa: BLE001 - raised where it was asked for
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, result, failure)

    threading.Thread(target=run, name=getattr(function, "__name__", "call"), daemon=True).start()
    return await done
