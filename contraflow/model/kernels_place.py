"""Triton kernel between the query-key-value projection and attention at inference. Import late: CUDA only.

Takes the projection's output; gives normed, clamped and turned queries, and writes keys, likewise, and values into the
pages of a cache. One pass over memory, fp32 inside and rounded once. Has no gradient.

Shape letters: T tokens, H query heads, G key/value heads, d head dimension, r dimensions that turn, R and D heads and
d padded to powers of two, BS tokens of a block.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from contraflow.model.paged import Placing, Target

NORMS = {"none": 0, "head": 1, "projection": 2}


@triton.jit
def _place(
    qkv, cos, sin, norm, slots, q, layer, eps, clip,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, R: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,
    TURNED: tl.constexpr, BS: tl.constexpr, NORM: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """All query heads of a token, or its keys, or its values."""
    token, kind = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count, before = (
        tl.where(kind == 0, HEADS, GROUPS),
        tl.where(kind == 0, 0, tl.where(kind == 1, HEADS, HEADS + GROUPS)),
    )
    head_R, d_D = tl.arange(0, R), tl.arange(0, D)
    here = (head_R < count)[:, None] & (d_D < DIM)[None, :]
    row = qkv + (token * (HEADS + 2 * GROUPS) + before + head_R)[:, None] * DIM
    x = tl.load(row + d_D[None, :], mask=here, other=0.0).to(tl.float32)
    if kind < 2:
        # The other of each pair that turns together; beyond the turned ones, itself.
        pair_D = tl.where(d_D < TURNED, (d_D + TURNED // 2) % TURNED, d_D)
        y = tl.load(row + pair_D[None, :], mask=here, other=0.0).to(tl.float32)
        if NORM == 1:
            gain = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
            x *= gain * tl.load(norm + kind * DIM + d_D, mask=d_D < DIM, other=0.0).to(tl.float32)[None, :]
            y *= gain * tl.load(norm + kind * DIM + pair_D, mask=d_D < DIM, other=0.0).to(tl.float32)[None, :]
        if NORM == 2:
            gain = tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / (count * DIM) + eps)
            weights = norm + (before + head_R)[:, None] * DIM
            x *= gain * tl.load(weights + d_D[None, :], mask=here, other=0.0).to(tl.float32)
            y *= gain * tl.load(weights + pair_D[None, :], mask=here, other=0.0).to(tl.float32)
        if CLIP:
            x, y = tl.minimum(tl.maximum(x, -clip), clip), tl.minimum(tl.maximum(y, -clip), clip)
        turn_D = d_D < TURNED
        cos_D = tl.load(cos + token * TURNED + d_D, mask=turn_D, other=1.0).to(tl.float32)
        sin_D = tl.load(sin + token * TURNED + d_D, mask=turn_D, other=0.0).to(tl.float32)
        x = x * cos_D[None, :] + y * sin_D[None, :]
    elif CLIP:
        x = tl.minimum(tl.maximum(x, -clip), clip)
    if kind == 0:
        tl.store(q + (token * HEADS + head_R)[:, None] * DIM + d_D[None, :], x, mask=here)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        page_R = ((slot // BS) * 2 + kind - 1) * GROUPS + head_R
        tl.store(layer + (page_R * BS + slot % BS)[:, None] * DIM + d_D[None, :], x, mask=here)


def place(qkv: Tensor, cos_T1r: Tensor, sin_T1r: Tensor, placing: Placing, target: Target, *, kv_heads: int) -> Tensor:
    """`[T, H + 2 * G, d]` -> queries `[T, H, d]` in the pages' dtype; keys and values go to their slots.

    Slots that several tokens share hold one of them (padding rows share a scratch block).
    """
    tokens, rows, dim = qkv.shape
    heads = rows - 2 * kv_heads
    layer, norm = target.layer, placing.norm
    q_THd = torch.empty(tokens, heads, dim, dtype=layer.dtype, device=qkv.device)
    if not tokens:
        return q_THd
    padded, width = triton.next_power_of_2(max(heads, kv_heads)), triton.next_power_of_2(dim)
    named = "none" if norm is None else ("head" if norm.ndim == 2 else "projection")
    shape: dict[str, Any] = {"HEADS": heads, "GROUPS": kv_heads, "R": padded, "DIM": dim, "D": width}
    _place[(tokens, 3)](
        qkv.contiguous(), cos_T1r.contiguous(), sin_T1r.contiguous(), qkv if norm is None else norm, target.slots_T,
        q_THd, layer, placing.eps, placing.clip or 0.0, TURNED=cos_T1r.shape[-1], BS=target.block_tokens,
        NORM=NORMS[named], CLIP=placing.clip is not None, num_warps=min(max(padded * width // 512, 1), 8), **shape,
    )  # fmt: skip
    return q_THd
