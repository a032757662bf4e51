"""What a critic's values are trained for, and how well they foretell.

Takes values of states, values before the update and the returns that credit gives; gives a scalar whose sum over
micro-batches is the value loss of the whole update. Pure. Shape letter: N trained tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class ValueLoss(NamedTuple):
    """The loss, a scalar, and which tokens' gradient the clip removed, bool `[N]`."""

    loss: Tensor
    clipped_N: Tensor


def value_loss(values_N: Tensor, old_N: Tensor, returns_N: Tensor, weights_N: Tensor, *, clip: float) -> ValueLoss:
    """`1/2 sum(w max((V - R)^2, (old + clip(V - old, -c, c) - R)^2))`: PPO2's (Baselines, Dhariwal et al. 2017).

    A value that has left `[old - c, old + c]` on the way to its return has no gradient; one that left it the other way
    still has. `clip` of 0 asks for none: half the squared error. A weight of 0 takes its token out.
    """
    plain_N = (values_N - returns_N).square()
    if clip <= 0:
        return ValueLoss(_half(plain_N, weights_N), torch.zeros_like(values_N, dtype=torch.bool))
    bounded_N = old_N + (values_N - old_N).clamp(-clip, clip)
    clipped_N = (bounded_N - returns_N).square()
    outside_N = (values_N - old_N).abs() > clip
    return ValueLoss(_half(torch.maximum(plain_N, clipped_N), weights_N), outside_N & (clipped_N > plain_N).detach())


def explained_variance(values_N: Tensor, returns_N: Tensor) -> float:
    """`1 - var(R - V) / var(R)`: 1 where values foretell all, 0 where they are as good as a constant, or below.

    0 where returns do not differ, or of no tokens.
    """
    if not returns_N.numel():
        return 0.0
    spread = returns_N.double().var(correction=0)
    if not spread > 0:
        return 0.0
    return float(1 - (returns_N.double() - values_N.double()).var(correction=0) / spread)


def _half(squares_N: Tensor, weights_N: Tensor) -> Tensor:
    return 0.5 * torch.where(weights_N == 0, 0.0, weights_N * squares_N).sum()
