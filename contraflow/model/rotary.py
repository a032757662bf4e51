"""Rotary position embedding (Su et al. 2021) in the half-split order of dimensions that Hugging Face stores.

Takes positions, gives the cosines and signed sines that turn queries and keys. Pure functions of the config.

Shape letters: T tokens, H heads, d head dimension, r its dimensions that turn (the first ones; mostly all).
"""

import math

import torch
from torch import Tensor

from contraflow.model.families import ModelConfig
from contraflow.model.kinds import RopeScaling, Yarn
from contraflow.model.ops import cast

Rotation = tuple[Tensor, Tensor]  # cos and signed sin, [T, 1, r] each


def frequencies(config: ModelConfig) -> Tensor:
    """Signed radians per position, fp32 `[r]`: minus for the first half, so that sin comes out with its sign."""
    steps = torch.arange(0, config.rotary, 2, dtype=torch.float32) / config.rotary
    turning = 1.0 / config.rope_theta**steps
    if isinstance(config.rope_scaling, Yarn):
        turning = _yarn(turning, config.rope_scaling, config.rope_theta)
    elif config.rope_scaling is not None:
        turning = _stretch(turning, config.rope_scaling)
    return torch.cat((-turning, turning))


def turn_gain(config: ModelConfig) -> float:
    """What turned queries and keys are multiplied by: 1 but for YaRN."""
    return config.rope_scaling.turn_gain if isinstance(config.rope_scaling, Yarn) else 1.0


def rotation(positions_T: Tensor, signed_r: Tensor, dtype: torch.dtype, gain: float = 1.0) -> Rotation:
    """Turns of each token, computed in fp32 and given in `dtype`."""
    angles_T1r = positions_T.view(-1, 1, 1) * signed_r
    cos, sin = angles_T1r.cos(), angles_T1r.sin()
    if gain != 1.0:
        cos, sin = cos * gain, sin * gain
    return cast(cos, dtype), cast(sin, dtype)


def rotate(x_THd: Tensor, turn: Rotation) -> Tensor:
    """Turn each head's pairs (i, i + r/2) by the token's angles; dimensions from r on stay."""
    cos, signed_sin = turn
    turned, width = cos.shape[-1], x_THd.shape[-1]
    if turned < width:
        x_THr, rest = x_THd.split_with_sizes((turned, width - turned), -1)
        return torch.cat((rotate(x_THr, turn), rest), -1)
    return torch.addcmul(x_THd * cos, x_THd.roll(x_THd.shape[-1] // 2, -1), signed_sin)


def _stretch(turning: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3: divide slow frequencies by `factor`, keep fast ones, blend between by turns per original context."""
    turns = scaling.original_context * turning / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return turning * (kept + (1 - kept) / scaling.factor)


def _yarn(turning: Tensor, scaling: Yarn, theta: float) -> Tensor:
    """As `_stretch`, but blended evenly by the number of the pair (YaRN's section 3.2, as released by its authors)."""
    pairs = len(turning)

    def pair(turns: float) -> float:
        """The (fractional) pair that turns so often within the original context."""
        return pairs * math.log(scaling.original_context / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    slowed = ((torch.arange(pairs) - first) / max(last - first, 0.001)).clamp(0, 1)
    return turning * (1 - slowed) + turning / scaling.factor * slowed
