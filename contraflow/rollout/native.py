"""Our own engine: a decoder behind the generation seam, continuously batched over a paged KV cache.

The computing is `core.py` (what a step does), `schedule.py` (who is in it), `rows.py`, `passes.py` and `sampling.py`
(how it is computed), `exchange.py` and `graphs.py` (without the host waiting), `swap.py` (new weights), `rest.py` (no
memory for a while). This file is the seam: futures in front, a stepper behind. `gang.py` puts a core that is spread
over ranks behind the same seam.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from torch import Tensor

from contraflow.config import Engine as EngineSection
from contraflow.errors import EngineError
from contraflow.model.decoder import Decoder
from contraflow.rollout.core import EngineCore
from contraflow.rollout.engine import EngineReport
from contraflow.rollout.stepping import InlineStepper, Stepper, ThreadStepper, Work
from contraflow.telemetry import Clock
from contraflow.types import Completion, Probe, Request, Version


class Core(Work, Protocol):
    """What computes: see `EngineCore`. Commands and steps run on one thread; `check` and `report` on any."""

    @property
    def version(self) -> Version | None: ...

    def check(self, request: Request) -> None: ...

    def submit(self, request: Request, waiter: object) -> None: ...

    def abort(self, ids: Sequence[str]) -> None: ...

    def swap(self, version: Version, tensors: Mapping[str, Tensor], probe: Probe) -> float: ...

    def report(self) -> EngineReport: ...


class CoreEngine:
    """An `Engine` in front of a core.

    Args: `stepping` "thread" runs steps on a thread of its own, "inline" in the caller's loop, deterministically.

    Invariant: an id is in `_ids` while its `generate` runs; every such call ends with one outcome of the core.
    """

    def __init__(self, core: Core, stepping: Literal["thread", "inline"]) -> None:
        self._core = core
        self._stepper: Stepper = ThreadStepper(core) if stepping == "thread" else InlineStepper(core)
        self._ids: set[str] = set()
        self._closed = False

    @property
    def version(self) -> Version | None:
        """See `Engine`."""
        return self._core.version

    async def generate(self, request: Request) -> Completion:
        """See `Engine`."""
        self._refuse_if_closed()
        if self.version is None:
            raise EngineError(f"request {request.id!r}: the engine serves no version yet; swap one in first")
        if request.id in self._ids:
            raise EngineError(f"request {request.id!r} is already in flight; give each an id of its own")
        self._core.check(request)
        waiter: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._ids.add(request.id)
        self._stepper.post(lambda: self._core.submit(request, waiter))
        try:
            return await waiter
        except asyncio.CancelledError:
            self._stepper.post(lambda: self._core.abort([request.id]))
            raise
        finally:
            self._ids.discard(request.id)

    async def abort(self, ids: Sequence[str]) -> None:
        """See `Engine`."""
        self._refuse_if_closed()
        await self._stepper.ask(lambda: self._core.abort(ids))

    async def swap(self, version: Version, tensors: Mapping[str, Tensor], probe: Probe) -> float:
        """See `Engine`."""
        self._refuse_if_closed()
        return await self._stepper.ask(lambda: self._core.swap(version, tensors, probe))

    def report(self) -> EngineReport:
        """See `Engine`."""
        return self._core.report()

    async def close(self) -> None:
        """See `Engine`."""
        if not self._closed:
            self._closed = True
            await self._stepper.close()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")


class NativeEngine(CoreEngine):
    """An `Engine` of one process. It owns the decoder from here on: weights change only through `swap`.

    `version` is what the decoder's weights are, if they may be served as they are.
    """

    def __init__(
        self,
        decoder: Decoder,
        section: EngineSection,
        *,
        clock: Clock,
        stepping: Literal["thread", "inline"] = "thread",
        version: Version | None = None,
    ) -> None:
        core = EngineCore(decoder, section, clock=clock, version=version)
        super().__init__(core, stepping)
        self._parts = core
        self._awake = asyncio.Event()
        self._awake.set()

    async def swap(self, version: Version, tensors: Mapping[str, Tensor], probe: Probe) -> float:
        """See `Engine`. Of an engine at rest: when it has been woken."""
        await self._awake.wait()
        return await super().swap(version, tensors, probe)

    async def rest(self) -> int:
        """Give the device's memory away between two steps, cache and weights, until `wake`; gives the bytes freed.

        Requests in flight wait, and go on then. Raises: EngineError if the engine is closed.
        """
        self._refuse_if_closed()
        self._awake.clear()
        return await self._stepper.ask(self._parts.rest)

    async def forget(self) -> None:
        """Remember no prefix, and nothing of the batches there were: what comes is computed as by a new engine.

        Raises: EngineError if the engine is closed or has requests in flight.
        """
        self._refuse_if_closed()
        await self._stepper.ask(self._parts.forget)

    async def wake(self) -> None:
        """Take the memory again and go on. Raises: EngineError if the engine is closed; what torch raises for want of
        memory, and it rests on."""
        self._refuse_if_closed()
        await self._stepper.ask(self._parts.wake)
        self._awake.set()
