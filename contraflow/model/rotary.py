"""Rotary position embedding (Su et al. 2021) in the half-split order of dimensions that Hugging Face stores.

Takes positions, gives the cosines and signed sines that turn queries and keys. Pure functions of the config.

Shape letters: T tokens, H heads, d head dimension.
"""

import math

import torch
from torch import Tensor

from contraflow.model.families import ModelConfig, RopeScaling
from contraflow.model.ops import cast

Rotation = tuple[Tensor, Tensor]  # cos and signed sin, [T, 1, d] each


def frequencies(config: ModelConfig) -> Tensor:
    """Signed radians per position, fp32 `[d]`: minus for the first half, so that sin comes out with its sign."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    turning = 1.0 / config.rope_theta**steps
    if config.rope_scaling is not None:
        turning = _stretch(turning, config.rope_scaling)
    return torch.cat((-turning, turning))


def rotation(positions_T: Tensor, signed_d: Tensor, dtype: torch.dtype) -> Rotation:
    """Turns of each token, computed in fp32 and given in `dtype`."""
    angles_T1d = positions_T.view(-1, 1, 1) * signed_d
    return cast(angles_T1d.cos(), dtype), cast(angles_T1d.sin(), dtype)


def rotate(x_THd: Tensor, turn: Rotation) -> Tensor:
    """Turn each head's pairs (i, i + d/2) by the token's angles."""
    cos, signed_sin = turn
    return torch.addcmul(x_THd * cos, x_THd.roll(x_THd.shape[-1] // 2, -1), signed_sin)


def _stretch(turning: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3: divide slow frequencies by `factor`, keep fast ones, blend between by turns per original context."""
    turns = scaling.original_context * turning / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return turning * (kept + (1 - kept) / scaling.factor)
