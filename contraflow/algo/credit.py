"""Credit: what each episode of a group, or each of its tokens, did better than expected.

Takes rewards, and values where there is a critic; gives advantages. Does not see models, masks or versions.
Shape letters: G episodes of one group, N trained tokens of one episode, K trained tokens of a whole take.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

AdvantageKind = Literal["grpo", "dr_grpo", "rloo", "reinforce", "reinforce++", "reinforce++_baseline", "gae"]

# One number for a whole episode; the others give every token its own, once rewards of tokens are known.
EPISODE_KINDS = ("grpo", "dr_grpo", "rloo")
# Divided by the spread over all trained tokens of a take; for `gae`, that is a setting.
WHITENED_KINDS = ("reinforce++", "reinforce++_baseline")
# Of several episodes, nothing can be said of one alone.
COMPARING_KINDS = ("grpo", "dr_grpo", "rloo", "reinforce++_baseline")

# Rewards are sums of weighted parts, so equal rewards may differ in their last bits; dividing by such a spread would
# turn rounding noise into advantages of one standard deviation.
_ROUNDING = 1e-6


def group_scores(rewards_G: Tensor, *, kind: AdvantageKind) -> Tensor:
    """What each episode of a group earned, `[G]`, in the rewards' dtype: its advantage for `EPISODE_KINDS`.

    `grpo`: `(r - mean(r)) / std(r)`, std being the population's (DeepSeekMath, arXiv 2402.03300, section 4.1.2).
    `dr_grpo`: `r - mean(r)` only (arXiv 2503.20783), so easy and hard tasks are not weighted up.
    `rloo`: `r - mean(r of the others)`, which is `(r - mean(r)) G / (G - 1)` (RLOO, arXiv 2402.14740, equation 8).
    `reinforce++_baseline`: as `dr_grpo`; `reinforce`, `reinforce++` (arXiv 2501.03262) and `gae`: the reward itself.
    Where episodes are compared, a group of fewer than two, or whose rewards are equal up to rounding, has nothing to
    compare: all zeros. A reward that is not finite makes the whole group's scores not finite, for the step to refuse.

    >>> group_scores(torch.tensor([1.0, 0.0, 0.0, 1.0]), kind="grpo").tolist()
    [1.0, -1.0, -1.0, 1.0]
    """
    if kind not in COMPARING_KINDS:
        return rewards_G
    count = rewards_G.numel()
    if count < 2:
        return torch.zeros_like(rewards_G)
    centred_G = rewards_G - rewards_G.mean()
    spread = centred_G.square().mean().sqrt()
    if spread <= _ROUNDING * rewards_G.abs().max():
        return torch.zeros_like(rewards_G)
    if kind == "grpo":
        return centred_G / spread
    return centred_G * (count / (count - 1)) if kind == "rloo" else centred_G


def token_rewards(score: float, penalties_N: Tensor) -> Tensor:
    """`[N]`: what each trained token costs, and with the last one what the episode earned (InstructGPT, 2203.02155).

    `penalties_N` is `beta * log(mu / reference)` or another estimate of the KL: see `drift`. Nothing of no tokens.
    """
    rewards_N = -penalties_N
    if rewards_N.numel():
        rewards_N[-1] += score
    return rewards_N


def returns_to_go(rewards_N: Tensor) -> Tensor:
    """`sum(r[i] for i >= t)` for every t: undiscounted, as episodes of text are (REINFORCE++, equation 3)."""
    return rewards_N.flip(0).cumsum(0).flip(0)


class Estimated(NamedTuple):
    """Of every trained token: its advantage, and the return that its value should have foretold."""

    advantages_N: Tensor
    returns_N: Tensor


def gae(rewards_N: Tensor, values_N: Tensor, last: float, *, discount: float, trace: float) -> Estimated:
    """Generalised advantage estimation (arXiv 1506.02438, equation 16): `A[t] = sum((discount trace)^i delta[t + i])`.

    `delta[t] = r[t] + discount V[t + 1] - V[t]`; `values_N[t]` is the value of the state before action t, and `last`
    that of the state after the last one: 0 where the episode came to its end, its estimate where it was cut off.
    An action is a token, or a turn: the arithmetic is the same. Returns are `A + V`.
    """
    after_N = torch.cat([values_N[1:], values_N.new_full((min(1, values_N.numel()),), last)])
    errors_N = rewards_N + discount * after_N - values_N
    found, ahead = list[float](), 0.0
    for error in reversed(errors_N.tolist()):  # plain numbers: a hundred times faster than tensors of one
        ahead = error + discount * trace * ahead
        found.append(ahead)
    advantages_N = errors_N.new_tensor(found[::-1])
    return Estimated(advantages_N, advantages_N + values_N)


def whitened(advantages_K: Tensor) -> Tensor:
    """`(A - mean(A)) / std(A)` over all trained tokens of a take (REINFORCE++, equation 4); zeros where all are equal.

    One that is not finite makes all of them so, for the step to refuse.
    """
    if not advantages_K.numel():
        return advantages_K
    centred_K = advantages_K - advantages_K.mean()
    spread = centred_K.square().mean().sqrt()
    if spread <= _ROUNDING * advantages_K.abs().max():
        return torch.zeros_like(advantages_K)
    return centred_K / spread


def overlong_penalty(length: int, *, begin: int, end: int) -> float:
    """What an answer of `length` sampled tokens loses: 0 up to `begin`, 1 from `end` on, a straight line between.

    "Soft overlong punishment" of DAPO (arXiv 2503.14476, equation 13). `end` <= `begin` asks for none.
    """
    if end <= begin:
        return 0.0
    return min(max(length - begin, 0) / (end - begin), 1.0)
