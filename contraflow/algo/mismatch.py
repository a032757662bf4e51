"""Mismatch: the log-ratio of the policy that trains to the one that sampled, split by cause, and what each cause does.

    log pi_now - log mu  =  numerics + cache + staleness

`numerics`: the sampling version by the trainer, with the cache the engine had, less what the engine said. `cache`: what
computing that cache anew by the sampling version changes. `staleness`: what versions published since changed.
Takes log-probabilities of sampled tokens, gives plain numbers. Does not run a model. Shape letter: N sampled tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from contraflow.algo.corrections import effective_share
from contraflow.algo.drift import kl_k1, kl_k3, log_ratio

CAUSES = ("numerics", "cache", "staleness")


class Rescored(NamedTuple):
    """Log-probabilities of the same tokens, fp32 or fp64 `[N]`."""

    behaviour_N: Tensor  # mu, as the engine said
    cached_N: Tensor  # of the sampling version, on the keys and values that the engine had kept
    fresh_N: Tensor  # of the sampling version, everything computed anew
    now_N: Tensor  # of the version that trains


class Causes(NamedTuple):
    """Parts of log(pi_now / mu), `[N]`; they add up to it."""

    numerics_N: Tensor
    cache_N: Tensor
    staleness_N: Tensor


def causes(scored: Rescored) -> Causes:
    """The parts, by token."""
    mu_N, cached_N, fresh_N, now_N = scored
    return Causes(cached_N - mu_N, fresh_N - cached_N, now_N - fresh_N)


def extent(parts_N: Tensor) -> dict[str, float]:
    """How much one part, or all of them together, is: zeros of no tokens.

    `size` and `largest` are of its absolute value. `k1` and `k3` are what the KL from the sampling policy would be, and
    `effective` the effective sample size over sample size, if it were the only part.
    """
    if not parts_N.numel():
        return {"size": 0.0, "largest": 0.0, "k1": 0.0, "k3": 0.0, "effective": 1.0}
    nothing_N = torch.zeros_like(parts_N)
    return {
        "size": float(parts_N.abs().mean()),
        "largest": float(parts_N.abs().max()),
        "k1": float(kl_k1(nothing_N, parts_N).mean()),
        "k3": float(kl_k3(nothing_N, parts_N).mean()),
        "effective": effective_share(log_ratio(parts_N, nothing_N).exp()),
    }
