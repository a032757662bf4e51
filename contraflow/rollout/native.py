"""Our own engine: a decoder behind the generation seam, continuously batched over a paged KV cache.

The computing is `core.py` (what a step does), `schedule.py` (who is in it), `rows.py`, `passes.py` and `sampling.py`
(how it is computed), `swap.py` (new weights). This file is the seam: futures in front, a stepper behind.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor

from contraflow.config import Engine as EngineSection
from contraflow.errors import EngineError
from contraflow.model.decoder import Decoder
from contraflow.rollout.core import EngineCore
from contraflow.rollout.engine import EngineReport
from contraflow.rollout.stepping import InlineStepper, Stepper, ThreadStepper
from contraflow.telemetry import Clock
from contraflow.types import Completion, Probe, Request, Version


class NativeEngine:
    """An `Engine`. It owns the decoder from here on: weights change only through `swap`.

    Args: `stepping` "thread" runs steps on a thread of its own, "inline" in the caller's loop, deterministically;
    `version` what the decoder's weights are, if they may be served as they are.

    Invariant: an id is in `_ids` while its `generate` runs; every such call ends with one outcome of the core.
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
        self._core = EngineCore(decoder, section, clock=clock, version=version)
        self._stepper: Stepper = ThreadStepper(self._core) if stepping == "thread" else InlineStepper(self._core)
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
