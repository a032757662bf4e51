"""Attention, with one seam: `attend(q, k, v, plan)`. What a token may see is a plan, never a flag of the model.

`PackedPlan`: whole sequences laid end to end (training). The plans of `paged`: new tokens against a paged cache
(generation, chunked prefill). All are causal with scale 1/sqrt(d), and share this file's `Attention` weights and code.
Layers with attention sinks or a sliding window hand their plan a `Sight`.

Shape letters: T tokens fed, D width, H query heads, G key/value heads, d head dimension, S packed sequences,
P padded tokens.
"""

import inspect
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from contraflow.compiled import compiled
from contraflow.errors import ModelError
from contraflow.model.arithmetic import TORCH, Computing
from contraflow.model.families import ModelConfig
from contraflow.model.kinds import FAMILIES
from contraflow.model.ops import rms_norm
from contraflow.model.paged import KernelLayer, Placing
from contraflow.model.rotary import Rotation, rotate
from contraflow.model.sinks import Packing, Sight, additive, flash_with_sinks, hidden, sink_attention

FLASH_DTYPES = (torch.bfloat16, torch.float16)
# torch 2.11's flash attention takes fewer key/value heads as they are; later ones want to be told.
FLASH_GQA: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


class LayerPlan(Protocol):
    """What one layer's tokens may attend to."""

    def attend(self, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, sight: Sight | None = None) -> Tensor: ...


class Plan(Protocol):
    """What the tokens of one forward pass may attend to; the decoder asks for each layer's view."""

    def layer(self, index: int) -> LayerPlan: ...


def attend(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, plan: LayerPlan, sight: Sight | None = None) -> Tensor:
    """See `Arithmetic.attend`, by torch."""
    return TORCH.attend(q_THd, k_TGd, v_TGd, plan, sight)


class Attention(Computing):
    """Projections, query/key norm and rotary positions around `attend`, in layer `index` of the model."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str, index: int = 0) -> None:
        super().__init__()
        made: dict[str, Any] = {"dtype": dtype, "device": device}
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.eps, self.clip = config.norm_eps, config.clip_qkv
        self.fuse = False  # compile what lies between the projection in and `attend`
        queries, both = config.heads * config.head_dim, (config.heads + config.kv_heads) * config.head_dim
        rows = both + config.kv_heads * config.head_dim
        self.qkv = nn.Parameter(torch.empty(rows, config.dim, **made))
        self.out = nn.Parameter(torch.empty(config.dim, queries, **made))
        self.qkv_bias = nn.Parameter(torch.empty(rows, **made)) if config.attention_bias else None
        out_biased = config.attention_bias and FAMILIES[config.family].out_bias
        self.out_bias = nn.Parameter(torch.empty(config.dim, **made)) if out_biased else None
        self.sinks = nn.Parameter(torch.empty(config.heads, **made)) if FAMILIES[config.family].oss else None
        self.window = config.window if index in config.window_layers else None
        shape = {"none": None, "head": (2, config.head_dim), "projection": (both,)}[config.qk_norm]
        self.qk_norm = nn.Parameter(torch.empty(shape, **made)) if shape else None
        self.kinds: Tensor  # row of a per-head qk_norm that each query and key head takes
        self.register_buffer("kinds", None, persistent=False)
        self.make_buffers(device)

    def make_buffers(self, device: torch.device | str) -> None:
        """What is computed from the config, not loaded; called anew after `to_empty`."""
        self.kinds = torch.tensor([0] * self.heads + [1] * self.kv_heads, device=device)

    def forward(self, x_TD: Tensor, turn: Rotation, plan: LayerPlan) -> Tensor:
        """`[T, D]` -> `[T, D]`; `turn` holds the tokens' positions."""
        return self.arithmetic.linear(self.mixed(x_TD, turn, plan), self.out, self.out_bias)

    def mixed(self, x_TD: Tensor, turn: Rotation, plan: LayerPlan) -> Tensor:
        """What the heads have to say, side by side `[T, H * d]`, before the projection out."""
        heads, kv_heads = self.heads, self.kv_heads
        qkv = self.arithmetic.linear(x_TD, self.qkv, self.qkv_bias).view(-1, heads + 2 * kv_heads, self.head_dim)
        sight = None if self.sinks is None else Sight(self.sinks, self.window)
        if isinstance(plan, KernelLayer) and self.placing is not None:
            return plan.attend_projected(qkv, turn, self.placing, sight).flatten(1)
        q, k, v = self.arithmetic.placed(qkv, turn, self.placing, kv_heads, partial(self._placed, turn=turn))
        return self.arithmetic.attend(q, k, v, plan, sight).flatten(1)

    def _placed(self, qkv: Tensor, turn: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        return compiled(Attention.placed, self.fuse)(self, qkv, turn)

    @property
    def placing(self) -> Placing | None:
        """What `placed` does, for a kernel; None where the norm needs more than the heads that are here."""
        return Placing(self.qk_norm, self.eps, self.clip)

    def placed(self, qkv: Tensor, turn: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values from one projection: normed, clamped and turned to their positions."""
        heads, kv_heads = self.heads, self.kv_heads
        qk, v = qkv.split_with_sizes((heads + kv_heads, kv_heads), 1)
        weight = self.qk_norm
        if weight is not None:
            qk = self.normed(qk, weight)
        if self.clip is not None:
            qk, v = qk.clamp(-self.clip, self.clip), v.clamp(-self.clip, self.clip)
        q, k = rotate(qk, turn).split_with_sizes((heads, kv_heads), 1)
        return q, k, v

    def normed(self, qk: Tensor, weight: Tensor) -> Tensor:
        """Query and key heads `[T, H + G, d]`, normed."""
        if weight.ndim == 2:  # over each head (Qwen3)
            return rms_norm(qk, weight.index_select(0, self.kinds), self.eps)
        sizes = [self.heads, self.kv_heads]  # over the whole projection (OLMoE)
        parts = zip(qk.split_with_sizes(sizes, 1), weight.split([n * self.head_dim for n in sizes]), strict=True)
        return torch.cat([self.norm_over_heads(x.flatten(1), w).view_as(x) for x, w in parts], 1)

    def norm_over_heads(self, x_TQ: Tensor, weight_Q: Tensor) -> Tensor:
        """Root-mean-square norm over all heads together."""
        return rms_norm(x_TQ, weight_Q, self.eps)


class PackedPlan:
    """S sequences laid end to end; each token sees the earlier tokens of its own sequence and itself.

    On a GPU in half precision the tokens go to flash attention as they lie. Elsewhere they are padded to rectangles,
    one for all sequences within a factor of two in length, so that padding never more than doubles the tokens.

    Invariant: `token_P[place_T]` is every token once, in order; what stands at padding is never read, nor pulled on.
    """

    def __init__(self, starts: Sequence[int], device: torch.device | str = "cpu") -> None:
        lengths = [end - start for start, end in itertools.pairwise(starts)]
        if not starts or starts[0] != 0 or min(lengths, default=1) < 1:
            raise ModelError(f"starts {list(starts)[:8]}... must begin with 0 and rise: no sequence may be empty")
        self.tokens, self.longest = starts[-1], max(lengths, default=0)
        self.starts_S1 = torch.tensor(starts, dtype=torch.int32, device=device)
        self._rectangles, firsts = _rectangles(lengths)
        moved_S = torch.tensor(firsts, dtype=torch.int64) - torch.tensor(starts[:-1], dtype=torch.int64)
        place_T = torch.arange(self.tokens) + moved_S.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
        token_P = torch.zeros(sum(rows * width for rows, width in self._rectangles), dtype=torch.int64)
        token_P[place_T] = torch.arange(self.tokens)
        self._as_they_lie = len(token_P) == self.tokens and not moved_S.any()
        self._place_T, self._token_P = place_T.to(device), token_P.to(device)

    @classmethod
    def of(cls, starts: Sequence[int] | Tensor, device: torch.device | str = "cpu") -> "PackedPlan":
        """From `[S + 1]` offsets, the last being T. A device tensor is read on the host, once."""
        return cls(starts.tolist() if isinstance(starts, Tensor) else [int(s) for s in starts], device)

    def layer(self, index: int) -> "PackedPlan":
        """The same for every layer."""
        return self

    def attend(self, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, sight: Sight | None = None) -> Tensor:
        """See `attend`."""
        if q_THd.is_cuda and self.tokens and q_THd.dtype in FLASH_DTYPES and q_THd.shape[-1] % 8 == 0:
            starts, longest = self.starts_S1, self.longest
            if sight is not None:
                packing = Packing(starts, longest)
                return flash_with_sinks(q_THd, k_TGd, v_TGd, packing, packing, sight)
            flat = varlen_attn(q_THd, k_TGd, v_TGd, starts, starts, longest, longest, window_size=(-1, 0), **FLASH_GQA)
            assert isinstance(flat, Tensor)  # it is a pair only when more is asked for
            return flat
        if self._as_they_lie:
            return _rows(q_THd, k_TGd, v_TGd, self._rectangles, sight)
        q, k, v = (_Pad.apply(x, self._token_P, self._place_T) for x in (q_THd, k_TGd, v_TGd))  # type: ignore[no-untyped-call]
        o_THd: Tensor = _Unpad.apply(_rows(q, k, v, self._rectangles, sight), self._place_T)  # type: ignore[no-untyped-call]
        return o_THd


def _rectangles(lengths: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Rectangles (rows, width) that hold the sequences row by row, laid end to end; and where each sequence begins."""
    rectangles: list[tuple[int, int]] = []
    firsts, end = [0] * len(lengths), 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):  # stable: equal lengths stay as they lie
        if not rectangles or lengths[index] * 2 < rectangles[-1][1]:
            rectangles.append((0, lengths[index]))
        rows, width = rectangles[-1]
        rectangles[-1] = (rows + 1, width)
        firsts[index] = end
        end += width
    return rectangles, firsts


def _rows(
    q_PHd: Tensor, k_PGd: Tensor, v_PGd: Tensor, rectangles: list[tuple[int, int]], sight: Sight | None
) -> Tensor:
    """Causal attention within each row of each rectangle: `[P, H, d]`."""
    if not rectangles:  # nothing, but of all it would be made of: ranks without a token have gradients too
        unmoved = k_PGd.sum() + v_PGd.sum()
        return q_PHd + (unmoved if sight is None else unmoved + sight.sinks_H.sum())
    sizes = [rows * width for rows, width in rectangles]
    out = list[Tensor]()
    for (_, width), *qkv in zip(rectangles, *(x.split(sizes) for x in (q_PHd, k_PGd, v_PGd)), strict=True):
        q, k, v = (x.unflatten(0, (-1, width)).transpose(1, 2) for x in qkv)
        if sight is None:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        else:
            o = sink_attention(q, k, v, windowed(width, width, sight.window, q.device, q.dtype), sight.sinks_H)
        out.append(o.transpose(1, 2).flatten(0, 1))
    return out[0] if len(out) == 1 else torch.cat(out)


def windowed(keys: int, queries: int, window: int | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Additive mask `[1, 1, Q, L]` of the last `queries` of `keys` tokens of one sequence."""
    places = torch.arange(keys, device=device)
    return additive(hidden(places[keys - queries :, None], places, window), dtype)[None, None]


class _Pad(torch.autograd.Function):
    """`x[token_P]`; its gradient is `grad[place_T]`, since nothing that is read depends on padding: no adding up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token_P: Tensor, place_T: Tensor) -> Tensor:
        ctx.save_for_backward(place_T)
        return x.index_select(0, token_P)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place_T,) = ctx.saved_tensors
        return grad.index_select(0, place_T), None, None


class _Unpad(torch.autograd.Function):
    """`x[place_T]`; its gradient is zero at padding, without which padded queries would reach real keys."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place_T: Tensor) -> Tensor:
        ctx.save_for_backward(place_T)
        ctx.rows = x.shape[0]
        return x.index_select(0, place_T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (place_T,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, place_T, grad), None
