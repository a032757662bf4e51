"""Attention over keys and values that are kept from pass to pass, of one sequence: what an engine does that keeps its
cache while its weights change.

Takes the tokens of each pass, gives a plan for it. Without gradients; one sequence, as long as it may be.
Shape letters: T tokens fed, L kept and fed, H query heads, G key/value heads, d head dimension.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from contraflow.model.attention import windowed
from contraflow.model.sinks import Sight, sink_attention


class GrowingPlan:
    """A `Plan` for one pass after the other. Invariant: every layer holds the tokens of all passes, in order."""

    def __init__(self) -> None:
        self._layers: dict[int, _Grown] = {}

    def layer(self, index: int) -> "_Grown":
        """See `Plan`."""
        return self._layers.setdefault(index, _Grown())


class _Grown:
    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor] | None = None

    def attend(self, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, sight: Sight | None = None) -> Tensor:
        """See `attend`: new tokens see all kept ones and the new ones before them."""
        if self._kept is not None:
            k_TGd, v_TGd = (torch.cat(both) for both in zip(self._kept, (k_TGd, v_TGd), strict=True))
        self._kept = (k_TGd, v_TGd)
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THd, k_TGd, v_TGd))
        window = None if sight is None else sight.window
        mask = windowed(k.shape[2], q.shape[2], window, q.device, q.dtype)
        if sight is None:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
        else:
            o = sink_attention(q, k, v, mask, sight.sinks_H)
        return o[0].transpose(0, 1)
