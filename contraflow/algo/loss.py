"""The policy objective, token by token.

Takes log-probabilities and credit of the trained tokens and each token's share of the update, gives a scalar whose sum
over micro-batches is the loss of the whole update. Does not know batches, models or optimizers.
Shape letters: N trained tokens, S sequences.
"""

from typing import Literal

import torch
from torch import Tensor

from contraflow.algo.drift import kl_k3, log_ratio

Reduction = Literal["token", "sequence"]


def token_shares(lengths_S: Tensor, *, reduction: Reduction) -> Tensor:
    """The share `[S]` that each trained token of sequence s has in the update's loss; fp64, sums to 1 over tokens.

    `lengths_S` counts trained tokens; a sequence with none takes no part.
    `token`: every token alike, `1 / sum(lengths)` (DAPO, arXiv 2503.14476, section 3.3).
    `sequence`: every sequence alike, `1 / (S * length)` (GRPO, arXiv 2402.03300, equation 3).
    """
    lengths_S = lengths_S.double()
    if reduction == "token":
        return torch.full_like(lengths_S, 1.0) / lengths_S.sum().clamp(min=1)
    return torch.where(lengths_S > 0, 1 / (lengths_S.clamp(min=1) * (lengths_S > 0).sum().clamp(min=1)), 0.0)


def clipped_surrogate(
    logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """`min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` per token, `r = pi / mu`; to be maximised.

    PPO (arXiv 1707.06347, equation 7) with the two bounds apart (DAPO, section 3.1). `mu` is the policy that sampled
    the token, whatever its age, so the ratio also corrects for the age.
    """
    ratio_N = log_ratio(logprobs_N, behaviour_N).exp()
    return torch.minimum(ratio_N * advantages_N, ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N)


def policy_loss(
    logprobs_N: Tensor,
    behaviour_N: Tensor,
    advantages_N: Tensor,
    weights_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """`-sum(w * clipped_surrogate)`: a scalar; differentiable in `logprobs_N` only."""
    surrogate_N = clipped_surrogate(logprobs_N, behaviour_N, advantages_N, clip_low=clip_low, clip_high=clip_high)
    return -(weights_N * surrogate_N).sum()


def kl_loss(logprobs_N: Tensor, reference_N: Tensor, weights_N: Tensor) -> Tensor:
    """`sum(w * k3(pi, reference))`: a scalar, never negative (DeepSeekMath, equation 4)."""
    return (weights_N * kl_k3(logprobs_N, reference_N)).sum()
