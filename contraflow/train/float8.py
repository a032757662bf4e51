"""A decoder's experts as engines will hold them when they travel in float8.

Takes an fp32 decoder, gives the weights that are rounded, and passes that compute with them as rounded. Does not round
or publish: those are weights/fp8.py and publishing.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from contraflow.model.copies import stand_ins
from contraflow.model.decoder import Decoder
from contraflow.model.moe import MoE
from contraflow.weights.fp8 import lowered, raised

MATRICES = ("gate_up", "down")


def expert_matrices(decoder: Decoder) -> dict[str, nn.Parameter]:
    """The weights `[E, O, D]` that travel as float8: no bias, norm, router, head or dense layer."""
    return {
        f"{where}.{name}": weight
        for where, module in decoder.named_modules()
        if isinstance(module, MoE)
        for name, weight in module.named_parameters(recurse=False)
        if name in MATRICES
    }


@contextmanager
def raised_experts(decoder: Decoder) -> Iterator[None]:
    """Inside, a decoder of fp32 weights that computes in bf16 does so with its experts as an engine will hold them.

    Costs a bf16 copy of the experts while it lasts.
    """
    weights = expert_matrices(decoder)
    with stand_ins({weight: raised(lowered(name, weight))[name] for name, weight in weights.items()}):
        yield
