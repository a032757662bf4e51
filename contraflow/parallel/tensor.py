"""Tensor parallelism: attention heads and the hidden width of dense MLPs, shared out over ranks that see equal tokens.

Each rank computes with its rows of the first matrix and its columns of the second, and the outputs are summed
(Megatron, arXiv 1909.08053, section 3). Everything else is computed alike on every rank; experts belong to `dispatch`.

Shape letters: T tokens, D width, H heads of this rank, d head dimension, Q = H * d.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from contraflow.model.attention import Attention, LayerPlan
from contraflow.model.decoder import Decoder, Layer
from contraflow.model.families import ModelConfig
from contraflow.model.moe import DenseMLP
from contraflow.model.ops import cast, linear
from contraflow.model.paged import Placing
from contraflow.model.rotary import Rotation
from contraflow.model.router import Tape


def share_heads(decoder: Decoder, group: dist.ProcessGroup) -> None:
    """Give this rank its part of every attention and dense MLP, empty: weights come afterwards, by name.

    Names stay; shapes are those of `layout.shards`. `group` must divide heads, key/value heads and dense width.
    """
    parts = dist.get_world_size(group)
    if parts == 1:
        return
    config = decoder.config
    local = replace(config, heads=config.heads // parts, kv_heads=config.kv_heads // parts, ffn=config.ffn // parts)
    for layer in (module for module in decoder.modules() if isinstance(module, Layer)):
        made: dict[str, Any] = {"dtype": layer.attention_norm.dtype, "device": layer.attention_norm.device}
        layer.attention = SharedAttention(local, group, **made)
        if isinstance(layer.mlp, DenseMLP):
            layer.mlp = SharedMLP(local, group, **made)


class SharedAttention(Attention):
    """The heads of one rank; `local` is the model's config with its own numbers of them."""

    def __init__(self, local: ModelConfig, group: dist.ProcessGroup, **made: Any) -> None:
        super().__init__(local, **made)
        self._group = group

    def forward(self, x_TD: Tensor, turn: Rotation, plan: LayerPlan) -> Tensor:
        """See `Attention`. The bias is whole on every rank, and added once."""
        out_TD = sum_out(linear(self.mixed(copy_in(x_TD, self._group), turn, plan), self.out), self._group)
        return out_TD if self.out_bias is None else out_TD + cast(self.out_bias, out_TD.dtype)

    @property
    def placing(self) -> Placing | None:
        """See `Attention`: a norm over the whole projection needs the other ranks."""
        return None if self.qk_norm is not None and self.qk_norm.ndim == 1 else super().placing

    def normed(self, qk: Tensor, weight: Tensor) -> Tensor:
        """A weight that all heads share gets its gradient from the heads of all ranks."""
        return super().normed(qk, copy_in(weight, self._group) if weight.ndim == 2 else weight)

    def norm_over_heads(self, x_TQ: Tensor, weight_Q: Tensor) -> Tensor:
        """The mean square is that of the heads of all ranks."""
        width = x_TQ.shape[1] * dist.get_world_size(self._group)
        wide_TQ = x_TQ.float()
        square_T1 = copy_in(sum_out(wide_TQ.square().sum(1, keepdim=True), self._group), self._group)
        return cast(wide_TQ * (square_T1 / width + self.eps).rsqrt() * weight_Q, x_TQ.dtype)


class SharedMLP(DenseMLP):
    """A share of the hidden width."""

    def __init__(self, local: ModelConfig, group: dist.ProcessGroup, **made: Any) -> None:
        super().__init__(local, **made)
        self._group = group

    def forward(self, x_TD: Tensor, tape: Tape | None) -> Tensor:
        """See `DenseMLP`."""
        return sum_out(super().forward(copy_in(x_TD, self._group), tape), self._group)


def copy_in(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x`, which all ranks have alike; each uses it for something else, so its gradient is summed over them."""
    copied: Tensor = _CopyIn.apply(x, group)  # type: ignore[no-untyped-call]
    return copied


def sum_out(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks; all use it alike, so its gradient passes as it is."""
    summed: Tensor = _SumOut.apply(x, group)  # type: ignore[no-untyped-call]
    return summed


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    summed = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed, group=group)
    return summed
