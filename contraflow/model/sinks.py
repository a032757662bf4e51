"""Attention with sinks and a sliding window (gpt-oss; sinks after Xiao et al. 2023, arXiv 2309.17453).

A sink is one more score of each head, with no value behind it: it takes its share of the softmax and gives nothing.
A window hides all but the last positions. Both are the layer's own, so it hands a `Sight` to its plan. Three forms of
one function: by torch's attention, by plain matmuls (`sink_softmax`), and by flash attention on a GPU.

Shape letters: T tokens, H query heads, G key/value heads, s = H / G, d head dimension, B sequences, Q queries of each,
L positions.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Sight(NamedTuple):
    """What a layer adds to its plan."""

    sinks_H: Tensor
    window: int | None  # positions a token sees, its own among them; None: all


def hidden(queries: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """True where a query at position `queries` (`[..., 1]`) may not see `positions`."""
    later = positions > queries
    return later if window is None else later | (positions <= queries - window)


def additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to add to scores. Finite, so that a row that may see nothing gives numbers, not NaN."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, torch.finfo(dtype).min / 2)


def sink_softmax(scores_XsL: Tensor, sinks_Xs: Tensor) -> Tensor:
    """Softmax of the scores and the head's sink, the sink left out."""
    return torch.cat((scores_XsL, sinks_Xs.unsqueeze(-1)), -1).softmax(-1)[..., :-1]


def sink_attention(q_BHQd: Tensor, k_BGLd: Tensor, v_BGLd: Tensor, mask_B1QL: Tensor, sinks_H: Tensor) -> Tensor:
    """`[B, H, Q, d]` of torch's attention under an additive mask (`[1 or B, 1, Q, L]`), differentiable but in the mask.

    The sink is one more key with a value of zeros: queries get s further dimensions that say which of the heads that
    share a key they are, and in these the key holds the heads' sinks.
    """
    (batch, heads, queries, d), groups = q_BHQd.shape, k_BGLd.shape[1]
    share = heads // groups
    which_Qs = torch.eye(share, dtype=q_BHQd.dtype, device=q_BHQd.device).repeat_interleave(queries, 0)
    q = q_BHQd.reshape(batch, groups, share * queries, d)
    q = torch.cat((q, which_Qs.expand(batch, groups, -1, -1)), -1)
    sink_key = F.pad(sinks_H.to(q.dtype).view(1, groups, 1, share) * d**0.5, (d, 0))
    k = torch.cat((F.pad(k_BGLd, (0, share)), sink_key.expand(batch, -1, -1, -1)), 2)
    mask = F.pad(mask_B1QL, (0, 1)).repeat(1, 1, share, 1)
    o = F.scaled_dot_product_attention(q, k, F.pad(v_BGLd, (0, 0, 0, 1)), attn_mask=mask, scale=d**-0.5)
    return o.reshape(batch, heads, queries, d)


class Packing(NamedTuple):
    """Where sequences begin in what is packed end to end, int32 `[S + 1]`, and how long the longest is."""

    starts_S1: Tensor
    longest: int


def flash_with_sinks(
    q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, queries: Packing, keys: Packing, sight: Sight
) -> Tensor:
    """Packed sequences by flash attention: CUDA, half precision, d a multiple of 8; memory grows with T only.

    A sequence may have fewer queries than keys: they are its last.
    """
    left = -1 if sight.window is None else sight.window - 1
    o_THd: Tensor = _Flash.apply(q_THd, k_TGd, v_TGd, sight.sinks_H, queries, keys, left)  # type: ignore[no-untyped-call]
    return o_THd


class _Flash(torch.autograd.Function):
    """With l the log of the sum of exponentials of a query's scores and s its sink, the output without sinks is scaled
    by 1 / (1 + exp(s - l)), and probabilities are those under l' = log(exp(l) + exp(s)). Flash attention's backward
    makes probabilities from whatever sums it is given, so l' and the scaled output give the gradients with sinks."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor, queries: Packing, keys: Packing, left: int
    ) -> Tensor:
        starts, longest = (queries.starts_S1, keys.starts_S1), (queries.longest, keys.longest)
        flat, sums_HT, ctx.state, ctx.offset, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *starts, *longest, 0.0, left < 0, False, window_size_left=left, window_size_right=0
        )
        over_HT = sinks_H.float().unsqueeze(1) - sums_HT
        out: Tensor = flat * over_HT.neg().sigmoid().t().unsqueeze(-1).to(flat.dtype)
        ctx.save_for_backward(q, k, v, out, sums_HT + F.softplus(over_HT), sinks_H, *starts)
        ctx.longest, ctx.left = longest, left
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums_HT, sinks_H, *starts = ctx.saved_tensors
        left, longest = ctx.left, ctx.longest
        grad = grad.contiguous()
        grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, sums_HT, *starts, *longest, 0.0, left < 0, ctx.state, ctx.offset,
            window_size_left=left, window_size_right=0,
        )  # fmt: skip
        along_HT = (grad.float() * out.float()).sum(-1).t()
        share_HT = (sinks_H.float().unsqueeze(1) - sums_HT).exp()  # of the softmax, that the sink takes
        return grad_q, grad_k, grad_v, -(share_HT * along_HT).sum(1).to(sinks_H.dtype), None, None, None
