"""One token per row from logits, with noise that is a function of (seed, position) and of nothing else.

Takes fp32 logits and per-row settings on the device, gives tokens and their log-probabilities there; no host sync, no
generator state. Does not truncate (top-k, top-p): what is sampled is the whole temperature-scaled softmax.

Shape letters: B rows (sequences), V vocabulary.
"""

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_UNIT = 2.0**-24  # a float32 in [0, 1) carries 24 bits


def stream_key(seed: int) -> int:
    """The 64 bits, as a signed integer, that a seed contributes to `uniforms`.

    Hashed once more than `uniforms` does, so that neighbouring seeds don't give shifted copies of one stream.
    """
    return _signed(_mix((seed & _MASK) ^ _mix(seed >> 64 & _MASK)))


def uniforms(keys_B: Tensor, positions_B: Tensor) -> Tensor:
    """fp32 `[B]` in [0, 1), 24 bits each: SplitMix64 (Steele, Lea & Flood 2014) of key + position.

    `keys_B` int64 from `stream_key`, `positions_B` int64: the position of the token to be sampled. Integer products
    wrap, as the hash wants.
    """
    z = keys_B + (positions_B + 1) * _signed(_GOLDEN)
    z = (z ^ _shift(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX_2)
    z = z ^ _shift(z, 31)
    return _shift(z, 40).to(torch.float32) * _UNIT


def sample(
    logits_BV: Tensor, *, scales_B: Tensor, greedy_B: Tensor, keys_B: Tensor, positions_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens int64 `[B]` and their log-probabilities fp32 `[B]` under softmax(logits * scale).

    `scales_B` fp32 is 1/temperature; `greedy_B` bool rows take the largest logit instead (scale 1 there).
    """
    logprobs_BV = torch.log_softmax(logits_BV * scales_B[:, None], dim=-1)
    drawn_B = invert_cdf(logprobs_BV.exp(), uniforms(keys_B, positions_B))
    tokens_B = torch.where(greedy_B, logits_BV.argmax(-1), drawn_B)
    return tokens_B, logprobs_BV.gather(-1, tokens_B[:, None])[:, 0]


def invert_cdf(mass_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """int64 `[B]`: the token whose interval of the running sum of `mass_BV` holds the uniform, all in fp32.

    A token of mass 0 is never drawn: only tokens with mass compete, whatever the rounding of the sum, which on CUDA is
    parallel and so need not even rise.
    """
    sums_BV = mass_BV.cumsum(-1).masked_fill_(mass_BV <= 0, 0)
    total_B1 = sums_BV.amax(-1, keepdim=True)
    # A uniform is at most 1 - 2^-24, so this rounds to less than the total: some token is always within reach.
    aim_B1 = uniforms_B[:, None] * total_B1
    return (sums_BV > aim_B1).byte().argmax(-1)


def _mix(z: int) -> int:
    z = (z + _GOLDEN) & _MASK
    z = ((z ^ z >> 30) * _MIX_1) & _MASK
    z = ((z ^ z >> 27) * _MIX_2) & _MASK
    return z ^ z >> 31


def _signed(z: int) -> int:
    return z - (1 << 64) if z >> 63 else z


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64, where torch's is arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
