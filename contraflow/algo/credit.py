"""Credit: how much better than its siblings each episode of a group did.

Takes the rewards of one group, gives one advantage per episode. Does not see tokens, masks or versions.
Shape letter: G episodes of one group.
"""

from typing import Literal

import torch
from torch import Tensor

AdvantageKind = Literal["grpo", "centred"]

# Rewards are sums of weighted parts, so equal rewards may differ in their last bits; dividing by such a spread would
# turn rounding noise into advantages of one standard deviation.
_ROUNDING = 1e-6


def group_advantages(rewards_G: Tensor, *, kind: AdvantageKind) -> Tensor:
    """Advantages `[G]` of one group's episodes, in the rewards' dtype.

    `grpo`: `(r - mean(r)) / std(r)`, std being the population's (DeepSeekMath, arXiv 2402.03300, section 4.1.2).
    `centred`: `r - mean(r)` only (Dr. GRPO, arXiv 2503.20783), so easy and hard tasks are not weighted up.
    A group of fewer than two episodes, or whose rewards are equal up to rounding, has nothing to compare: all zeros.
    A reward that is not finite makes the whole group's advantages not finite, for the step to refuse.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), kind="grpo").tolist()
    [1.0, -1.0, -1.0, 1.0]
    """
    if rewards_G.numel() < 2:
        return torch.zeros_like(rewards_G)
    centred_G = rewards_G - rewards_G.mean()
    spread = centred_G.square().mean().sqrt()
    if spread <= _ROUNDING * rewards_G.abs().max():
        return torch.zeros_like(rewards_G)
    return centred_G / spread if kind == "grpo" else centred_G
