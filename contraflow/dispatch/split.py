"""Tokens that several ranks hold alike, shared out among them for the experts: each carries its part, all get all back.

Tensor-parallel ranks see the same tokens. Without this each would send every token to the experts, and the experts
would compute every token as many times. Wraps any dispatch; does not know what lies behind it.

Shape letters as in `base`; S tokens of this rank's part.
"""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from contraflow.dispatch.base import Dispatch, Phase, Rows
from contraflow.dispatch.exchange import Exchange
from contraflow.dispatch.wire import as_bytes, from_bytes

H = TypeVar("H")


@dataclass(slots=True)
class Part(Generic[H]):
    """The inner handle, and how many tokens there are in all."""

    inner: H
    tokens: int


class SplitTokens(Dispatch[Part[H]]):
    """See `Dispatch`; collective over `exchange`, whose members must bring equal tokens, ids and weights."""

    def __init__(self, inner: Dispatch[H], exchange: Exchange) -> None:
        self.inner = inner
        self._exchange = exchange

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Rows[Part[H]]:
        """See `Dispatch.dispatch`. The gradients of `x` and `weights` come back whole on every member."""
        tokens, (start, end) = x_TD.shape[0], self._mine(x_TD.shape[0])
        x_SD, weights_SK = (_Take.apply(whole, self._exchange, start, end) for whole in (x_TD, weights_TK))  # type: ignore[no-untyped-call]
        rows = self.inner.dispatch(x_SD, expert_ids_TK[start:end], weights_SK)
        return Rows(rows.x_RD, rows.weights_R, rows.ends_E, Part(rows.handle, tokens))

    def combine(self, y_RD: Tensor, handle: Part[H]) -> Tensor:
        """See `Dispatch.combine`; all tokens, on every member."""
        y_SD = self.inner.combine(y_RD, handle.inner)
        whole: Tensor = _Join.apply(y_SD, self._exchange, *self._mine(handle.tokens), handle.tokens)  # type: ignore[no-untyped-call]
        return whole

    def enter(self, phase: Phase) -> None:
        """See `Dispatch.enter`."""
        self.inner.enter(phase)

    def _mine(self, tokens: int) -> tuple[int, int]:
        return part(tokens, self._exchange.size, self._exchange.place)


def part(tokens: int, parts: int, index: int) -> tuple[int, int]:
    """Part `index` of `range(tokens)` cut into `parts` of sizes that differ by one at most."""
    base, more = divmod(tokens, parts)
    start = index * base + min(index, more)
    return start, start + base + (index < more)


class _Take(torch.autograd.Function):
    """A member's part; the gradient is gathered from all."""

    @staticmethod
    def forward(ctx: Any, whole_TX: Tensor, exchange: Exchange, start: int, end: int) -> Tensor:
        ctx.exchange, ctx.tokens = exchange, whole_TX.shape[0]
        return whole_TX[start:end].clone()

    @staticmethod
    def backward(ctx: Any, grad_SX: Tensor) -> tuple[Tensor, None, None, None]:
        return _gather(grad_SX, ctx.exchange, ctx.tokens), None, None, None


class _Join(torch.autograd.Function):
    """All parts; every member has the same gradient of the whole, so its part of that is its gradient."""

    @staticmethod
    def forward(ctx: Any, part_SX: Tensor, exchange: Exchange, start: int, end: int, tokens: int) -> Tensor:
        ctx.start, ctx.end = start, end
        return _gather(part_SX, exchange, tokens)

    @staticmethod
    def backward(ctx: Any, grad_TX: Tensor) -> tuple[Tensor, None, None, None, None]:
        return grad_TX[ctx.start : ctx.end].clone(), None, None, None, None


def _gather(part_SX: Tensor, exchange: Exchange, tokens: int) -> Tensor:
    places = exchange.size
    receive = [end - start for start, end in (part(tokens, places, place) for place in range(places))]
    rows = as_bytes(part_SX).repeat(places, 1)
    return from_bytes(exchange.begin(rows, [part_SX.shape[0]] * places, receive)(), part_SX.dtype)
