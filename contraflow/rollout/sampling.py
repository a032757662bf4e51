"""One token per row from logits, with noise that is a function of (seed, position) and of nothing else.

The noise is known before the logits are: it is hashed on the host, beside a step's other inputs, and what is done with
it on the device waits for nothing. No generator state. Does not truncate (top-k, top-p): what is sampled is the whole
temperature-scaled softmax.

Shape letters: B rows (sequences), V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from contraflow.types import Float32, Int64

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
# The same as numpy scalars: making one costs as much as an operation on a small array.
_GOLDEN_U, _MIX_1_U, _MIX_2_U, _27, _30, _31, _40 = map(np.uint64, (_GOLDEN, _MIX_1, _MIX_2, 27, 30, 31, 40))
_UNIT = np.float32(2.0**-24)


def stream_key(seed: int) -> int:
    """The 64 bits, as a signed integer, that a seed contributes to `uniforms`.

    Hashed once more than `uniforms` does, so that neighbouring seeds don't give shifted copies of one stream.
    """
    key = _mix((seed & _MASK) ^ _mix(seed >> 64 & _MASK))
    return key - (1 << 64) if key >> 63 else key


def uniforms(keys_B: Int64, positions_B: Int64) -> Float32:
    """fp32 `[B]` in [0, 1), 24 bits each: SplitMix64 (Steele, Lea & Flood 2014) of key + position.

    `keys_B` from `stream_key`; `positions_B`: where in its sequence the token to be sampled will stand.
    """
    z = (positions_B + 1).view(np.uint64) * _GOLDEN_U + keys_B.view(np.uint64)
    z = (z ^ (z >> _30)) * _MIX_1_U
    z = (z ^ (z >> _27)) * _MIX_2_U
    z ^= z >> _31
    return (z >> _40).astype(np.float32) * _UNIT


def sample(
    logits_BV: Tensor, *, scales_B: Tensor, greedy_B: Tensor | None, uniforms_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens int64 `[B]` and their log-probabilities fp32 `[B]` under softmax(logits * scale).

    `scales_B` fp32 is 1/temperature; `greedy_B` bool rows take the largest logit instead (scale 1 there), None is none.
    """
    logprobs_BV = torch.log_softmax(logits_BV * scales_B[:, None], dim=-1)
    tokens_B = invert_cdf(logprobs_BV.exp(), uniforms_B)
    if greedy_B is not None:
        tokens_B = torch.where(greedy_B, logits_BV.argmax(-1), tokens_B)
    return tokens_B, logprobs_BV.gather(-1, tokens_B[:, None])[:, 0]


def invert_cdf(mass_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """int64 `[B]`: the token whose interval of the running sum of `mass_BV` holds the uniform, all in fp32.

    A token of mass 0 is never drawn, whatever the rounding of the sum. A uniform is at most 1 - 2^-24, so its product
    with the total rounds to less than that: some token is always within reach. Mass that is no number draws any.
    """
    sums_BV = mass_BV.cumsum(-1)
    if not mass_BV.is_cuda:  # in order, so it never falls, and rises only where there is mass
        drawn_B1 = torch.searchsorted(sums_BV, uniforms_B[:, None] * sums_BV[:, -1:], right=True)
        return drawn_B1.squeeze(1).clamp_max_(mass_BV.shape[-1] - 1)  # past the end only when no number
    # In parallel, so it need not even rise: only tokens with mass compete.
    sums_BV = sums_BV.masked_fill_(mass_BV <= 0, 0)
    return (sums_BV > uniforms_B[:, None] * sums_BV.amax(-1, keepdim=True)).byte().argmax(-1)


def _mix(z: int) -> int:
    z = (z + _GOLDEN) & _MASK
    z = ((z ^ z >> 30) * _MIX_1) & _MASK
    z = ((z ^ z >> 27) * _MIX_2) & _MASK
    return z ^ z >> 31
