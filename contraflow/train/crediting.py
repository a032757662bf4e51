"""Credit by the token: what the episodes of a take earned, after penalties, spread over their tokens and normalised.

Takes samples whose advantages are what their episodes earned; gives them with the advantages that are trained. Pure.
Shape letters: L tokens of one episode, N trained ones, U turns, K trained tokens of the take.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from contraflow import config
from contraflow.algo.credit import (
    EPISODE_KINDS,
    WHITENED_KINDS,
    Estimated,
    gae,
    returns_to_go,
    token_rewards,
    whitened,
)
from contraflow.algo.loss import KLS
from contraflow.errors import TrainingError
from contraflow.types import Float32, Sample


def credited(
    samples: Sequence[Sample], loss: config.Loss, critic: config.Critic | None = None, *, version: int = 0
) -> list[Sample]:
    """The samples with one advantage for each trained token, in fp64 until the end.

    Kinds that compare whole episodes are left as they are. `gae` gives returns too, from values that the critic of
    `version`, the one that is trained, must have given. Raises TrainingError when values are missing or of another
    version, or when the penalty for leaving the reference is asked for and some sample was not looked at by it.
    """
    if loss.advantages in EPISODE_KINDS or not samples:
        return list(samples)
    if loss.advantages == "gae":
        return _by_values(samples, loss, critic or config.Critic(), version)
    parts = [returns_to_go(_rewards(sample, loss)) for sample in samples]
    if loss.advantages in WHITENED_KINDS:
        parts = list(whitened(torch.cat(parts)).split([part.numel() for part in parts]))
    return [
        msgspec.structs.replace(sample, advantages=_laid_out(part_N, sample))
        for sample, part_N in zip(samples, parts, strict=True)
    ]


def _by_values(samples: Sequence[Sample], loss: config.Loss, critic: config.Critic, version: int) -> list[Sample]:
    found = [_estimated(sample, _rewards(sample, loss), critic, version) for sample in samples]
    parts = [one.advantages_N for one in found]
    if critic.whiten:
        parts = list(whitened(torch.cat(parts)).split([part.numel() for part in parts]))
    return [
        msgspec.structs.replace(sample, advantages=_laid_out(part_N, sample), returns=_laid_out(one.returns_N, sample))
        for sample, part_N, one in zip(samples, parts, found, strict=True)
    ]


def _estimated(sample: Sample, rewards_N: Tensor, critic: config.Critic, version: int) -> Estimated:
    """By token, or by turn: an unbroken run of trained tokens is one action, of the value at its first token, and each
    of its tokens has its advantage and its return. What lies between trained tokens is skipped."""
    if sample.values is None or sample.valued != version:
        whose = "none" if sample.valued is None else f"those of version {sample.valued}"
        raise TrainingError(
            f"values from a missing version: credit at version {version} needs its own, there are {whose}"
        )
    values_N = _trained(sample.values, sample)
    how = {"discount": critic.discount, "trace": critic.trace}
    if critic.unit == "token":
        return gae(rewards_N, values_N, sample.bootstrap, **how)
    starts_U = np.flatnonzero(np.diff(np.flatnonzero(sample.mask), prepend=-2) > 1)
    lengths_U = torch.from_numpy(np.diff(starts_U, append=len(values_N)))
    turn_N = torch.arange(len(starts_U)).repeat_interleave(lengths_U)
    rewards_U = rewards_N.new_zeros(len(starts_U)).index_add_(0, turn_N, rewards_N)
    by_turn = gae(rewards_U, values_N[torch.from_numpy(starts_U)], sample.bootstrap, **how)
    return Estimated(by_turn.advantages_N[turn_N], by_turn.returns_N[turn_N])


def _rewards(sample: Sample, loss: config.Loss) -> Tensor:
    behaviour_N = _trained(sample.behaviour, sample)
    penalties_N = torch.zeros_like(behaviour_N)
    if loss.kl_in == "reward" and loss.kl_weight > 0:
        if sample.reference is None:
            raise TrainingError("loss.kl_in = 'reward' needs the reference's log-probabilities; a sample has none")
        penalties_N = loss.kl_weight * KLS[loss.kl_kind](behaviour_N, _trained(sample.reference, sample))
    earned = _trained(sample.advantages, sample)
    return token_rewards(float(earned[-1]), penalties_N) if earned.numel() else penalties_N


def _trained(values_L: Float32, sample: Sample) -> Tensor:
    return torch.from_numpy(values_L[sample.mask].astype(np.float64))


def _laid_out(values_N: Tensor, sample: Sample) -> Float32:
    values_L = np.zeros(sample.tokens.size, np.float32)
    values_L[sample.mask] = values_N.numpy()
    return values_L
