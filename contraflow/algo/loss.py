"""The policy objective, token by token: one surrogate per published loss, by name.

Takes log-probabilities and credit of the trained tokens and each token's share of the update, gives a scalar whose sum
over micro-batches is the loss of the whole update. Does not know batches, models or optimizers.
Shape letters: N trained tokens, S sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from contraflow.algo.drift import kl_k1, kl_k2, kl_k3, log_ratio

Reduction = Literal["token", "sequence", "constant"]
SurrogateKind = Literal["ppo", "ppo_dual_clip", "gspo", "cispo", "reinforce"]
KlKind = Literal["k1", "k2", "k3"]

KLS: dict[KlKind, Callable[[Tensor, Tensor], Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def token_shares(lengths_S: Tensor, *, reduction: Reduction, constant: int = 1) -> Tensor:
    """The share `[S]` that each trained token of sequence s has in the update's loss; fp64.

    `lengths_S` counts trained tokens; a sequence with none takes no part.
    `token`: every token alike, `1 / sum(lengths)` (DAPO, arXiv 2503.14476, section 3.3).
    `sequence`: every sequence alike, `1 / (S * length)` (GRPO, arXiv 2402.03300, equation 3).
    `constant`: `1 / (S * constant)`, whatever the lengths (Dr. GRPO, arXiv 2503.20783, section 3.2).
    Shares sum to 1 over tokens, but for `constant`.
    """
    lengths_S = lengths_S.double()
    if reduction == "token":
        return torch.full_like(lengths_S, 1.0) / lengths_S.sum().clamp(min=1)
    sequences = (lengths_S > 0).sum().clamp(min=1)
    per_S = lengths_S.clamp(min=1) if reduction == "sequence" else torch.full_like(lengths_S, float(constant))
    return torch.where(lengths_S > 0, 1 / (per_S * sequences), 0.0)


@dataclass(frozen=True)
class Sequences:
    """Which sequence each trained token belongs to, and how many there are.

    `total` sums over the ranks that hold other tokens of the same sequences; of one rank it gives back what it gets.
    """

    of_N: Tensor  # int64
    count: int
    total: Callable[[Tensor], Tensor] = lambda sums: sums

    def mean(self, values_N: Tensor) -> Tensor:
        """Of every token: the mean of its whole sequence. Not differentiable."""
        return (self.sums(values_N) / self.sums(torch.ones_like(values_N)).clamp(min=1))[self.of_N]

    def sum(self, values_N: Tensor) -> Tensor:
        """Of every token: the sum of its whole sequence. Not differentiable."""
        return self.sums(values_N)[self.of_N]

    def sums(self, values_N: Tensor) -> Tensor:
        """`[S]`."""
        sums_S = values_N.new_zeros(self.count).index_add_(0, self.of_N, values_N.detach())
        return self.total(sums_S)


class Bounds(NamedTuple):
    """Where ratios are clipped: to `[1 - low, 1 + high]`; `dual` is the bound of `ppo_dual_clip`."""

    low: float
    high: float
    dual: float = 3.0


class Surrogate(NamedTuple):
    """Per token: what is maximised, and whether the lower or the upper clip removed its gradient."""

    values_N: Tensor
    low_N: Tensor
    high_N: Tensor


def ppo(new_N: Tensor, old_N: Tensor, advantages_N: Tensor, sequences: Sequences, bounds: Bounds) -> Surrogate:
    """`min(r A, clip(r, 1 - low, 1 + high) A)`, `r = pi / old`: PPO (arXiv 1707.06347, equation 7).

    Two bounds apart are DAPO's clip-higher (section 3.1). With `old` the policy that sampled the token, whatever its
    age, the ratio also corrects for the age.
    """
    return _clipped(log_ratio(new_N, old_N).exp(), advantages_N, bounds)


def ppo_dual_clip(
    new_N: Tensor, old_N: Tensor, advantages_N: Tensor, sequences: Sequences, bounds: Bounds
) -> Surrogate:
    """As `ppo`, and at least `dual * A` where `A < 0`: a huge ratio of a bad token does not run away.

    Dual-clip PPO (arXiv 1912.09729, equation 5). Tokens held by that bound count as clipped above.
    """
    one = ppo(new_N, old_N, advantages_N, sequences, bounds)
    floor_N = bounds.dual * advantages_N
    held_N = (advantages_N < 0) & (one.values_N < floor_N)
    return Surrogate(torch.where(held_N, floor_N, one.values_N), one.low_N, one.high_N | held_N)


def gspo(new_N: Tensor, old_N: Tensor, advantages_N: Tensor, sequences: Sequences, bounds: Bounds) -> Surrogate:
    """As `ppo` with one ratio for a whole sequence: `s = exp(mean(log r))` (GSPO, arXiv 2507.18071, equation 7).

    In its token form, `sg(s) pi / sg(pi)` (equation 14): with one advantage a sequence, values and gradients are those
    of equation 5, and tokens on other ranks need no gradient from here. Clips are small: the paper's are 3e-4 and 4e-4.
    """
    mean_N = sequences.mean(log_ratio(new_N.detach(), old_N))
    return _clipped((mean_N + new_N - new_N.detach()).exp(), advantages_N, bounds)


def cispo(new_N: Tensor, old_N: Tensor, advantages_N: Tensor, sequences: Sequences, bounds: Bounds) -> Surrogate:
    """`sg(clip(r, 1 - low, 1 + high)) A log(pi)`: no token loses its gradient (MiniMax-M1, arXiv 2506.13585, eq. 4).

    The paper clips above only: `low` of 1 or more does that. None is counted as clipped.
    """
    weight_N = log_ratio(new_N.detach(), old_N).exp().clamp(1 - bounds.low, 1 + bounds.high)
    return _free(weight_N * advantages_N * new_N)


def reinforce(new_N: Tensor, old_N: Tensor, advantages_N: Tensor, sequences: Sequences, bounds: Bounds) -> Surrogate:
    """`A log(pi)`: the plain policy gradient (Williams 1992); `old` has no say, see `corrections` for weights."""
    return _free(advantages_N * new_N)


SURROGATES: dict[SurrogateKind, Callable[[Tensor, Tensor, Tensor, Sequences, Bounds], Surrogate]] = {
    "ppo": ppo,
    "ppo_dual_clip": ppo_dual_clip,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
}


def policy_loss(surrogate_N: Tensor, weights_N: Tensor) -> Tensor:
    """`-sum(w * surrogate)`: a scalar. A weight of 0 takes its token out, whatever its surrogate is."""
    return -torch.where(weights_N == 0, 0.0, weights_N * surrogate_N).sum()


def kl_loss(logprobs_N: Tensor, reference_N: Tensor, weights_N: Tensor, *, kind: KlKind = "k3") -> Tensor:
    """`sum(w * k(pi, reference))`: a scalar; `k3` is GRPO's (DeepSeekMath, equation 4) and never negative.

    Differentiated as it stands, `k1` has an expected gradient of zero, and only `k2` has that of the KL itself.
    """
    return (weights_N * KLS[kind](logprobs_N, reference_N)).sum()


def _clipped(ratio_N: Tensor, advantages_N: Tensor, bounds: Bounds) -> Surrogate:
    low_N = (ratio_N < 1 - bounds.low) & (advantages_N < 0)
    high_N = (ratio_N > 1 + bounds.high) & (advantages_N > 0)
    clipped_N = ratio_N.clamp(1 - bounds.low, 1 + bounds.high)
    return Surrogate(torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N), low_N, high_N)


def _free(values_N: Tensor) -> Surrogate:
    none_N = torch.zeros_like(values_N, dtype=torch.bool)
    return Surrogate(values_N, none_N, none_N)
