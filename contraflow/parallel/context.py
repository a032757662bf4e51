"""Context parallelism: the tokens of each sequence shared out over ranks, and attention over the tokens of all of them.

Takes lengths of packed sequences, says which tokens are a rank's (pure), and gives the plan with which the decoder
attends: keys and values are gathered from all ranks, queries stay. The decoder itself is unchanged, since positions
travel with the tokens. Memory beyond a rank's own tokens is that of all keys and values of one layer, and on paths
without flash attention a mask of (own tokens) x (tokens before them) for each sequence.

Shape letters: S sequences, T tokens of all ranks, R of them held here, K keys laid out for the queries held here,
H query heads, G key/value heads, d head dimension, n rows.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from contraflow.errors import ModelError
from contraflow.model.attention import FLASH_DTYPES, FLASH_GQA, windowed
from contraflow.model.sinks import Packing, Sight, flash_with_sinks, sink_attention
from contraflow.types import Batch, Int64


class Exchange(Protocol):
    """The ranks that share sequences, as seen by one of them. Every rank makes the same calls in the same order."""

    @property
    def place(self) -> int: ...

    @property
    def size(self) -> int: ...

    def begin(self, sent_SB: Tensor, send: Sequence[int], receive: Sequence[int]) -> Callable[[], Tensor]:
        """Send rows (uint8, contiguous, by destination); call the result to wait for those received, by source."""
        ...


class Piece(NamedTuple):
    """Positions `[start, end)` of one sequence; they see positions `[0, end)`."""

    sequence: int
    start: int
    end: int


def pieces(lengths: Sequence[int], ranks: int, rank: int) -> list[Piece]:
    """What `rank` holds of each sequence, in order; pieces without a token are left out.

    A sequence is cut into 2 * ranks chunks, and a rank holds one from the front and its mirror image from the back: the
    work of causal attention is then the same for all. Who holds which turns by one from sequence to sequence, so that
    sequences with fewer tokens than chunks do not all fall to one rank.

    Invariant: over all ranks every token of every sequence is held exactly once.
    """
    chunks, found = 2 * ranks, list[Piece]()
    for sequence, length in enumerate(lengths):
        front = (rank + sequence) % ranks
        for chunk in (front, chunks - 1 - front):
            start, end = length * chunk // chunks, length * (chunk + 1) // chunks
            if start < end:
                found.append(Piece(sequence, start, end))
    return found


def held(starts: Sequence[int], ranks: int, rank: int) -> Int64:
    """Tokens that `rank` holds, in rising order: `[R]` places in sequences laid end to end at `starts` `[S + 1]`."""
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    parts = [np.arange(starts[p.sequence] + p.start, starts[p.sequence] + p.end) for p in pieces(lengths, ranks, rank)]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def share(batch: Batch, ranks: int, rank: int) -> Batch:
    """The batch with only those tokens trained that are predicted from a token held by `rank`.

    A sequence of L tokens feeds its first L - 1. Over all ranks every trained token is trained exactly once, so losses
    and gradients add up to those of the whole batch.
    """
    sequences = np.arange(batch.starts.size)
    fed_starts = batch.starts - sequences
    here_R = held(fed_starts.tolist(), ranks, rank)
    mask_T = np.zeros_like(batch.mask)
    mask_T[here_R + np.searchsorted(fed_starts[1:], here_R, side="right") + 1] = True
    mask_T &= batch.mask
    return msgspec.structs.replace(batch, mask=mask_T, weights=np.where(mask_T, batch.weights, np.float32(0)))


class ContextPlan:
    """Packed sequences whose tokens lie on several ranks; each token sees the earlier ones of its sequence and itself.

    A collective: every rank attends in every layer, forward and backward, also one that holds no token.
    """

    def __init__(self, starts: Sequence[int], exchange: Exchange, device: torch.device | str = "cpu") -> None:
        lengths = [end - start for start, end in itertools.pairwise(starts)]
        if not starts or starts[0] != 0 or min(lengths, default=1) < 1:
            raise ModelError(f"starts {list(starts)[:8]}... must begin with 0 and rise: no sequence may be empty")
        tokens_by_rank = [held(starts, exchange.size, rank) for rank in range(exchange.size)]
        mine = pieces(lengths, exchange.size, exchange.place)
        self._exchange = exchange
        self._counts = [tokens_R.size for tokens_R in tokens_by_rank]
        self._queries, self._keys = [p.end - p.start for p in mine], [p.end for p in mine]
        place_T = np.argsort(np.concatenate(tokens_by_rank))  # where each token is among the gathered
        seen = [place_T[starts[p.sequence] : starts[p.sequence] + p.end] for p in mine]
        self._place_K = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *seen])).to(device)
        self._packings = [_packing(sizes, device) for sizes in (self._queries, self._keys)]
        self._causal: list[Tensor | None] | None = None  # masks are made once for all layers, and only where needed
        self._windowed: dict[int | None, list[Tensor]] = {}

    @property
    def tokens(self) -> int:
        """R, tokens held here."""
        return self._counts[self._exchange.place]

    def layer(self, index: int) -> "ContextPlan":
        """The same for every layer."""
        return self

    def attend(self, q_RHd: Tensor, k_RGd: Tensor, v_RGd: Tensor, sight: Sight | None = None) -> Tensor:
        """See `model.attention.attend`; for the tokens held here."""
        kv_TGd: Tensor = _Gather.apply(torch.cat((k_RGd, v_RGd), 1), self._counts, self._exchange)  # type: ignore[no-untyped-call]
        k_KGd, v_KGd = kv_TGd.index_select(0, self._place_K).chunk(2, 1)
        if not self._queries:  # nothing, but of all it would be made of: others wait for this rank's backward pass
            unmoved = k_KGd.sum()
            return q_RHd + (unmoved if sight is None else unmoved + sight.sinks_H.sum())
        if q_RHd.is_cuda and q_RHd.dtype in FLASH_DTYPES and q_RHd.shape[-1] % 8 == 0:
            return self._flash(q_RHd, k_KGd, v_KGd, sight)
        parts = zip(q_RHd.split(self._queries), k_KGd.split(self._keys), v_KGd.split(self._keys), strict=True)
        rows = [[x.transpose(0, 1).unsqueeze(0) for x in qkv] for qkv in parts]
        out = self._plain(rows) if sight is None else self._with_sinks(rows, sight)
        return torch.cat([o.squeeze(0).transpose(0, 1) for o in out])

    def _flash(self, q_RHd: Tensor, k_KGd: Tensor, v_KGd: Tensor, sight: Sight | None) -> Tensor:
        """Where a piece has fewer queries than keys, flash attention takes them for its last."""
        queries, keys = self._packings
        if sight is not None:
            return flash_with_sinks(q_RHd, k_KGd, v_KGd, queries, keys, sight)
        starts, longest = (queries.starts_S1, keys.starts_S1), (queries.longest, keys.longest)
        o_RHd = varlen_attn(q_RHd, k_KGd, v_KGd, *starts, *longest, window_size=(-1, 0), **FLASH_GQA)
        assert isinstance(o_RHd, Tensor)  # it is a pair only when more is asked for
        return o_RHd

    def _plain(self, rows: list[list[Tensor]]) -> list[Tensor]:
        if self._causal is None:
            self._causal = [_ends_together(q.shape[2], k.shape[2], q.device) for q, k, _ in rows]
        return [
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
            )
            for (q, k, v), mask in zip(rows, self._causal, strict=True)
        ]

    def _with_sinks(self, rows: list[list[Tensor]], sight: Sight) -> list[Tensor]:
        if sight.window not in self._windowed:
            self._windowed[sight.window] = [
                windowed(k.shape[2], q.shape[2], sight.window, q.device, q.dtype) for q, k, _ in rows
            ]
        masks = self._windowed[sight.window]
        return [sink_attention(q, k, v, mask, sight.sinks_H) for (q, k, v), mask in zip(rows, masks, strict=True)]


def _packing(sizes: list[int], device: torch.device | str) -> Packing:
    ends = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=device)
    return Packing(ends, max(sizes, default=0))


def _ends_together(queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Causal mask of the last `queries` of `keys` tokens, bool; None where they are all, which is plainly causal."""
    if queries == keys:
        return None
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


class _Gather(torch.autograd.Function):
    """Rows of all ranks, by rank. The gradient of a row is the sum of what every rank has for it."""

    @staticmethod
    def forward(ctx: Any, x_n: Tensor, counts: list[int], exchange: Exchange) -> Tensor:
        ctx.counts, ctx.exchange = counts, exchange
        mine = [counts[exchange.place]] * exchange.size
        return _swap(x_n.repeat(exchange.size, *[1] * (x_n.ndim - 1)), mine, counts, exchange)

    @staticmethod
    def backward(ctx: Any, grad_n: Tensor) -> tuple[Tensor, None, None]:
        mine = ctx.counts[ctx.exchange.place]
        parts_n = _swap(grad_n, ctx.counts, [mine] * ctx.exchange.size, ctx.exchange)
        return parts_n.unflatten(0, (ctx.exchange.size, mine)).sum(0), None, None


def _swap(x_n: Tensor, send: list[int], receive: list[int], exchange: Exchange) -> Tensor:
    """Send rows of any dtype by destination, receive rows by source."""
    shape = x_n.shape[1:]
    sent_nB = x_n.contiguous().view(len(x_n), shape.numel()).view(torch.uint8)
    return exchange.begin(sent_nB, send, receive)().view(x_n.dtype).view(sum(receive), *shape)
