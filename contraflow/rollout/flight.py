"""One request on its way through servers: what it has so far, what to ask for next, and what a server gave it.

Takes a request, gives pieces to ask for and the completion they add up to. Refuses answers that cannot be.
"""

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, Literal

import numpy as np

from contraflow.envs.draws import derive_seed
from contraflow.errors import ServerError
from contraflow.model.families import ModelConfig
from contraflow.rollout.dialect import Chunk, Piece
from contraflow.rollout.engine import spans_of
from contraflow.types import Completion, Request, Routes, StopReason, Version


class Received:
    """What a server gave for a piece. Invariant: as many finite log-probabilities as tokens, no more than asked for."""

    def __init__(self, url: str, piece: Piece, config: ModelConfig) -> None:
        self._url, self._piece, self._config = url, piece, config
        self._past_end = False  # a token came behind a stop token
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.stop: StopReason | None = None
        self.routes: Routes | None = None
        self.stamp: str | None = None

    def add(self, chunk: Chunk) -> None:
        """Raises: ServerError ("malformed") for what the piece cannot have got."""
        behind = [*self.tokens[-1:], *chunk.tokens]  # only what is new is looked at: a long answer has many chunks
        self._past_end = self._past_end or any(token in self._piece.stop_tokens for token in behind[:-1])
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs
        self.stop = None if chunk.stop is StopReason.ABORTED else chunk.stop
        self.routes = chunk.routes if self._piece.routes else None
        self.stamp = chunk.stamp
        fault = self._fault(chunk)
        if fault:
            raise ServerError(self._url, "malformed", f"piece {self._piece.id!r} got {fault}")

    def _fault(self, chunk: Chunk) -> str:
        count, piece = len(self.tokens), self._piece
        if len(chunk.logprobs) != len(chunk.tokens):
            return f"{len(chunk.tokens)} tokens with {len(chunk.logprobs)} log-probabilities"
        if not all(math.isfinite(value) and value <= 1e-5 for value in chunk.logprobs):
            return f"log-probabilities {chunk.logprobs}"
        if not all(0 <= token < self._config.vocab for token in chunk.tokens):
            return f"tokens {chunk.tokens}; the vocabulary is 0 to {self._config.vocab - 1}"
        if count > piece.max_new_tokens or self._past_end:
            return f"{count} tokens {self.tokens}; {piece.max_new_tokens} or a stop token end it"
        if self.stop is None:
            return ""
        stopped = bool(self.tokens) and self.tokens[-1] in piece.stop_tokens
        if stopped != (self.stop is StopReason.STOP) or (not stopped and count != piece.max_new_tokens):
            return f"{count} of {piece.max_new_tokens} tokens, ended by {self.stop.value!r} with {self.tokens[-1:]}"
        return self._fault_of_routes(len(piece.prompt) + count - 1) if piece.routes else ""

    def _fault_of_routes(self, fed: int) -> str:
        config, routes = self._config, self.routes
        if routes is None or len(routes) != fed:
            return f"routes {'none' if routes is None else f'of {len(routes)} tokens'}; {fed} tokens were fed"
        each = (len(config.moe_layers), config.top_k)
        if routes.shape[1:] != each or (routes.size and routes.max() >= config.experts):
            found = f"routes of shape {routes.shape}, up to expert {routes.max(initial=0)}"
            return f"{found}; a token has {each} of {config.experts} experts"
        return ""


class Flight:
    """Invariant: `tokens` were each vouched for; `_marks` say where versions changed."""

    def __init__(self, request: Request, context_tokens: int, on_refresh: Literal["keep", "recompute"]) -> None:
        self.request = request
        self._room = min(request.max_new_tokens, context_tokens - len(request.prompt))
        self.aborted = False
        self.tries = 0  # failures of servers in a row
        self._on_refresh: Literal["keep", "recompute"] = on_refresh
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._marks: list[tuple[Version, int]] = []
        self._versions: list[Version] = []  # of its pieces
        self._routes: Routes | None = None
        self._reading: asyncio.Task[None] | None = None
        self._parked = False  # what would be read next is not to be

    @property
    def ended(self) -> StopReason | None:
        """Why there is nothing left to ask for, if there is not."""
        if self._tokens and self._tokens[-1] in self.request.stop_tokens:
            return StopReason.STOP
        return StopReason.LENGTH if len(self._tokens) == self._room else None

    def piece(self, version: Version) -> Piece:
        """What to ask for next, of a server that holds `version`.

        Its seed depends on how much there is: servers draw noise from the start of a request, and would repeat it.
        """
        request, new = self.request, len(self._tokens)
        if self._versions and self._versions[-1] != version and new:
            self._marks.append((self._versions[-1], new))
        self._versions.append(version)
        done = request.done + new
        salted = version if self._on_refresh == "recompute" else self._versions[0]
        return Piece(
            id=f"{request.id}/{len(self._versions)}",
            prompt=np.concatenate([request.prompt, np.array(self._tokens, np.int32)]),
            seed=derive_seed(request.seed, "piece", done) if done else request.seed & ((1 << 63) - 1),
            max_new_tokens=self._room - new,
            temperature=request.temperature,
            stop_tokens=request.stop_tokens,
            salt=f"version {salted}",
            routes=request.want_routes,
        )

    async def reading(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until it ends or `park` ends it. Raises what it raised; cancelling this cancels it."""
        self._reading = asyncio.create_task(work)
        if self._parked:
            self._reading.cancel()
        try:
            await asyncio.wait([self._reading])
        finally:
            self._reading.cancel()
            self._parked = False
        if not self._reading.cancelled():
            self._reading.result()

    def park(self) -> None:
        """End what is read now, or would be next."""
        self._parked = True
        if self._reading is not None:
            self._reading.cancel()

    def add(self, received: Received, version: Version) -> None:
        """Append what was vouched for."""
        assert version == self._versions[-1]
        self._tokens += received.tokens
        self._logprobs += received.logprobs
        self._routes = received.routes

    def completion(self, stop: StopReason) -> Completion:
        """All of it."""
        spans = spans_of(self._marks, self._versions[-1], len(self._tokens)) if self._tokens else ()
        return Completion(
            tokens=np.array(self._tokens, np.int32),
            logprobs=np.minimum(np.array(self._logprobs, np.float32), 0),
            spans=spans,
            stop=stop,
            cache="unbroken" if not self._marks else "kept" if self._on_refresh == "keep" else "recomputed",
            routes=None if stop is StopReason.ABORTED else self._routes,
        )
