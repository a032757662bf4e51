"""Triton kernels of the dispatch over NVLink: rows into and out of memory that ranks share, and the signal between.

A rank's memory is two halves alike: signals int64 [S]; tokens int32 [S]; expert ids int32 and weights fp32, both [S,
most, K]; rows [S, most, stride]. A call uses the half of its turn's parity; `turn`, the calls complete, lies on the
device, so that graphs can be replayed. `peers` tells how far from `own` each rank's memory begins, in units of 16
bytes; `*_at` are offsets of sections and `half` the size of a half, in bytes. Triton is imported here alone.
Shape letters as in `base`; S ranks, SP and KP the powers of two from S and K on, N tokens of a tile, L experts held.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

TYPES = {
    torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, torch.float64: tl.float64,
    torch.uint8: tl.uint8,
}  # fmt: skip


@triton.jit
def _section(own, peers, turn, rank, ahead, half, at, DTYPE: tl.constexpr):
    """Where a section of a rank's memory begins; `ahead` 1 before the call's signal was heard, 0 after.

    Counted from `own` and in units, so that the compiler knows the alignment, and moves 16 bytes at once.
    """
    which = (tl.load(turn) + ahead) & 1
    return (own + (tl.load(peers + rank) * 16 + which * half + at)).to(tl.pointer_type(DTYPE))


@triton.jit
def _reached(ids, token_N, here_N, K: tl.constexpr, HELD: tl.constexpr):
    """A bit for each rank that owns one of a token's experts. Choice by choice: a reduction would make warps wait."""
    bits_N = tl.zeros_like(token_N)
    one_N = bits_N + 1
    for choice in tl.static_range(K):
        id_N = tl.load(ids + token_N * K + choice, mask=here_N, other=-1).to(tl.int32)
        bits_N |= tl.where(id_N >= 0, one_N << (tl.maximum(id_N, 0) // HELD), 0)
    return bits_N


@triton.jit
def _quantised(x_NC, ROWS: tl.constexpr, COLS: tl.constexpr):
    """E4M3 values as bytes and a scale for each block of 128: as `wire.quantise`, bit for bit."""
    x_NQb = tl.reshape(x_NC.to(tl.float32), [ROWS, COLS // 128, 128])
    scale_NQ = tl.div_rn(tl.max(tl.abs(x_NQb), 2), 448.0)
    scale_NQ = tl.where(scale_NQ == 0, 1.0, scale_NQ)
    scaled_NQb = tl.div_rn(x_NQb, tl.broadcast_to(scale_NQ[:, :, None], [ROWS, COLS // 128, 128]))
    return tl.reshape(scaled_NQb.to(tl.float8e4nv).to(tl.uint8, bitcast=True), [ROWS, COLS]), scale_NQ


@triton.jit
def _restored(bytes_NC, scale_NQ, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The values of `_quantised`, fp32."""
    x_NQb = tl.reshape(bytes_NC.to(tl.float8e4nv, bitcast=True).to(tl.float32), [ROWS, COLS // 128, 128])
    return tl.reshape(x_NQb * scale_NQ[:, :, None], [ROWS, COLS])


@triton.jit(do_not_specialize=["me", "tokens", "most"])
def push(
    x, ids, weights, own, peers, turn, me, tokens, dim, x_stride, most, half, tokens_at, ids_at, weights_at,
    rows_at, stride,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, HELD: tl.constexpr, DTYPE: tl.constexpr,
    META: tl.constexpr, FP8: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Store each token once to every rank that owns one of its experts; with META its ids and weights to all ranks.

    As DTYPE; FP8: as bytes, [whole blocks of 128], and after them the fp32 scale of each block.
    """
    chunks = tl.cdiv(dim, COLS)
    width = tl.cdiv(dim, 128) * 128 if FP8 else dim
    if META and tl.program_id(0) == 0:
        for rank in tl.static_range(S):
            tl.store(_section(own, peers, turn, rank, 1, half, tokens_at, tl.int32) + me, tokens)
    for unit in range(tl.program_id(0), tl.cdiv(tokens, ROWS) * chunks, tl.num_programs(0)):
        token_N = (unit // chunks) * ROWS + tl.arange(0, ROWS)
        col_C = (unit % chunks) * COLS + tl.arange(0, COLS)
        inside_NC = (token_N < tokens)[:, None] & (col_C < dim)[None, :]
        x_NC = tl.load(x + token_N.to(tl.int64)[:, None] * x_stride + col_C[None, :], mask=inside_NC, other=0)
        if FP8:
            x_NC, scale_NQ = _quantised(x_NC, ROWS, COLS)
            block_Q = (unit % chunks) * (COLS // 128) + tl.arange(0, COLS // 128)
        bits_N = _reached(ids, token_N, token_N < tokens, K, HELD)
        slot_N = me.to(tl.int64) * most + token_N
        for rank in tl.static_range(S):
            if META and unit % chunks == 0:
                _tell(
                    ids, weights, own, peers, turn, rank, token_N, slot_N, tokens, half, ids_at, weights_at, K, KP, HELD
                )
            goes_N = ((bits_N >> rank) & 1) != 0
            target = _section(own, peers, turn, rank, 1, half, rows_at, DTYPE) + slot_N[:, None] * stride
            tl.store(target + col_C[None, :], x_NC.to(DTYPE), mask=goes_N[:, None] & (col_C < width)[None, :])
            if FP8:
                scales = (target + width).to(tl.pointer_type(tl.float32))
                tl.store(scales + block_Q[None, :], scale_NQ, mask=goes_N[:, None] & (block_Q * 128 < dim)[None, :])


@triton.jit
def _tell(
    ids, weights, own, peers, turn, rank, token_N, slot_N, tokens, half, ids_at, weights_at,
    K: tl.constexpr, KP: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Store the experts of tokens, those of `rank` by its own numbers and others as -1, and their weights."""
    choice_K = tl.arange(0, KP)
    here_NK = (token_N < tokens)[:, None] & (choice_K < K)[None, :]
    pair_NK = token_N[:, None] * K + choice_K[None, :]
    ids_NK = tl.load(ids + pair_NK, mask=here_NK, other=-1)
    mine_NK = (ids_NK >= rank * HELD) & (ids_NK < (rank + 1) * HELD)
    weights_NK = tl.load(weights + pair_NK, mask=here_NK & mine_NK, other=0.0)
    place_NK = slot_N[:, None] * K + choice_K[None, :]
    told = _section(own, peers, turn, rank, 1, half, ids_at, tl.int32) + place_NK
    tl.store(told, tl.where(mine_NK, ids_NK - rank * HELD, -1).to(tl.int32), mask=here_NK)
    told = _section(own, peers, turn, rank, 1, half, weights_at, tl.float32) + place_NK
    tl.store(told, weights_NK, mask=here_NK)


@triton.jit(do_not_specialize=["me", "tag"])
def ring(
    own, peers, turn, me, tag, half,
    S: tl.constexpr, SP: tl.constexpr, TAGS: tl.constexpr,
):  # fmt: skip
    """Tell every rank that what this one had to write in this call, whose kind is `tag`, is written."""
    rank_S = tl.arange(0, SP)
    now = tl.load(turn) + 1
    signals_S = own + (tl.load(peers + rank_S, mask=rank_S < S, other=0) * 16 + (now & 1) * half)
    word_S = tl.zeros([SP], tl.int64) + now * TAGS + tag
    signals_S = signals_S.to(tl.pointer_type(tl.int64)) + me
    tl.atomic_xchg(signals_S, word_S, mask=rank_S < S, sem="release", scope="sys")


@triton.jit(do_not_specialize=["me", "tag", "limit"])
def listen(
    own, peers, turn, told, me, tag, limit, half,
    S: tl.constexpr, SP: tl.constexpr, TAGS: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """Wait for all ranks to have told; `limit` nanoseconds by the device's clock, or looks where it has none.

    `told[1 + rank]` becomes 1 for a rank that is late, 2 for one that is in a call of another kind. Once that has
    happened no later call waits, since nothing after it can be right.
    """
    rank_S = tl.arange(0, SP)
    now = tl.load(turn) + 1
    signals = _section(own, peers, turn, me, 1, half, 0, tl.int64) + rank_S
    none_S = tl.zeros([SP], tl.int64)
    fault_S = tl.load(told + 1 + rank_S, mask=rank_S < S, other=0)
    lost = tl.max(fault_S, 0) > 0
    word_S = tl.atomic_add(signals, none_S, mask=rank_S < S, sem="acquire", scope="sys")
    waiting = tl.max(((word_S < now * TAGS) & (rank_S < S)).to(tl.int32), 0) > 0
    waited = now * 0
    began = waited
    if CLOCK:
        began = globaltimer().to(tl.int64)
    while waiting & (waited < limit) & (lost == 0):
        word_S = tl.atomic_add(signals, none_S, mask=rank_S < S, sem="acquire", scope="sys")
        waiting = tl.max(((word_S < now * TAGS) & (rank_S < S)).to(tl.int32), 0) > 0
        if CLOCK:
            waited = globaltimer().to(tl.int64) - began
        else:
            waited += 1
    found_S = tl.where(word_S < now * TAGS, 1, tl.where(word_S != now * TAGS + tag, 2, 0))
    tl.store(told + 1 + rank_S, tl.where(lost, fault_S, found_S), mask=rank_S < S)
    tl.store(turn, now)


@triton.jit(do_not_specialize=["me", "tag", "limit"])
def meet(
    own, peers, turn, told, me, tag, limit, half,
    S: tl.constexpr, SP: tl.constexpr, TAGS: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """`ring` and `listen` in one."""
    ring(own, peers, turn, me, tag, half, S, SP, TAGS)
    listen(own, peers, turn, told, me, tag, limit, half, S, SP, TAGS, CLOCK)


@triton.jit(do_not_specialize=["me", "most"])
def group(
    row, ends, came, told, own, peers, turn, me, most, half, tokens_at, ids_at,
    S: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Give each pair that came its row: a program an expert, rows by expert, then source, token and choice.

    Writes `row` int32 [N, K] (-1: no expert here), `ends` [L], `came` [S] tokens by source, `told[0]` rows in all.
    """
    expert, lane_B = tl.program_id(0), tl.arange(0, BLOCK)
    tokens = _section(own, peers, turn, me, 0, half, tokens_at, tl.int32)
    ids = _section(own, peers, turn, me, 0, half, ids_at, tl.int32)
    before_B = tl.zeros([BLOCK], tl.int32)
    count_B = tl.zeros([BLOCK], tl.int32)
    for source in tl.static_range(S):
        pairs = tl.minimum(tl.maximum(tl.load(tokens + source), 0), most) * K  # whatever a lost rank left there
        for at in range(0, pairs, BLOCK):
            id_B = tl.load(ids + source * most * K + at + lane_B, mask=at + lane_B < pairs, other=-1)
            before_B += ((id_B >= 0) & (id_B < expert)).to(tl.int32)
            count_B += (id_B == expert).to(tl.int32)
    first = tl.sum(before_B, 0)
    tl.store(ends + expert, first + tl.sum(count_B, 0))
    if expert == tl.num_programs(0) - 1:
        tl.store(told, first + tl.sum(count_B, 0))
    for source in tl.static_range(S):
        count = tl.minimum(tl.maximum(tl.load(tokens + source), 0), most)
        if expert == 0:
            tl.store(came + source, count)
        for at in range(0, count * K, BLOCK):
            place_B = source * most * K + at + lane_B
            inside_B = at + lane_B < count * K
            id_B = tl.load(ids + place_B, mask=inside_B, other=-1)
            is_B = (id_B == expert) & inside_B
            none_B = inside_B & (expert == 0) & ((id_B < 0) | (id_B >= tl.num_programs(0)))
            row_B = tl.where(is_B, first + tl.cumsum(is_B.to(tl.int32), 0) - 1, -1)
            tl.store(row + place_B, row_B, mask=is_B | none_B)
            first += tl.sum(is_B.to(tl.int32), 0)


@triton.jit(do_not_specialize=["me", "most"])
def spread(
    y, weights_R, row, came, own, peers, turn, me, dim, most, half, weights_at, rows_at, stride,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, DTYPE: tl.constexpr, META: tl.constexpr, FP8: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Copy what came to the rows of the experts, `y` [R, dim]; with META the weights too."""
    choice_K = tl.arange(0, KP)
    chunks = tl.cdiv(dim, COLS)
    rows = _section(own, peers, turn, me, 0, half, rows_at, DTYPE)
    for source in tl.static_range(S):
        count = tl.load(came + source)
        for unit in range(tl.program_id(0), tl.cdiv(count, ROWS) * chunks, tl.num_programs(0)):
            token_N = (unit // chunks) * ROWS + tl.arange(0, ROWS)
            col_C = (unit % chunks) * COLS + tl.arange(0, COLS)
            slot_N = source * most + token_N.to(tl.int64)
            inside_NC = (token_N < count)[:, None] & (col_C < dim)[None, :]
            here_NK = (token_N < count)[:, None] & (choice_K < K)[None, :]
            row_NK = tl.load(row + slot_N[:, None] * K + choice_K[None, :], mask=here_NK, other=-1)
            any_N = tl.max(row_NK, 1) >= 0
            source_N1 = rows + slot_N[:, None] * stride
            x_NC = tl.load(source_N1 + col_C[None, :], mask=inside_NC & any_N[:, None], other=0)
            if FP8:
                block_Q = (unit % chunks) * (COLS // 128) + tl.arange(0, COLS // 128)
                scales = (source_N1 + tl.cdiv(dim, 128) * 128).to(tl.pointer_type(tl.float32)) + block_Q[None, :]
                scale_NQ = tl.load(scales, mask=any_N[:, None] & (block_Q * 128 < dim)[None, :], other=1.0)
                x_NC = _restored(x_NC, scale_NQ, ROWS, COLS)
            if META and unit % chunks == 0:
                weights = _section(own, peers, turn, me, 0, half, weights_at, tl.float32)
                weight_NK = tl.load(weights + slot_N[:, None] * K + choice_K[None, :], mask=row_NK >= 0, other=0.0)
                tl.store(weights_R + row_NK, weight_NK, mask=row_NK >= 0)
            for choice in tl.static_range(K):
                row_N = tl.load(row + slot_N * K + choice, mask=token_N < count, other=-1).to(tl.int64)
                target = y + row_N[:, None] * dim + col_C[None, :]
                tl.store(target, x_NC.to(y.dtype.element_ty), mask=inside_NC & (row_N >= 0)[:, None])


@triton.jit(do_not_specialize=["me", "most"])
def gather(
    y, extra_R, row, came, own, peers, turn, me, dim, most, half, weights_at, rows_at, stride,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, DTYPE: tl.constexpr, META: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Sum the rows of `y` [R, dim] of each token that came, into its slot here; with META extras, one a pair."""
    choice_K = tl.arange(0, KP)
    chunks = tl.cdiv(dim, COLS)
    rows = _section(own, peers, turn, me, 1, half, rows_at, DTYPE)
    for source in tl.static_range(S):
        count = tl.load(came + source)
        for unit in range(tl.program_id(0), tl.cdiv(count, ROWS) * chunks, tl.num_programs(0)):
            token_N = (unit // chunks) * ROWS + tl.arange(0, ROWS)
            col_C = (unit % chunks) * COLS + tl.arange(0, COLS)
            slot_N = source * most + token_N.to(tl.int64)
            inside_NC = (token_N < count)[:, None] & (col_C < dim)[None, :]
            if META and unit % chunks == 0:
                here_NK = (token_N < count)[:, None] & (choice_K < K)[None, :]
                row_NK = tl.load(row + slot_N[:, None] * K + choice_K[None, :], mask=here_NK, other=-1)
                extra_NK = tl.load(extra_R + row_NK, mask=row_NK >= 0, other=0.0)
                extras = _section(own, peers, turn, me, 1, half, weights_at, tl.float32)
                tl.store(extras + slot_N[:, None] * K + choice_K[None, :], extra_NK, mask=here_NK)
            sum_NC = tl.zeros([ROWS, COLS], WIDE)
            for choice in tl.static_range(K):
                row_N = tl.load(row + slot_N * K + choice, mask=token_N < count, other=-1).to(tl.int64)
                there_NC = inside_NC & (row_N >= 0)[:, None]
                sum_NC += tl.load(y + row_N[:, None] * dim + col_C[None, :], mask=there_NC, other=0).to(WIDE)
            tl.store(rows + slot_N[:, None] * stride + col_C[None, :], sum_NC.to(DTYPE), mask=inside_NC)


@triton.jit(do_not_specialize=["me", "tokens", "most"])
def pull(
    out, extra, ids, own, peers, turn, me, tokens, dim, most, half, weights_at, rows_at, stride,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, HELD: tl.constexpr, DTYPE: tl.constexpr,
    META: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Load and sum, rank by rank, what the owners of each token's experts have for it; with META each pair's extra."""
    choice_K = tl.arange(0, KP)
    chunks = tl.cdiv(dim, COLS)
    for unit in range(tl.program_id(0), tl.cdiv(tokens, ROWS) * chunks, tl.num_programs(0)):
        token_N = (unit // chunks) * ROWS + tl.arange(0, ROWS)
        col_C = (unit % chunks) * COLS + tl.arange(0, COLS)
        inside_NC = (token_N < tokens)[:, None] & (col_C < dim)[None, :]
        pair_NK = token_N[:, None] * K + choice_K[None, :]
        here_NK = (token_N < tokens)[:, None] & (choice_K < K)[None, :]
        bits_N = _reached(ids, token_N, token_N < tokens, K, HELD)
        slot_N = me.to(tl.int64) * most + token_N
        sum_NC = tl.zeros([ROWS, COLS], WIDE)
        for rank in tl.static_range(S):
            has_N = ((bits_N >> rank) & 1) != 0
            rows = _section(own, peers, turn, rank, 0, half, rows_at, DTYPE)
            place_NC = slot_N[:, None] * stride + col_C[None, :]
            sum_NC += tl.load(rows + place_NC, mask=inside_NC & has_N[:, None], other=0).to(WIDE)
        target = out + token_N.to(tl.int64)[:, None] * dim + col_C[None, :]
        tl.store(target, sum_NC.to(out.dtype.element_ty), mask=inside_NC)
        if META and unit % chunks == 0:
            ids_NK = tl.load(ids + pair_NK, mask=here_NK, other=-1)
            extra_NK = tl.zeros([ROWS, KP], tl.float32)
            for rank in tl.static_range(S):
                mine_NK = (ids_NK >= rank * HELD) & (ids_NK < (rank + 1) * HELD)
                extras = _section(own, peers, turn, rank, 0, half, weights_at, tl.float32)
                extra_NK += tl.load(extras + slot_N[:, None] * K + choice_K[None, :], mask=mine_NK, other=0.0)
            tl.store(extra + pair_NK, extra_NK, mask=here_NK)
