"""Triton kernels: attention over the pages of a cache, without a copy of them. Import late: CUDA only.

Takes queries, one layer's pages, block tables and lengths, all on the device; gives outputs. Nothing is read on the
host and grids follow from shapes alone, so CUDA graphs can hold the launches. Softmax is streamed in fp32
(Milakov and Gimelshein 2018); one query's keys may be split over programs (flash-decoding, Dao et al. 2023).

Shape letters: B sequences, N blocks of a table, T tokens fed, Q fed tokens of a sequence at most, H query heads,
G key/value heads, s = H / G, d head dimension, D = d padded to a power of two, BS tokens of a block, L keys of a tile.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from contraflow.model.paged import Fed, Pages, Seen

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # finite: a maximum over nothing minus another is 0, not NaN


class Tiling(NamedTuple):
    """How a kernel is cut: keys a tile, warps, loads in flight; None for as many splits as fill the device.

    `products`: decode in matrix products, which heads that share keys always do.
    """

    keys: int
    warps: int
    stages: int
    splits: int | None = None
    products: bool = True


@triton.jit
def _keys(tables, at_L, end, head, HEADS: tl.constexpr, BS: tl.constexpr, DIM: tl.constexpr):
    """Where the keys at these positions begin, in elements of the layer."""
    block = tl.load(tables + at_L // BS, mask=at_L < end, other=0).to(tl.int64)
    return (block * (2 * HEADS) + head) * (BS * DIM) + (at_L % BS) * DIM


@triton.jit
def _span(length, split, splits, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """First seen position, and the positions that one split of the last token's keys begins and ends at."""
    first = length * 0
    if WINDOW:
        first = tl.maximum(length - WINDOW, 0)
    tile = first // KEYS
    each = ((length + KEYS - 1) // KEYS - tile + splits - 1) // splits
    begin = (tile + split * each) * KEYS
    return first, begin, tl.minimum(begin + each * KEYS, length)


@triton.jit
def _with_sink(top, total, sinks, head, mask, SINKS: tl.constexpr):
    """What to multiply the values summed so far by: one over the total, the sink's share in it, or 0 for nothing."""
    gain = top * 0.0 + 1.0
    if SINKS:
        sink = tl.load(sinks + head, mask=mask, other=0.0).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
        gain = tl.exp2(top - higher)
        total = total * gain + tl.exp2(sink - higher)
    return gain / tl.where(total == 0.0, 1.0, total)


@triton.jit(do_not_specialize=["splits", "table_stride"])
def _decode(
    q, layer, tables, lengths, sinks, out, parts, stats, splits, table_stride, scale,
    GROUPS: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,
    BS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One token's s query heads of one key/value head against a split of its keys, as matrix products."""
    group, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    first, begin, end = _span(length, split, splits, KEYS, WINDOW)
    share_R, d_D = tl.arange(0, ROWS), tl.arange(0, D)
    head_R = row.to(tl.int64) * (GROUPS * SHARE) + group * SHARE + share_R
    here_RD = (share_R < SHARE)[:, None] & (d_D < DIM)[None, :]
    q_RD = tl.load(q + head_R[:, None] * DIM + d_D[None, :], mask=here_RD, other=0.0)
    top, total = tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32)
    sum_RD = tl.zeros([ROWS, D], tl.float32)
    for at in tl.range(begin, end, KEYS, num_stages=STAGES):
        at_L = at + tl.arange(0, KEYS)
        key_L = _keys(tables + row.to(tl.int64) * table_stride, at_L, end, group, GROUPS, BS, DIM)
        seen_LD = (at_L < end)[:, None] & (d_D < DIM)[None, :]
        place_LD = layer + key_L[:, None] + d_D[None, :]
        k_LD = tl.load(place_LD, mask=seen_LD, other=0.0)
        scores = tl.dot(q_RD, tl.trans(k_LD), input_precision="ieee") * scale
        scores = tl.where(((at_L >= first) & (at_L < end))[None, :], scores, float("-inf"))
        v_LD = tl.load(place_LD + GROUPS * BS * DIM, mask=seen_LD, other=0.0)
        higher = tl.maximum(top, tl.max(scores, 1))
        kept, weights = tl.exp2(top - higher), tl.exp2(scores - higher[:, None])
        total = total * kept + tl.sum(weights, 1)
        sum_RD = tl.dot(weights.to(v_LD.dtype), v_LD, sum_RD * kept[:, None], input_precision="ieee")
        top = higher
    if not SPLIT:
        gain = _with_sink(top, total, sinks, group * SHARE + share_R, share_R < SHARE, SINKS)
        tl.store(out + head_R[:, None] * DIM + d_D[None, :], sum_RD * gain[:, None], mask=here_RD)
    else:
        part_R = head_R * splits + split
        tl.store(parts + part_R[:, None] * DIM + d_D[None, :], sum_RD, mask=here_RD)
        tl.store(stats + part_R * 2, top, mask=share_R < SHARE)
        tl.store(stats + part_R * 2 + 1, total, mask=share_R < SHARE)


@triton.jit(do_not_specialize=["splits", "table_stride"])
def _decode_alone(
    q, layer, tables, lengths, sinks, out, parts, stats, splits, table_stride, scale,
    GROUPS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, KEYS: tl.constexpr,
    SPLIT: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`_decode` for heads that share no keys: each place of a tile streams a softmax of its own, merged at the end,
    so that nothing but a sum over d leaves a thread's registers while keys arrive."""
    group, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    first, begin, end = _span(length, split, splits, KEYS, WINDOW)
    d_D = tl.arange(0, D)
    head = row.to(tl.int64) * GROUPS + group
    q_D = tl.load(q + head * DIM + d_D, mask=d_D < DIM, other=0.0).to(tl.float32) * scale
    top_L, total_L = tl.full([KEYS], LOWEST, tl.float32), tl.zeros([KEYS], tl.float32)
    sum_LD = tl.zeros([KEYS, D], tl.float32)
    for at in tl.range(begin, end, KEYS, num_stages=STAGES):
        at_L = at + tl.arange(0, KEYS)
        key_L = _keys(tables + row.to(tl.int64) * table_stride, at_L, end, group, GROUPS, BS, DIM)
        seen_LD = (at_L < end)[:, None] & (d_D < DIM)[None, :]
        place_LD = layer + key_L[:, None] + d_D[None, :]
        k_LD = tl.load(place_LD, mask=seen_LD, other=0.0)
        v_LD = tl.load(place_LD + GROUPS * BS * DIM, mask=seen_LD, other=0.0)
        scores_L = tl.sum(k_LD.to(tl.float32) * q_D[None, :], 1)
        scores_L = tl.where((at_L >= first) & (at_L < end), scores_L, float("-inf"))
        higher_L = tl.maximum(top_L, scores_L)
        kept_L, weights_L = tl.exp2(top_L - higher_L), tl.exp2(scores_L - higher_L)
        total_L = total_L * kept_L + weights_L
        sum_LD = sum_LD * kept_L[:, None] + weights_L[:, None] * v_LD.to(tl.float32)
        top_L = higher_L
    top = tl.max(top_L, 0)
    kept_L = tl.exp2(top_L - top)
    total, sum_D = tl.sum(total_L * kept_L, 0), tl.sum(sum_LD * kept_L[:, None], 0)
    if not SPLIT:
        gain = _with_sink(top, total, sinks, group, True, SINKS)
        tl.store(out + head * DIM + d_D, sum_D * gain, mask=d_D < DIM)
    else:
        part = head * splits + split
        tl.store(parts + part * DIM + d_D, sum_D, mask=d_D < DIM)
        tl.store(stats + part * 2, top)
        tl.store(stats + part * 2 + 1, total)


@triton.jit
def _merge(
    parts, stats, sinks, out,
    HEADS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """The splits of one head of one token, put together."""
    head, row = tl.program_id(0), tl.program_id(1)
    d_D, split_S = tl.arange(0, D), tl.arange(0, SPLITS)
    place = row.to(tl.int64) * HEADS + head
    top_S = tl.load(stats + (place * SPLITS + split_S) * 2)
    total_S = tl.load(stats + (place * SPLITS + split_S) * 2 + 1)
    here_SD = (split_S >= 0)[:, None] & (d_D < DIM)[None, :]
    sum_SD = tl.load(parts + (place * SPLITS + split_S)[:, None] * DIM + d_D[None, :], mask=here_SD, other=0.0)
    top = tl.max(top_S, 0)
    kept_S = tl.exp2(top_S - top)
    gain = _with_sink(top, tl.sum(total_S * kept_S, 0), sinks, head, True, SINKS)
    tl.store(out + place * DIM + d_D, tl.sum(sum_SD * kept_S[:, None], 0) * gain, mask=d_D < DIM)


@triton.jit(do_not_specialize=["table_stride", "query_stride"])
def _prefill(
    q, layer, tables, lengths, counts, queries, sinks, out, table_stride, query_stride, scale,
    GROUPS: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,
    BS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of one sequence's new tokens, one query head, against all keys up to each."""
    head, tile, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(counts + row).to(tl.int32)
    if tile * ROWS >= count:
        return
    past = tl.load(lengths + row).to(tl.int32) - count
    nth_R, d_D = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    token_R = tl.load(queries + row.to(tl.int64) * query_stride + nth_R, mask=nth_R < count, other=0).to(tl.int64)
    place_RD = (token_R * (GROUPS * SHARE) + head)[:, None] * DIM + d_D[None, :]
    here_RD = (nth_R < count)[:, None] & (d_D < DIM)[None, :]
    q_RD = tl.load(q + place_RD, mask=here_RD, other=0.0)
    top, total = tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32)
    sum_RD = tl.zeros([ROWS, D], tl.float32)
    begin = past * 0
    if WINDOW:
        begin = tl.maximum(past + tile * ROWS + 1 - WINDOW, 0) // KEYS * KEYS
    end = past + tl.minimum(count, (tile + 1) * ROWS)
    for at in tl.range(begin, end, KEYS, num_stages=STAGES):
        at_L = at + tl.arange(0, KEYS)
        key_L = _keys(tables + row.to(tl.int64) * table_stride, at_L, end, head // SHARE, GROUPS, BS, DIM)
        seen_LD = (at_L < end)[:, None] & (d_D < DIM)[None, :]
        keys_LD = layer + key_L[:, None] + d_D[None, :]
        scores = tl.dot(q_RD, tl.trans(tl.load(keys_LD, mask=seen_LD, other=0.0)), input_precision="ieee") * scale
        seen_RL = at_L[None, :] <= past + nth_R[:, None]
        if WINDOW:
            seen_RL = seen_RL & (at_L[None, :] > past + nth_R[:, None] - WINDOW)
        scores = tl.where(seen_RL, scores, float("-inf"))
        v_LD = tl.load(keys_LD + GROUPS * BS * DIM, mask=seen_LD, other=0.0)
        higher = tl.maximum(top, tl.max(scores, 1))
        kept, weights = tl.exp2(top - higher), tl.exp2(scores - higher[:, None])
        total = total * kept + tl.sum(weights, 1)
        sum_RD = tl.dot(weights.to(v_LD.dtype), v_LD, sum_RD * kept[:, None], input_precision="ieee")
        top = higher
    gain = _with_sink(top, total, sinks, head, True, SINKS)
    tl.store(out + place_RD, sum_RD * gain[:, None], mask=here_RD)


def decode(q_BHd: Tensor, pages: Pages, seen: Seen, tiling: Tiling | None = None) -> Tensor:
    """Attention of one new token of each sequence, whose key and value the pages hold: `[B, H, d]`, q's dtype.

    Sequences of length 0 give zeros. q has the pages' dtype: bf16, fp16 or fp32.
    """
    q_BHd, (batch, heads, dim) = q_BHd.contiguous(), q_BHd.shape
    out = torch.empty_like(q_BHd)
    if not batch:
        return out
    share = heads // pages.kv_heads
    tiling = tiling or decode_tiling(share, dim, q_BHd.element_size())
    longest = -(-pages.tables_BN.shape[1] * pages.block_tokens // tiling.keys)
    splits = tiling.splits or splits_for(batch * pages.kv_heads, longest, _processors(q_BHd.device))
    parts, stats = out, out  # not read
    if splits > 1:
        parts = torch.empty(batch, heads, splits, dim, dtype=torch.float32, device=q_BHd.device)
        stats = torch.empty(batch, heads, splits, 2, dtype=torch.float32, device=q_BHd.device)
    shape: dict[str, Any] = {"DIM": dim, "D": _padded(dim), "SINKS": seen.sinks_H is not None}
    cut: dict[str, Any] = {"SPLIT": splits > 1, "KEYS": tiling.keys, "STAGES": tiling.stages, "num_warps": tiling.warps}
    products = share > 1 or tiling.products
    grouped: dict[str, Any] = {"SHARE": share, "ROWS": _padded(share)} if products else {}
    sinks = q_BHd if seen.sinks_H is None else seen.sinks_H
    kernel = _decode if products else _decode_alone
    kernel[(pages.kv_heads, splits, batch)](
        q_BHd, pages.layer, pages.tables_BN, pages.lengths_B, sinks, out, parts, stats, splits,
        pages.tables_BN.stride(0), dim**-0.5 * LOG2E.value, GROUPS=pages.kv_heads, BS=pages.block_tokens,
        WINDOW=seen.window or 0, **grouped, **shape, **cut,
    )  # fmt: skip
    if splits > 1:
        warps = min(max(splits * _padded(dim) // 2048, 1), 8)
        _merge[(heads, batch)](parts, stats, sinks, out, HEADS=heads, SPLITS=splits, num_warps=warps, **shape)
    return out


def prefill(q_THd: Tensor, pages: Pages, fed: Fed, seen: Seen, tiling: Tiling | None = None) -> Tensor:
    """Attention of several new tokens of each sequence, whose keys and values the pages hold: `[T, H, d]`.

    A token sees its sequence's `lengths_B - counts_B` earlier ones, those fed before it, and itself.
    """
    q_THd, (_, heads, dim) = q_THd.contiguous(), q_THd.shape
    out = torch.zeros_like(q_THd)  # a token that is nobody's stays finite
    batch, most = fed.queries_BQ.shape
    tiling = tiling or prefill_tiling(dim, q_THd.element_size())
    # Exact products of fp32 are no work for tensor cores, and large tiles of them spill registers.
    rows = 16 if most <= 16 or q_THd.element_size() == 4 else 16 * tiling.warps
    if not (batch and most and len(q_THd)):
        return out
    _prefill[(heads, triton.cdiv(most, rows), batch)](
        q_THd, pages.layer, pages.tables_BN, pages.lengths_B, fed.counts_B, fed.queries_BQ,
        q_THd if seen.sinks_H is None else seen.sinks_H, out, pages.tables_BN.stride(0), fed.queries_BQ.stride(0),
        dim**-0.5 * LOG2E.value, GROUPS=pages.kv_heads, SHARE=heads // pages.kv_heads, ROWS=rows, DIM=dim,
        D=_padded(dim), BS=pages.block_tokens, KEYS=tiling.keys, WINDOW=seen.window or 0,
        SINKS=seen.sinks_H is not None, STAGES=tiling.stages, num_warps=tiling.warps,
    )  # fmt: skip
    return out


def decode_tiling(share: int, dim: int, itemsize: int) -> Tiling:
    """For an H200; `bench.attention_gpu` measures others. Wide heads get fewer keys, so that tiles stay as large."""
    wide = -(-_padded(dim) * itemsize // 256)  # in heads of 128 in half precision
    return Tiling(max(32 // wide, 16), 4, 3, products=False) if share == 1 else Tiling(max(64 // wide, 16), 4, 3)


def prefill_tiling(dim: int, itemsize: int) -> Tiling:
    """For an H200."""
    wide = -(-_padded(dim) * itemsize // 256)
    return Tiling(max(64 // wide, 16), 8 if wide == 1 else 4, 2)


def splits_for(programs: int, longest: int, processors: int) -> int:
    """A power of two of splits, so that each processor gets 16 programs if keys (`longest` tiles) last that long."""
    wanted = min(16 * processors // programs, longest, 64)
    return 1 << max(wanted.bit_length() - 1, 0)


def _padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
