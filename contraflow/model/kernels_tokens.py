"""What lies between a layer's big matmuls at inference, in Triton kernels: routing, and a sum with its norm.

Takes and gives what `router` and `ops` do in their plain forms, of tensors on a GPU. What a token gets does not depend
on the tokens beside it. Knows no gradients; imported when first needed.

Shape letters: T tokens, D width, E experts, K experts a token, S parts of D that are summed apart.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 256  # terms of a logit that one program sums: D in few long sums would leave most of a GPU idle


class Routed(NamedTuple):
    """Experts of each token, best first, int64 `[T, K]`; their softmax weights, fp32 `[T, K]`; fp32 logits `[T, E]`."""

    ids_TK: Tensor
    weights_TK: Tensor
    logits_TE: Tensor


def route(x_TD: Tensor, weight_ED: Tensor, top_k: int, *, renormalise: bool) -> Routed:
    """The `top_k` experts by `x @ weight.T` of half-precision `x` and fp32 `weight`, to fp32's precision.

    `renormalise` makes the weights of the chosen sum to 1. Needs 1 <= `top_k` <= E.
    """
    return choose(logit_parts(x_TD, weight_ED), top_k, renormalise=renormalise)


def logit_parts(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """fp32 `[S, T, E]`, whose sums over S are `x @ weight.T`.

    Half-precision numbers fit into TF32, fp32 weights into two of them but for the last two bits.
    """
    (tokens, dim), experts = x_TD.shape, weight_ED.shape[0]
    rows, cols, deep = 16, 64, 64
    parts_STE = weight_ED.new_empty(triton.cdiv(dim, PART), tokens, experts)
    if tokens:
        grid = (triton.cdiv(tokens, rows), triton.cdiv(experts, cols), parts_STE.shape[0])
        _logit_parts[grid](
            x_TD.contiguous(), weight_ED, parts_STE, tokens, experts, dim, PART, rows, cols, deep, num_warps=4
        )
    return parts_STE


def choose(parts_STE: Tensor, top_k: int, *, renormalise: bool) -> Routed:
    """Add the parts of logits, and choose. Of equal logits the lower id comes first; NaN counts as the largest."""
    count, tokens, experts = parts_STE.shape
    ids_TK = parts_STE.new_empty(tokens, top_k, dtype=torch.int64)
    weights_TK, logits_TE = parts_STE.new_empty(tokens, top_k), parts_STE.new_empty(tokens, experts)
    if tokens:
        wide, slots = triton.next_power_of_2(experts), triton.next_power_of_2(top_k)
        _choose[(tokens,)](
            parts_STE.contiguous(), ids_TK, weights_TK, logits_TE, tokens, experts,
            count, top_k, slots, wide, renormalise, num_warps=1,
        )  # fmt: skip
    return Routed(ids_TK, weights_TK, logits_TE)


def add_norm(x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x + delta` rounded to x's dtype, and the root-mean-square norm of that, computed in fp32 and rounded once."""
    sum_TD, normed_TD = (torch.empty_like(x_TD, memory_format=torch.contiguous_format) for _ in range(2))
    tokens, dim = x_TD.shape
    if tokens:
        wide = triton.next_power_of_2(dim)
        _add_norm[(tokens,)](
            x_TD.contiguous(), delta_TD.contiguous(), weight_D, sum_TD, normed_TD, dim, eps, wide,
            num_warps=min(8, max(1, wide // 512)),
        )  # fmt: skip
    return sum_TD, normed_TD


@triton.jit(do_not_specialize=["tokens"])
def _logit_parts(
    x_TD, weight_ED, parts_STE, tokens, experts, dim,
    SHARE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    part = tl.program_id(2)
    x_at, weight_at = x_TD + row[:, None] * dim, weight_ED + col[:, None] * dim
    logits = tl.zeros([ROWS, COLS], tl.float32)
    for first in range(0, SHARE, DEPTH):
        deep = (part * SHARE + first + tl.arange(0, DEPTH))[None, :]
        x = tl.load(x_at + deep, (row < tokens)[:, None] & (deep < dim), other=0.0).to(tl.float32)
        weight = tl.load(weight_at + deep, (col < experts)[:, None] & (deep < dim), other=0.0)
        logits = tl.dot(x, weight.T, logits, input_precision="tf32x3")
    at = parts_STE + (part * tokens + row[:, None]) * experts + col[None, :]
    tl.store(at, logits, (row < tokens)[:, None] & (col < experts)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _choose(
    parts_STE, ids_TK, weights_TK, logits_TE, tokens, experts,
    PARTS: tl.constexpr, CHOICES: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr, RENORMALISE: tl.constexpr,
):  # fmt: skip
    """One token: a warp, whose lanes hold the experts."""
    token, lane, slot = tl.program_id(0), tl.arange(0, WIDE), tl.arange(0, SLOTS)
    at, inside = token * experts + lane, lane < experts
    logits = tl.load(parts_STE + at, inside, other=float("-inf"))
    for part in tl.static_range(1, PARTS):
        logits += tl.load(parts_STE + part * tokens * experts + at, inside, other=0.0)
    tl.store(logits_TE + at, logits, inside)
    odds = tl.exp(logits - tl.max(logits, 0))
    # What is taken, or no expert, is below every logit: whatever those are, ids are K different ones in [0, experts).
    keys = tl.where(logits < float("inf"), tl.maximum(logits, -3.0e38), float("inf"))  # NaN is not below it
    keys = tl.where(inside, keys, float("-inf"))
    ids, chosen = tl.zeros([SLOTS], tl.int64), tl.zeros([SLOTS], tl.float32)
    for choice in tl.static_range(CHOICES):
        best = tl.argmax(keys, 0)
        ids = tl.where(slot == choice, best, ids)
        chosen = tl.where(slot == choice, tl.sum(tl.where(lane == best, odds, 0.0), 0), chosen)
        keys = tl.where(lane == best, float("-inf"), keys)
    total = tl.sum(chosen, 0) if RENORMALISE else tl.sum(odds, 0)
    tl.store(ids_TK + token * CHOICES + slot, ids, slot < CHOICES)
    tl.store(weights_TK + token * CHOICES + slot, chosen / total, slot < CHOICES)


@triton.jit
def _add_norm(
    x_TD, delta_TD, weight_D, sum_TD, normed_TD, dim, eps, WIDE: tl.constexpr
):  # fmt: skip
    col = tl.arange(0, WIDE)
    at, inside = tl.program_id(0) * dim + col, col < dim
    x = tl.load(x_TD + at, inside, other=0.0).to(tl.float32)
    total = (x + tl.load(delta_TD + at, inside, other=0.0).to(tl.float32)).to(sum_TD.dtype.element_ty)
    tl.store(sum_TD + at, total, inside)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / dim + eps)
    weight = tl.load(weight_D + col, inside, other=0.0).to(tl.float32)
    tl.store(normed_TD + at, (wide * scale * weight).to(normed_TD.dtype.element_ty), inside)
