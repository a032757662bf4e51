"""The engine's twin: answers come from a function, everything else behaves as an engine does.

Takes requests, gives what `answer` says, one token per turn of the event loop, so that aborts and swaps can fall in
mid-generation. Deterministic. Has no weights: a swap proves what it is told to prove. For tests and dry runs.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from contraflow.errors import EngineError
from contraflow.rollout.engine import EngineReport, check_request, spans_of
from contraflow.telemetry import Account, Clock
from contraflow.types import Completion, Probe, Request, Routes, StopReason, Version

if TYPE_CHECKING:
    from torch import Tensor

    Prove = Callable[[Mapping[str, Tensor], Probe], None]


class ScriptedEngine:
    """An `Engine` whose tokens are `answer(request)`, cut at stop token, length and context like a model's.

    Log-probabilities are those of a uniform choice among `vocab` tokens. Args: `routes` is (M, K), experts then being
    all 0; `prove` is called by `swap` and raises CarrierError to refuse; `version` may be served from the start.

    Invariant: `_flying` has one entry per running `generate`.
    """

    def __init__(
        self,
        answer: Callable[[Request], Sequence[int]],
        *,
        vocab: int,
        clock: Clock,
        context_tokens: int = 256,
        on_refresh: Literal["keep", "recompute"] = "keep",
        routes: tuple[int, int] | None = None,
        prove: "Prove | None" = None,
        version: Version | None = None,
    ) -> None:
        self.version = version
        self._answer = answer
        self._vocab = vocab
        self._clock = clock
        self._context = context_tokens
        self._on_refresh: Literal["keep", "recompute"] = on_refresh
        self._routes = routes
        self._prove = prove
        self._account = Account(clock, "idle")
        self._flying: dict[str, _Draft] = {}
        self._tokens = self._fed = self._swaps = 0
        self._longest_stall_s = 0.0
        self._closed = False

    async def generate(self, request: Request) -> Completion:
        """See `Engine`. Also raises EngineError for an answer that ends with no stop token and room left."""
        self._check(request)
        draft = self._flying[request.id] = _Draft()
        self._fed += len(request.prompt) - 1
        try:
            await asyncio.sleep(0)  # before the script is asked: who answers is who says the first token
            answer = [int(token) for token in self._answer(request)][request.done :]
            stop = await self._speak(request, draft, answer)
        finally:
            del self._flying[request.id]
        assert self.version is not None  # checked above, and a swap never takes it away
        return Completion(
            tokens=np.array(draft.tokens, np.int32),
            logprobs=np.full(len(draft.tokens), -math.log(self._vocab), np.float32),
            spans=spans_of(draft.marks, self.version, len(draft.tokens)),
            stop=stop,
            cache=draft.cache,
            routes=self._experts(request, draft),
        )

    async def abort(self, ids: Sequence[str]) -> None:
        """See `Engine`."""
        self._refuse_if_closed()
        for draft in [self._flying[i] for i in ids if i in self._flying]:
            draft.aborted = True

    async def swap(self, version: Version, tensors: "Mapping[str, Tensor]", probe: Probe) -> float:
        """See `Engine`."""
        self._refuse_if_closed()
        start = self._clock()
        try:
            with self._account.charge("swap"):
                if self._prove is not None:
                    self._prove(tensors, probe)
        finally:
            stall = self._clock() - start
            self._longest_stall_s = max(self._longest_stall_s, stall)
        for draft in self._flying.values():
            if draft.tokens and self.version is not None:
                draft.marks.append((self.version, len(draft.tokens)))
                draft.cache = "kept" if self._on_refresh == "keep" else "recomputed"
        self.version = version
        self._swaps += 1
        return stall

    def report(self) -> EngineReport:
        """See `Engine`. A step is a token; there is no KV cache."""
        return EngineReport(
            version=self.version,
            tokens=self._tokens,
            fed_tokens=self._fed,
            steps=self._tokens,
            running=len(self._flying),
            waiting=0,
            swaps=self._swaps,
            longest_stall_s=self._longest_stall_s,
            seconds=self._account.seconds(),
            doing=self._account.cause,
        )

    async def close(self) -> None:
        """See `Engine`."""
        self._closed = True

    async def _speak(self, request: Request, draft: "_Draft", answer: list[int]) -> StopReason:
        limit = min(request.max_new_tokens, self._context - len(request.prompt))
        for token in answer[:limit]:
            if draft.aborted:
                return StopReason.ABORTED
            self._refuse_if_closed()
            if not 0 <= token < self._vocab:
                raise EngineError(f"request {request.id!r}: the script says token {token}, vocabulary {self._vocab}")
            draft.tokens.append(token)
            self._tokens += 1
            if token in request.stop_tokens:
                return StopReason.STOP
            await asyncio.sleep(0)
        if len(draft.tokens) < limit:
            raise EngineError(
                f"request {request.id!r}: the script ends after {len(answer)} tokens without a stop token"
            )
        return StopReason.LENGTH

    def _check(self, request: Request) -> None:
        self._refuse_if_closed()
        if self.version is None:
            raise EngineError(f"request {request.id!r}: the engine serves no version yet; swap one in first")
        if request.id in self._flying:
            raise EngineError(f"request {request.id!r} is already in flight; give each an id of its own")
        check_request(request, context_tokens=self._context, vocab=self._vocab)
        if request.want_routes and self._routes is None:
            raise EngineError(f"request {request.id!r} wants routes, but the engine was made without")

    def _experts(self, request: Request, draft: "_Draft") -> Routes | None:
        if not request.want_routes or self._routes is None:
            return None
        return np.zeros((len(request.prompt) + len(draft.tokens) - 1, *self._routes), np.uint8)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")


class _Draft:
    """A completion in the making."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.marks: list[tuple[Version, int]] = []
        self.cache: Literal["kept", "recomputed", "unbroken"] = "unbroken"
        self.aborted = False
