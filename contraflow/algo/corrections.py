"""Off-policy corrections: how much a token counts, given how far the policy has moved from the one that sampled it.

Takes log-ratios `log(pi / mu)` of trained tokens, gives one weight per token for each correction, by name: weights are
numbers, no gradient passes. What is multiplied with them is the caller's. Shape letter: N trained tokens.
"""

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from contraflow.algo.loss import Sequences

CorrectionKind = Literal["tis", "sequence_tis", "icepop", "sequence_mask", "geometric_mask", "age_mask"]

# These weigh by the ratio itself: over a surrogate that has the same ratio in it, they would count it twice.
WEIGHING = ("tis", "sequence_tis")


class Stale(NamedTuple):
    """What is known of each trained token. `log_ratio_N`: log(pi / mu), of the policy at the step's start, or now."""

    log_ratio_N: Tensor
    ages_N: Tensor  # steps
    sequences: Sequences


def tis(stale: Stale, low: float, high: float) -> Tensor:
    """`clip(rho, low, high)`: truncated importance sampling (Ionides 2008; IMPALA, arXiv 1802.01561; TIS, Yao 2025)."""
    return stale.log_ratio_N.exp().clamp(low, high)


def sequence_tis(stale: Stale, low: float, high: float) -> Tensor:
    """As `tis` with one weight a sequence, the product of its tokens' ratios: unbiased but for the bound."""
    return stale.sequences.sum(stale.log_ratio_N).exp().clamp(low, high)


def icepop(stale: Stale, low: float, high: float) -> Tensor:
    """`rho` within `[low, high]`, else 0: masked importance sampling, the band of IcePop (Ring-1T, arXiv 2510.18855).

    Here only the band: 1 or 0. With `tis` beside it the weight inside is rho, as published.
    """
    return _band(stale.log_ratio_N, low, high)


def sequence_mask(stale: Stale, low: float, high: float) -> Tensor:
    """A sequence counts if the product of its ratios is within `[low, high]`: MIS by sequence. Hard on long ones."""
    return _band(stale.sequences.sum(stale.log_ratio_N), low, high)


def geometric_mask(stale: Stale, low: float, high: float) -> Tensor:
    """A sequence counts if the geometric mean of its ratios is within `[low, high]`: fair to every length."""
    return _band(stale.sequences.mean(stale.log_ratio_N), low, high)


def age_mask(stale: Stale, low: float, high: float) -> Tensor:
    """A token counts if its age in steps is within `[low, high]`."""
    return ((stale.ages_N >= low) & (stale.ages_N <= high)).to(stale.log_ratio_N.dtype)


CORRECTIONS: dict[CorrectionKind, Callable[[Stale, float, float], Tensor]] = {
    "tis": tis,
    "sequence_tis": sequence_tis,
    "icepop": icepop,
    "sequence_mask": sequence_mask,
    "geometric_mask": geometric_mask,
    "age_mask": age_mask,
}


class Corrected(NamedTuple):
    """The product of all weights, and by name which tokens each correction changed: weight 0, or held at a bound."""

    weights_N: Tensor
    touched: dict[str, Tensor]


def correct(stale: Stale, wanted: Mapping[CorrectionKind, tuple[float, float]]) -> Corrected:
    """Weigh each token by every correction wanted, with its bounds `(low, high)`; all ones when there are none.

    A ratio that is not finite gets weight 0 from a mask and is counted there; without one it is the step's to refuse.
    """
    weights_N = torch.ones_like(stale.log_ratio_N)
    touched: dict[str, Tensor] = {}
    for name, (low, high) in wanted.items():
        one_N = CORRECTIONS[name](stale, low, high)
        weights_N = torch.where(one_N == 0, 0.0, weights_N * one_N)
        touched[name] = (one_N == low) | (one_N == high) if name in WEIGHING else one_N == 0
    return Corrected(weights_N, touched)


def effective_share(weights_N: Tensor) -> float:
    """Effective sample size over sample size, `sum(w)^2 / (N sum(w^2))` (Kong 1992); 1 of no tokens, 0 of no weight."""
    if not weights_N.numel():
        return 1.0
    squares = float(weights_N.double().square().sum())
    return float(weights_N.double().sum()) ** 2 / (weights_N.numel() * squares) if squares else 0.0


def _band(log_N: Tensor, low: float, high: float) -> Tensor:
    """1 within, 0 without; compared as logarithms, so that a product of many ratios does not overflow."""
    floor = math.log(low) if low > 0 else -math.inf
    ceiling = math.log(high) if math.isfinite(high) else math.inf
    return ((log_N >= floor) & (log_N <= ceiling)).to(log_N.dtype)
