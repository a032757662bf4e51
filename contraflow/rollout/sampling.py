"""One token per row from logits, with noise that is a function of (seed, position) and of nothing else.

The noise is known before the logits are: it is hashed on the host, beside a step's other inputs, and what is done with
it on the device waits for nothing. No generator state. Does not truncate (top-k, top-p): what is sampled is the whole
temperature-scaled softmax.

Shape letters: B rows (sequences), V vocabulary, C parts of it, P tokens of a part, N things to draw from.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from contraflow.model.ops import have_triton
from contraflow.types import Float32, Int64

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
# The same as numpy scalars: making one costs as much as an operation on a small array.
_GOLDEN_U, _MIX_1_U, _MIX_2_U, _27, _30, _31, _40 = map(np.uint64, (_GOLDEN, _MIX_1, _MIX_2, 27, 30, 31, 40))
_UNIT = np.float32(2.0**-24)
PART = 128  # tokens of a part; it divides the vocabularies of large models


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
    if logits_BV.is_cuda:
        return sample_by_parts(logits_BV, scales_B=scales_B, greedy_B=greedy_B, uniforms_B=uniforms_B)
    logprobs_BV = torch.log_softmax(logits_BV * scales_B[:, None], dim=-1)
    sums_BV = logprobs_BV.exp().cumsum(-1)  # in order, so it never falls, and rises only where there is mass
    drawn_B1 = torch.searchsorted(sums_BV, uniforms_B[:, None] * sums_BV[:, -1:], right=True)
    tokens_B = drawn_B1.squeeze(1).clamp_max_(logits_BV.shape[-1] - 1)  # past the end only when no number
    if greedy_B is not None:
        tokens_B = torch.where(greedy_B, logits_BV.argmax(-1), tokens_B)
    return tokens_B, logprobs_BV.gather(-1, tokens_B[:, None])[:, 0]


def sample_by_parts(
    logits_BV: Tensor, *, scales_B: Tensor, greedy_B: Tensor | None, uniforms_B: Tensor
) -> tuple[Tensor, Tensor]:
    """As `sample`, for a GPU: the running sum is taken over parts of the vocabulary, then within the part it falls in.

    Memory is what it costs there: with Triton, logits are read once, and then one part of each row.
    """
    tops_BC, masses_BC = _survey(logits_BV, scales_B)
    highest_B1, scales_B1 = tops_BC.amax(-1, keepdim=True), scales_B[:, None]
    masses_BC = masses_BC * ((tops_BC - highest_B1) * scales_B1).exp()
    part_B1, within_B1 = invert_cdf(masses_BC, uniforms_B[:, None])
    if greedy_B is not None:
        part_B1 = torch.where(greedy_B[:, None], tops_BC.argmax(-1, keepdim=True), part_B1)
    tokens_BP = part_B1 * PART + torch.arange(PART, device=logits_BV.device)
    logits_BP = logits_BV.gather(-1, tokens_BP.clamp_max(logits_BV.shape[1] - 1))
    logits_BP = torch.where(tokens_BP < logits_BV.shape[1], logits_BP, -torch.inf)
    place_B1, _ = invert_cdf(((logits_BP - tops_BC.gather(-1, part_B1)) * scales_B1).exp(), within_B1)
    if greedy_B is not None:
        place_B1 = torch.where(greedy_B[:, None], logits_BP.argmax(-1, keepdim=True), place_B1)
    over_B1 = (logits_BP.gather(-1, place_B1) - highest_B1) * scales_B1
    logprobs_B1 = over_B1 - masses_BC.sum(-1, keepdim=True).log()
    return (part_B1 * PART + place_B1)[:, 0], logprobs_B1[:, 0]


def _survey(logits_BV: Tensor, scales_B: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 `[B, C]` each, of each part: the largest logit, and the sum of `exp((logit - largest) * scale)`."""
    if logits_BV.is_cuda and have_triton():
        from contraflow.model import kernels_vocab

        return kernels_vocab.survey(logits_BV, scales_B, PART)
    parts_BCP = functional.pad(logits_BV, (0, -logits_BV.shape[1] % PART), value=-torch.inf).unflatten(1, (-1, PART))
    tops_BC1 = parts_BCP.amax(-1, keepdim=True)
    over_BCP = (parts_BCP - tops_BC1.clamp_min(-1e30)) * scales_B[:, None, None]  # a part of nothing has mass 0
    return tops_BC1[..., 0], over_BCP.exp_().sum(-1)


def invert_cdf(mass_BN: Tensor, uniforms_B1: Tensor) -> tuple[Tensor, Tensor]:
    """int64 `[B, 1]`: whose interval of the running sum of `mass_BN` holds the uniform; and where in it, in [0, 1).

    All in fp32. What has mass 0 is never drawn, whatever the rounding of the sum: a uniform is at most 1 - 2^-24, so
    its product with the total rounds to less than that, and something is always within reach. On a GPU sums are taken
    in parallel and need not even rise: only what has mass competes. Mass that is no number draws any.
    """
    sums_BN = mass_BN.cumsum(-1)
    reach_BN = sums_BN.masked_fill(mass_BN <= 0, 0)
    goals_B1 = uniforms_B1 * reach_BN.amax(-1, keepdim=True)
    drawn_B1 = (reach_BN > goals_B1).byte().argmax(-1, keepdim=True)
    taken_B1 = mass_BN.gather(-1, drawn_B1)
    within_B1 = (goals_B1 - sums_BN.gather(-1, drawn_B1) + taken_B1) / taken_B1
    return drawn_B1, within_B1.clamp(0, 1 - 2**-24)


def _mix(z: int) -> int:
    z = (z + _GOLDEN) & _MASK
    z = ((z ^ z >> 30) * _MIX_1) & _MASK
    z = ((z ^ z >> 27) * _MIX_2) & _MASK
    return z ^ z >> 31
