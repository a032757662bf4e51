"""Credit by the token: what the episodes of a take earned, after penalties, spread over their tokens and normalised.

Takes samples whose advantages are what their episodes earned; gives them with the advantages that are trained. Pure.
Shape letters: L tokens of one episode, N trained ones, K trained tokens of the take.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from contraflow import config
from contraflow.algo.credit import EPISODE_KINDS, WHITENED_KINDS, returns_to_go, token_rewards, whitened
from contraflow.algo.loss import KLS
from contraflow.errors import TrainingError
from contraflow.types import Float32, Sample


def credited(samples: Sequence[Sample], loss: config.Loss) -> list[Sample]:
    """The samples with one advantage for each trained token, in fp64 until the end.

    Kinds that compare whole episodes are left as they are. Raises TrainingError when the penalty for leaving the
    reference is asked for and some sample was not looked at by it.
    """
    if loss.advantages in EPISODE_KINDS or not samples:
        return list(samples)
    parts = [returns_to_go(_rewards(sample, loss)) for sample in samples]
    if loss.advantages in WHITENED_KINDS:
        parts = list(whitened(torch.cat(parts)).split([part.numel() for part in parts]))
    return [
        msgspec.structs.replace(sample, advantages=_laid_out(part_N, sample))
        for sample, part_N in zip(samples, parts, strict=True)
    ]


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
