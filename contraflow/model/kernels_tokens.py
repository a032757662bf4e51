"""What lies between a layer's matmuls at inference, as one Triton kernel each: routing, and a sum with its norm.

Takes and gives what `router` and `ops` do in their plain forms, of tensors on a GPU; a program a token. Knows no
gradients; imported when first needed. Shape letters: T tokens, D width, E experts, K experts a token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def route(logits_TE: Tensor, top_k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The `top_k` experts of fp32 logits: ids int64 `[T, K]`, best first, and softmax weights fp32 `[T, K]`.

    Of equal logits the lower id comes first; NaN counts as the largest. `renormalise` makes the weights of the chosen
    sum to 1. Needs 1 <= `top_k` <= E.
    """
    tokens, experts = logits_TE.shape
    ids_TK = logits_TE.new_empty(tokens, top_k, dtype=torch.int64)
    weights_TK = logits_TE.new_empty(tokens, top_k)
    if tokens:
        wide, slots = triton.next_power_of_2(experts), triton.next_power_of_2(top_k)
        _route[(tokens,)](
            logits_TE.contiguous(), ids_TK, weights_TK, experts, top_k, slots, wide, renormalise, num_warps=1
        )
    return ids_TK, weights_TK


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


@triton.jit
def _route(
    logits_TE, ids_TK, weights_TK, experts,
    CHOICES: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr, RENORMALISE: tl.constexpr,
):  # fmt: skip
    token, lane, slot = tl.program_id(0), tl.arange(0, WIDE), tl.arange(0, SLOTS)
    logits = tl.load(logits_TE + token * experts + lane, lane < experts, other=float("-inf"))
    odds = tl.exp(logits - tl.max(logits, 0))
    # What is taken, or no expert, is below every logit: whatever those are, ids are K different ones in [0, experts).
    keys = tl.where(logits < float("inf"), tl.maximum(logits, -3.0e38), float("inf"))  # NaN is not below it
    keys = tl.where(lane < experts, keys, float("-inf"))
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
