"""Drift: how far the policy that trains a token is from the one that sampled it, in ratios, KL and versions.

Takes log-probabilities and versions of trained tokens, gives per-token estimates and plain-number reports.
Does not decide what to do about it. Shape letter: N trained tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# exp(20) is past any clip range; beyond it the ratio would overflow fp32 and its gradient turn into 0 * inf = nan.
LOG_RATIO_LIMIT = 20.0


def log_ratio(logprobs_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """`log(pi / mu)` per token, held within ±20; the gradient is zero beyond."""
    return (logprobs_N - behaviour_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def kl_k1(logq_N: Tensor, logp_N: Tensor) -> Tensor:
    """`-log(p / q)`: unbiased estimate of KL(q, p) at samples of q; may be negative.

    k1, k2 and k3 after Schulman, "Approximating KL divergence" (joschu.net/blog/kl-approx.html).
    """
    return -log_ratio(logp_N, logq_N)


def kl_k2(logq_N: Tensor, logp_N: Tensor) -> Tensor:
    """`log(p / q)^2 / 2`: biased, low variance, never negative."""
    return log_ratio(logp_N, logq_N).square() / 2


def kl_k3(logq_N: Tensor, logp_N: Tensor) -> Tensor:
    """`p / q - 1 - log(p / q)`: unbiased and never negative; the KL term of GRPO (DeepSeekMath, equation 4)."""
    log_N = log_ratio(logp_N, logq_N)
    return log_N.expm1() - log_N


class RatioReport(NamedTuple):
    """Ratios `pi / mu` of an update's trained tokens; all zero when there are none."""

    mean: float
    low: float
    high: float
    clipped_low: float  # share of tokens whose gradient the lower clip removed
    clipped_high: float  # share of tokens whose gradient the upper clip removed
    kl: float  # k3 estimate of KL(mu, pi)


class AgeReport(NamedTuple):
    """Ages of trained tokens in steps; zero when there are none."""

    mean: float
    high: int


def ratio_report(logprobs_N: Tensor, behaviour_N: Tensor, low_N: Tensor, high_N: Tensor) -> RatioReport:
    """What the update saw before it moved the weights. `low_N`, `high_N`: 1 where a clip removed the gradient."""
    if logprobs_N.numel() == 0:
        return RatioReport(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    ratio_N = log_ratio(logprobs_N, behaviour_N).exp()
    parts = (
        ratio_N.mean(),
        ratio_N.min(),
        ratio_N.max(),
        low_N.float().mean(),
        high_N.float().mean(),
        kl_k3(behaviour_N, logprobs_N).mean(),
    )
    return RatioReport(*torch.stack(parts).tolist())


def age_report(versions_N: Tensor, step: int) -> AgeReport:
    """Age of a token: `step` minus the version `n` that sampled it. Versions are integers, one per trained token."""
    if versions_N.numel() == 0:
        return AgeReport(0.0, 0)
    ages_N = step - versions_N
    return AgeReport(float(ages_N.double().mean()), int(ages_N.max()))
