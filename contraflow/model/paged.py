"""Plans over a paged cache: new tokens of B sequences against what the cache holds of them, written there first.

`paged_plan` gives the plan that suits the cache's device: Triton kernels that read pages where they lie (CUDA, no
gradients), else `PagedPlan`, which gathers them and calls torch's attention. Both compute the same.

Shape letters: T tokens fed, H query heads, G key/value heads, d head dimension, B cached sequences, N blocks of a
table, Q fed tokens of a sequence at most, L positions of a sequence.
"""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from contraflow.errors import ModelError
from contraflow.model.cache import KVCache
from contraflow.model.ops import cast, have_triton
from contraflow.model.rotary import Rotation
from contraflow.model.sinks import Sight, additive, hidden, sink_attention


class PagedPlan:
    """New tokens of B sequences against a paged cache; attending also writes the new keys and values.

    `tables_BN` int64: blocks of each sequence in order, padded with any valid block. `lengths_B` int64: tokens of each
    sequence including those fed now (0 for a padding row, whose output is meaningless but finite). `slots_T` int64:
    block * BS + offset where each fed token goes. `queries_BQ` int64: which fed tokens belong to each sequence, in
    order, -1 behind them; None when each sequence feeds one (T == B).

    Everything is computed on the device from these tensors, so build the plan inside the captured region of a graph.
    """

    def __init__(
        self, cache: KVCache, tables_BN: Tensor, lengths_B: Tensor, slots_T: Tensor, queries_BQ: Tensor | None = None
    ) -> None:
        _check(tables_BN, lengths_B, slots_T, queries_BQ)
        self._cache = cache
        self._batch, self._blocks = tables_BN.shape
        heads = cache.heads
        # Pages of one layer as (keys or values, sequence, head, block): in this order each head gets its own matrix.
        pages = tables_BN[:, None, :] * len(heads) + heads.view(2, 1, -1, 1)
        self._pages = pages.reshape(-1)
        self.slots = _slots(cache, slots_T)
        self._queries = None if queries_BQ is None else queries_BQ.clamp_min(0)
        self._place_T = slots_T if queries_BQ is None else _inverse(queries_BQ, slots_T.shape[0])
        self._last_BQ1 = self._last(lengths_B, queries_BQ)[..., None]
        self._mask_B1QL = self._mask(None)
        self._windowed: dict[int, Tensor] = {}  # masks of other windows, made when first asked for
        self._mask_X1L = self._mask_B1QL.squeeze(1).repeat_interleave(len(heads) // 2, 0)  # a row a head, for decoding

    def layer(self, index: int) -> "_PagedLayer":
        """The view of one layer's cache."""
        return _PagedLayer(self, *self._cache.layers[index])

    def _last(self, lengths_B: Tensor, queries_BQ: Tensor | None) -> Tensor:
        """The last position that each query may see, its own: `[B, Q]`."""
        if queries_BQ is None:
            return lengths_B[:, None] - 1
        fed_BQ = queries_BQ >= 0
        counts_Q = torch.arange(fed_BQ.shape[1], device=lengths_B.device)
        return lengths_B[:, None] - fed_BQ.sum(1, keepdim=True) + counts_Q

    def _mask(self, window: int | None) -> Tensor:
        positions_L = torch.arange(self._blocks * self._cache.block_tokens, device=self._last_BQ1.device)
        return additive(hidden(self._last_BQ1, positions_L, window), self._cache.pool.dtype)[:, None]

    def _sight_mask(self, window: int | None) -> Tensor:
        if window is None:
            return self._mask_B1QL
        if window not in self._windowed:
            self._windowed[window] = self._mask(window)
        return self._windowed[window]

    def attend(self, q_THd: Tensor, pages: Tensor, sight: Sight | None) -> Tensor:
        """Attention of the fed tokens against one layer's pages `[NB * 2 * G, BS * d]`, which hold them already."""
        batch, (heads, d), kv_heads = self._batch, q_THd.shape[1:], len(self._cache.heads) // 2
        k, v = pages.index_select(0, self._pages).view(2, batch, kv_heads, -1, d).unbind()
        if sight is not None:
            return self._sighted(q_THd, k, v, sight)
        # Query heads that share a key/value head become more queries of it: no repeated keys, one plain attention.
        if self._queries is None:
            return self._one_token(q_THd.view(batch, kv_heads, -1, d), k, v).flatten(1, 2)
        share = heads // kv_heads
        q = q_THd.index_select(0, self._queries.reshape(-1)).view(batch, -1, kv_heads, share, d)
        q = q.permute(0, 2, 3, 1, 4).flatten(2, 3)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask_B1QL.repeat(1, 1, share, 1))
        o = o.view(batch, kv_heads, share, -1, d).permute(0, 3, 1, 2, 4).reshape(-1, heads, d)
        return o.index_select(0, self._place_T)

    def _sighted(self, q_THd: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
        queries = q_THd if self._queries is None else q_THd.index_select(0, self._queries.reshape(-1))
        q_BHQd = queries.unflatten(0, (self._batch, -1)).transpose(1, 2)
        o_BHQd = sink_attention(q_BHQd, k, v, self._sight_mask(sight.window), sight.sinks_H)
        o = o_BHQd.transpose(1, 2).flatten(0, 1)
        return o if self._queries is None else o.index_select(0, self._place_T)

    def _one_token(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the query heads of one token a sequence: `[B, G, s, d]` against `[B, G, L, d]`.

        On a CPU as two batched matmuls: torch's attention kernel pays more for each head than the arithmetic costs.
        """
        if q.is_cuda:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask_B1QL)
        flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
        scores = torch.baddbmm(self._mask_X1L, flat_q, flat_k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
        return torch.bmm(scores.softmax(-1), flat_v).view_as(q)


class _PagedLayer:
    """One layer's part of the cache under a plan: the same memory as pages and as slots."""

    def __init__(self, plan: PagedPlan, pages: Tensor, slots: Tensor) -> None:
        self._plan, self._pages, self._slots = plan, pages, slots

    def attend(self, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, sight: Sight | None = None) -> Tensor:
        self.write(k_TGd, v_TGd)
        return cast(self._plan.attend(cast(q_THd, self._slots.dtype), self._pages, sight), q_THd.dtype)

    def write(self, k_TGd: Tensor, v_TGd: Tensor) -> None:
        """Put the fed tokens' keys and values where they go."""
        _write(self._slots, self._plan.slots, k_TGd, v_TGd)


class Placing(NamedTuple):
    """What stands between a projection and attention: clamp, or None, and norm of queries and keys.

    `norm` is `Attention.qk_norm`: `[2, d]` of each head, `[(H + G) * d]` of all together, or None.
    """

    norm: Tensor | None
    eps: float
    clip: float | None


class Target(NamedTuple):
    """One layer of a cache `[NB * 2 * G, BS * d]`, and the int64 slot (block * BS + offset) of each token."""

    layer: Tensor
    slots_T: Tensor
    block_tokens: int


class Pages(NamedTuple):
    """One layer of a cache `[NB * 2 * G, BS * d]`, and who holds what: int64 `tables_BN` and `lengths_B`."""

    layer: Tensor
    tables_BN: Tensor
    lengths_B: Tensor
    kv_heads: int
    block_tokens: int


class Fed(NamedTuple):
    """Several new tokens of each sequence: int64 `queries_BQ`, -1 behind `counts_B` of them."""

    queries_BQ: Tensor
    counts_B: Tensor


class Seen(NamedTuple):
    """What a layer adds: fp32-able sinks `[H]` or None, and a window or None."""

    sinks_H: Tensor | None
    window: int | None


class Kernels(NamedTuple):
    """What a `KernelPlan` computes with: see `kernels_place.place`, `kernels_attention.decode` and `prefill`."""

    place: Callable[..., Tensor]
    decode: Callable[[Tensor, Pages, Seen], Tensor]
    prefill: Callable[[Tensor, Pages, Fed, Seen], Tensor] | None  # None: only for one token a sequence
    experts: Callable[..., Tensor]  # see `kernels_experts.experts`


class KernelPlan:
    """`PagedPlan` by kernels, Triton's if none are given: the same arguments, no copy of pages, no mask, no gradients.

    Padding rows (length 0) give zeros. Nothing is read on the host. Invariant: all it knows is computed from its
    tensors on the device, so a plan made in a graph's capture follows what is copied into them.
    """

    def __init__(
        self,
        cache: KVCache,
        tables_BN: Tensor,
        lengths_B: Tensor,
        slots_T: Tensor,
        queries_BQ: Tensor | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        _check(tables_BN, lengths_B, slots_T, queries_BQ)
        self.cache, self.slots_T, self.kernels = cache, slots_T, kernels or _triton()
        self._tables_BN = tables_BN if tables_BN.stride(1) == 1 else tables_BN.contiguous()
        self._lengths_B = lengths_B.contiguous()
        self._fed = None
        if queries_BQ is not None:
            counts_B = (queries_BQ >= 0).sum(1)
            self._fed = Fed(queries_BQ.contiguous(), counts_B)

    @cached_property
    def slots(self) -> Tensor:
        """See `_slots`; needed where heads come placed already."""
        return _slots(self.cache, self.slots_T)

    def layer(self, index: int) -> "KernelLayer":
        """The view of one layer's cache."""
        return KernelLayer(self, *self.cache.layers[index])

    def attend(self, q_THd: Tensor, pages: Tensor, sight: Sight | None) -> Tensor:
        """Attention of the fed tokens, in the cache's dtype, against one layer's pages, which hold them already."""
        held = Pages(pages, self._tables_BN, self._lengths_B, len(self.cache.heads) // 2, self.cache.block_tokens)
        seen = Seen(*(sight or (None, None)))
        if self._fed is None:
            return self.kernels.decode(q_THd, held, seen)
        if self.kernels.prefill is None:
            raise ModelError("these kernels take one token a sequence: feed several through a PagedPlan")
        return self.kernels.prefill(q_THd, held, self._fed, seen)


class KernelLayer:
    """One layer's part of the cache under a `KernelPlan`."""

    def __init__(self, plan: KernelPlan, pages: Tensor, slots: Tensor) -> None:
        self._plan, self._pages, self._slots = plan, pages, slots

    def attend(self, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, sight: Sight | None = None) -> Tensor:
        """Of heads that are normed and turned already."""
        _write(self._slots, self._plan.slots, k_TGd, v_TGd)
        return cast(self._plan.attend(cast(q_THd, self._pages.dtype), self._pages, sight), q_THd.dtype)

    def attend_projected(self, qkv: Tensor, turn: Rotation, placing: Placing, sight: Sight | None) -> Tensor:
        """Of queries, keys and values `[T, H + 2 * G, d]` as projected."""
        q_THd = self.placed(qkv, turn, placing)
        return cast(self._plan.attend(q_THd, self._pages, sight), qkv.dtype)

    def placed(self, qkv: Tensor, turn: Rotation, placing: Placing) -> Tensor:
        """Queries, in one kernel that norms, clamps and turns, and writes keys and values into the cache."""
        cache = self._plan.cache
        target = Target(self._pages, self._plan.slots_T, cache.block_tokens)
        return self._plan.kernels.place(qkv, *turn, placing, target, kv_heads=len(cache.heads) // 2)


def paged_plan(
    cache: KVCache, tables_BN: Tensor, lengths_B: Tensor, slots_T: Tensor, queries_BQ: Tensor | None = None
) -> PagedPlan | KernelPlan:
    """The plan for the cache's device; arguments as `PagedPlan`'s."""
    made = KernelPlan if cache.pool.is_cuda and not torch.is_grad_enabled() and have_triton() else PagedPlan
    return made(cache, tables_BN, lengths_B, slots_T, queries_BQ)


def _triton() -> Kernels:
    from contraflow.model import kernels_attention, kernels_experts, kernels_place

    return Kernels(kernels_place.place, kernels_attention.decode, kernels_attention.prefill, kernels_experts.experts)


def _check(tables_BN: Tensor, lengths_B: Tensor, slots_T: Tensor, queries_BQ: Tensor | None) -> None:
    if tables_BN.ndim != 2 or lengths_B.shape != tables_BN.shape[:1]:
        raise ModelError(f"tables {list(tables_BN.shape)} and lengths {list(lengths_B.shape)} must be [B, N], [B]")
    if queries_BQ is None and slots_T.shape != lengths_B.shape:
        raise ModelError(f"{slots_T.numel()} tokens for {lengths_B.numel()} sequences: say whose with queries_BQ")


def _slots(cache: KVCache, slots_T: Tensor) -> Tensor:
    """Rows of a layer's slots `[NB * 2 * G * BS, d]` for each token's keys, then values, head by head."""
    block_T = slots_T.div(cache.block_tokens, rounding_mode="floor")
    row_TX = (block_T[:, None] * len(cache.heads) + cache.heads) * cache.block_tokens
    return (row_TX + (slots_T % cache.block_tokens)[:, None]).view(-1)


def _write(slots: Tensor, rows: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> None:
    """Put the fed tokens' keys and values into one layer's slots, at rows as `_slots` gives them."""
    slots.index_copy_(0, rows, cast(torch.cat((k_TGd, v_TGd), 1).flatten(0, 1), slots.dtype))


def _inverse(queries_BQ: Tensor, tokens: int) -> Tensor:
    """`place_T`: where each fed token stands in the flattened `[B * Q]`; padding is sent to a place past the end."""
    flat = torch.where(queries_BQ < 0, tokens, queries_BQ).reshape(-1)
    place = torch.zeros(tokens + 1, dtype=torch.int64, device=flat.device)
    return place.scatter_(0, flat, torch.arange(flat.shape[0], device=flat.device))[:tokens]
