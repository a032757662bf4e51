"""A mixture's experts at inference: four Triton kernels in place of sort, gather, two grouped matmuls and sums.

Takes tokens and the experts chosen for them, gives their weighted sum; reads nothing on the host and launches grids
that follow from shapes alone, so a CUDA graph can hold it. Rows are never copied out: the first matmul reads tokens by
index. No atomics: the same inputs give the same bits. Knows no gradients, biases or ranks; imported when first needed.

Shape letters: T tokens, K experts a token, P = T * K pairs, E experts, D width, F an expert's hidden width, B blocks.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Tile(NamedTuple):
    """What one program of a matmul makes at a time: `cols` outputs of a block's rows, `depth` terms of each a step.

    `bulk`: weights are fetched by the tensor memory accelerator (Hopper and later), where their rows are aligned to it.
    `turned`: products are taken as weights times tokens, which fills matrix units that want 64 rows with few tokens.
    """

    cols: int
    depth: int
    warps: int
    stages: int
    bulk: bool = False
    turned: bool = False


class Form(NamedTuple):
    """How pairs are cut: `rows` of one expert to a block, and the tiles of both matmuls."""

    rows: int
    hidden: Tile
    out: Tile


# By mean rows an expert, up to and including. A block's rows bound what its tile computes for nothing; weights, which
# are nearly all that is read, are read once a block.
FORMS = (
    (0.5, Form(16, Tile(64, 64, 4, 5, turned=True), Tile(64, 128, 4, 3, turned=True))),
    (12, Form(16, Tile(64, 128, 4, 3, bulk=True, turned=True), Tile(128, 128, 4, 3, bulk=True, turned=True))),
    (24, Form(32, Tile(64, 64, 4, 3, turned=True), Tile(128, 64, 4, 3, bulk=True, turned=True))),
    (80, Form(64, Tile(64, 64, 4, 3, turned=True), Tile(128, 64, 4, 3, bulk=True))),
    (200, Form(128, Tile(64, 64, 8, 3, bulk=True), Tile(128, 64, 8, 3, bulk=True))),
)
MANY = Form(128, Tile(128, 64, 8, 3), Tile(256, 64, 8, 3))


def form(pairs: int, experts: int) -> Form:
    """The form for `pairs` spread over `experts`."""
    return next((form for most, form in FORMS if pairs <= most * experts), MANY)


def experts(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, *, cut: Form | None = None
) -> Tensor:
    """Sum over a token's experts of weight * down(silu(gate(x)) * up(x)), `[T, D]`, of x's dtype.

    Args: `x_TD` and both weights of one dtype; `ids_TK` int64 in [-1, E), trusted, -1 for no expert; `weights_TK` fp32;
    `gate_up_E2FD` an expert's rows of gate, then those of up. Sums are in fp32; an expert's hidden values and each
    weighted answer are rounded to x's dtype.
    """
    (tokens, choices), (count, dim, ffn) = ids_TK.shape, down_EDF.shape
    pairs = tokens * choices
    out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    if not pairs:
        return out_TD.zero_()
    x_TD, ids_TK, weights_TK = x_TD.contiguous(), ids_TK.contiguous(), weights_TK.contiguous()
    cut = cut or form(pairs, count)
    order_P, blocks_3B = align(ids_TK, count, cut.rows)
    most = blocks_3B.shape[1]
    hidden_PF, answers_PD = x_TD.new_empty(pairs, ffn), x_TD.new_empty(pairs, dim)
    for tile, wide, deep, kernel, tensors in (
        (cut.hidden, ffn, dim, _hidden, (x_TD, fetched(gate_up_E2FD, cut.hidden), hidden_PF)),
        (cut.out, dim, ffn, _answers, (hidden_PF, fetched(down_EDF, cut.out), weights_TK, answers_PD)),
    ):
        kernel[(most * triton.cdiv(wide, tile.cols),)](
            *tensors, order_P, blocks_3B, most, dim, ffn, **constants(cut.rows, tile, wide, deep, choices)
        )  # fmt: skip
    cols = min(1024, triton.next_power_of_2(dim))
    _sum[(tokens, triton.cdiv(dim, cols))](answers_PD, ids_TK, out_TD, dim, choices, cols)
    return out_TD


def fetched(weight: Tensor, tile: Tile) -> Any:
    """The weight `[E, rows, width]` as a matmul of this tile wants it: as it is, or described for bulk copies."""
    bulk = tile.bulk and weight.shape[2] * weight.element_size() % 16 == 0
    return TensorDescriptor.from_tensor(weight.flatten(0, 1), [tile.cols, tile.depth]) if bulk else weight


def constants(rows: int, tile: Tile, wide: int, deep: int, choices: int) -> dict[str, Any]:
    """What a matmul of `[rows, deep]` to `[rows, wide]` is compiled for."""
    return {
        "CHOICES": choices, "ROWS": rows, "COLS": tile.cols, "DEPTH": tile.depth,
        "EVEN": wide % tile.cols == 0 and deep % tile.depth == 0, "BULK": tile.bulk and deep % 8 == 0,
        "TURNED": tile.turned,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def align(ids_TK: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Pairs by expert, and blocks of at most `rows` of them, each of one expert.

    Gives `order_P` int32, the pairs that have an expert, by expert and then as they came (undefined behind them); and
    `blocks_3B` int32: each block's expert, where it begins in `order_P`, and its number of pairs, 0 for a spare block.
    """
    pairs = ids_TK.numel()
    most = min(pairs, pairs // rows + min(pairs, experts))  # every expert's last block may be short
    order_P = torch.empty(pairs, dtype=torch.int32, device=ids_TK.device)
    blocks_3B = torch.empty(3, most, dtype=torch.int32, device=ids_TK.device)
    chunk = min(4096, max(512, triton.next_power_of_2(pairs)))
    bins = max(64, triton.next_power_of_2(experts + 1))
    _align[(experts + 1,)](ids_TK, order_P, blocks_3B, pairs, most, rows, bins, chunk, num_warps=8)
    return order_P, blocks_3B


@triton.jit(do_not_specialize=["pairs", "most"])
def _align(
    ids_P, order_P, blocks_3B, pairs, most,
    ROWS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program e places the pairs and blocks of expert e; the last one clears the spare blocks."""
    expert = tl.program_id(0)
    bin_ = tl.arange(0, BINS)  # bin e + 1 counts expert e, and bin 0 those without
    place = tl.arange(0, CHUNK)
    counts = tl.zeros([BINS], tl.int32)
    for first in range(0, pairs, CHUNK):
        ids = tl.load(ids_P + first + place, first + place < pairs, other=-1).to(tl.int32)
        counts += tl.histogram(ids + 1, BINS)
    before = (bin_ >= 1) & (bin_ <= expert)
    mine = tl.sum(tl.where(bin_ == expert + 1, counts, 0))
    start = tl.sum(tl.where(before, counts, 0))
    block = tl.sum(tl.where(before, (counts + ROWS - 1) // ROWS, 0))
    end = block + (mine + ROWS - 1) // ROWS
    if expert == tl.num_programs(0) - 1:
        end = most
    for first in range(block, end, 128):
        at = first + tl.arange(0, 128)
        used = (at - block) * ROWS
        left = tl.minimum(tl.maximum(mine - used, 0), ROWS)
        tl.store(blocks_3B + at, expert, at < end)
        tl.store(blocks_3B + most + at, start + used, at < end)
        tl.store(blocks_3B + 2 * most + at, left, at < end)
    if mine > 0:
        for first in range(0, pairs, CHUNK):
            ids = tl.load(ids_P + first + place, first + place < pairs, other=-1).to(tl.int32)
            here = (ids == expert).to(tl.int32)
            rank = tl.cumsum(here, 0) - here
            tl.store(order_P + start + rank, first + place, here > 0)
            start += tl.sum(here)


@triton.jit(do_not_specialize=["most"])
def _hidden(
    x_TD, weight_E2FD, hidden_PF, order_P, blocks_3B, most, dim, ffn,
    CHOICES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr, BULK: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """`silu(gate) * up` of a block's pairs, by place in `order_P`. Blocks of an expert run together and share reads."""
    block, tile = tl.program_id(0) % most, tl.program_id(0) // most
    rows = tl.load(blocks_3B + 2 * most + block)
    if rows > 0:
        expert = tl.load(blocks_3B + block)
        row, col, deep = tl.arange(0, ROWS), tile * COLS + tl.arange(0, COLS), tl.arange(0, DEPTH)
        place = tl.load(blocks_3B + most + block) + row
        real, fits = row < rows, col < ffn
        token = tl.load(order_P + place, real, other=0) // CHOICES
        x_at = x_TD + token[:, None] * dim + deep[None, :]
        gate_row = expert * 2 * ffn + tile * COLS  # its row of up lies `ffn` below
        if not BULK:
            gate_at = weight_E2FD + (gate_row + tl.arange(0, COLS)).to(tl.int64)[:, None] * dim + deep[None, :]
            up_at = gate_at + ffn * dim
        gate = tl.zeros([COLS, ROWS] if TURNED else [ROWS, COLS], tl.float32)
        up = tl.zeros([COLS, ROWS] if TURNED else [ROWS, COLS], tl.float32)
        for first in range(0, dim, DEPTH):
            inside = (first + deep < dim)[None, :]
            x = tl.load(x_at + first, real[:, None] if EVEN else real[:, None] & inside, other=0.0)
            if BULK:
                gate_weight = weight_E2FD.load([gate_row, first])
                up_weight = weight_E2FD.load([gate_row + ffn, first])
            elif EVEN:
                gate_weight, up_weight = tl.load(gate_at + first), tl.load(up_at + first)
            else:
                gate_weight = tl.load(gate_at + first, fits[:, None] & inside, other=0.0)
                up_weight = tl.load(up_at + first, fits[:, None] & inside, other=0.0)
            gate = tl.dot(gate_weight, x.T, gate) if TURNED else tl.dot(x, gate_weight.T, gate)
            up = tl.dot(up_weight, x.T, up) if TURNED else tl.dot(x, up_weight.T, up)
        hidden = gate * tl.sigmoid(gate) * up
        hidden = hidden.T if TURNED else hidden
        at = hidden_PF + place[:, None] * ffn + col[None, :]
        tl.store(at, hidden.to(hidden_PF.dtype.element_ty), real[:, None] & fits[None, :])


@triton.jit(do_not_specialize=["most"])
def _answers(
    hidden_PF, weight_EDF, weights_P, answers_PD, order_P, blocks_3B, most,
    dim, ffn,
    CHOICES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr, BULK: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """`down(hidden)` times the router's weight, of a block's pairs, by pair."""
    block, tile = tl.program_id(0) % most, tl.program_id(0) // most
    rows = tl.load(blocks_3B + 2 * most + block)
    if rows > 0:
        expert = tl.load(blocks_3B + block)
        row, col, deep = tl.arange(0, ROWS), tile * COLS + tl.arange(0, COLS), tl.arange(0, DEPTH)
        place = tl.load(blocks_3B + most + block) + row
        real, fits = row < rows, col < dim
        pair = tl.load(order_P + place, real, other=0)
        hidden_at = hidden_PF + place[:, None] * ffn + deep[None, :]
        weight_row = expert * dim + tile * COLS
        if not BULK:
            weight_at = weight_EDF + (weight_row + tl.arange(0, COLS)).to(tl.int64)[:, None] * ffn + deep[None, :]
        answer = tl.zeros([COLS, ROWS] if TURNED else [ROWS, COLS], tl.float32)
        for first in range(0, ffn, DEPTH):
            inside = (first + deep < ffn)[None, :]
            hidden = tl.load(hidden_at + first, real[:, None] if EVEN else real[:, None] & inside, other=0.0)
            if BULK:
                weight = weight_EDF.load([weight_row, first])
            elif EVEN:
                weight = tl.load(weight_at + first)
            else:
                weight = tl.load(weight_at + first, fits[:, None] & inside, other=0.0)
            answer = tl.dot(weight, hidden.T, answer) if TURNED else tl.dot(hidden, weight.T, answer)
        answer = answer.T if TURNED else answer
        answer *= tl.load(weights_P + pair, real, other=0.0)[:, None]
        at = answers_PD + pair[:, None] * dim + col[None, :]
        tl.store(at, answer.to(answers_PD.dtype.element_ty), real[:, None] & fits[None, :])


@triton.jit
def _sum(answers_PD, ids_P, out_TD, dim, CHOICES: tl.constexpr, COLS: tl.constexpr):
    """A token's answers, added in the order of its choices; pairs without an expert have none."""
    token, col = tl.program_id(0), tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = tl.zeros([COLS], tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = token * CHOICES + choice
        answer = tl.load(answers_PD + pair * dim + col, col < dim, other=0.0).to(tl.float32)
        total += tl.where(tl.load(ids_P + pair) >= 0, answer, 0.0)  # where, not times: none was written there
    tl.store(out_TD + token * dim + col, total.to(out_TD.dtype.element_ty), col < dim)
