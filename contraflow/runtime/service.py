"""A worker object as others see it: a method name and frames in, frames out. The same on every runtime.

Answers every call exactly once, with a result or a fault, and knows which methods are running.
Does not move bytes between processes.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from contraflow.errors import ChannelError
from contraflow.runtime import wire
from contraflow.runtime.faults import Fault, from_fault, to_fault
from contraflow.runtime.method import Method, method_of
from contraflow.runtime.wire import Frame, Frames


class Service:
    """Calls public methods of `worker` by name.

    Invariant: `running` counts exactly the methods that have begun and not ended; `changed` hears of every change.
    """

    def __init__(self, name: str, worker: object, changed: Callable[[str], None] = lambda running: None) -> None:
        self._name = name
        self._worker = worker
        self._changed = changed
        self._running: Counter[str] = Counter()

    @property
    def running(self) -> str:
        """Methods in flight, such as `run_group x3, report`; empty when idle."""
        return describe_running(self._running)

    async def answer(self, name: str, frames: Frames) -> tuple[bool, list[Frame]]:
        """Run a method; `(True, frames of the result)` or `(False, frames of a Fault)`. Cancelling it gives a fault."""
        self._count(name, +1)
        try:
            method, function = self._find(name)
            return True, wire.encode(await function(**method.unpack(frames)))
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the caller gets it, whatever it is
            return False, wire.encode(to_fault(error, worker=self._name, method=name))
        finally:
            self._count(name, -1)

    async def close(self) -> None:
        """Run the worker's own `close()`, if it has one."""
        if hasattr(self._worker, "close"):
            await self._worker.close()

    def _find(self, name: str) -> tuple[Method, Callable[..., Any]]:
        function = None if name.startswith("_") else getattr(type(self._worker), name, None)
        if not callable(function):
            public = [n for n in dir(type(self._worker)) if not n.startswith("_")]
            raise ChannelError(f"worker {self._name!r} has no method {name!r}; it has: {', '.join(public)}")
        return method_of(function), getattr(self._worker, name)

    def _count(self, name: str, step: int) -> None:
        self._running[name] += step
        if not self._running[name]:
            del self._running[name]
        self._changed(self.running)


def describe_running(counts: Counter[str]) -> str:
    """`take, run_group x3`; empty for none."""
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in counts.items())


def open_answer(method: Method, ok: bool, frames: Frames) -> Any:
    """The result of a call, or raise what the worker raised."""
    if ok:
        return method.unpack_result(frames)
    raise from_fault(wire.decode(frames, Fault))
