"""Copies of a decoder's large weights in its compute dtype, made once for many forward and backward passes.

Casting at use reads every fp32 weight in every pass and, with recomputation, twice; and each gradient is cast to fp32
and then added. With a copy, a weight is read once for all, and a gradient is added to the fp32 one as it comes.
`compute_copy` on a parameter is what `ops.computed` takes instead of casting.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from contraflow.model.attention import Attention
from contraflow.model.decoder import Decoder
from contraflow.model.mla import LatentAttention
from contraflow.model.moe import DenseMLP, MoE

MULTIPLIED = ("qkv", "out", "gate_up", "down", "q_up", "kv_up")


@contextmanager
def compute_copies(decoder: Decoder) -> Iterator[None]:
    """Hold copies inside; a decoder that computes in its weights' own dtype needs none, and gets none.

    The weights must not change inside: a copy would not know. Gradients are added to `grad` in place, past hooks on
    parameters, so what is asked of `torch.autograd.grad` inside is wrong.
    """
    weights = [p for p in _large(decoder) if p.dtype != decoder.compute_dtype]
    with stand_ins({weight: weight.detach().to(decoder.compute_dtype) for weight in weights}):
        yield


@contextmanager
def stand_ins(copies: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Inside, each of these weights is computed with as the given copy, where another dtype than its own is wanted."""
    for weight, copy in copies.items():
        weight.compute_copy = copy  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for weight in copies:
            del weight.compute_copy  # type: ignore[attr-defined]


def _large(decoder: nn.Module) -> Iterator[nn.Parameter]:
    """The weights that are multiplied with tokens, which `ops.computed` is asked for."""
    for module in decoder.modules():
        if isinstance(module, Attention | LatentAttention | DenseMLP | MoE):
            for name, weight in module.named_parameters(recurse=False):
                if name in MULTIPLIED:
                    yield weight
