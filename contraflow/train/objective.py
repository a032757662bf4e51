"""The policy objective on one micro-batch: which log-probabilities are compared, what counts how much, what was seen.

Takes a batch and what the decoder gave its trained tokens; gives a part of the loss, and `Seen` for the report. Knows
`algo/` and the settings, no optimizer. Shape letters: T packed tokens, N trained tokens.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from contraflow import config
from contraflow.algo.corrections import Stale, correct
from contraflow.algo.drift import log_ratio
from contraflow.algo.loss import SURROGATES, Bounds, Sequences, kl_loss, policy_loss
from contraflow.train.forward import Scored
from contraflow.types import Batch, Float32

# Rows of what was seen of every trained token; one more for each correction.
ROWS = ("logprobs", "behaviour", "entropy", "low", "high", "weight")


class Seen(NamedTuple):
    """What one micro-batch's forward pass showed, detached."""

    rows_xN: Tensor  # fp32, `ROWS` and one for each correction: 1 where it changed the token
    kl: Tensor


class PolicyObjective:
    """Callable on a micro-batch. `total` sums over ranks that share its sequences' tokens; ages are counted to `step`.

    Invariant: `seen` has one entry for every call.
    """

    def __init__(self, loss: config.Loss, step: int, total: Callable[[Tensor], Tensor]) -> None:
        self._loss, self._step, self._total = loss, step, total
        self._surrogate = SURROGATES[loss.surrogate]
        self._bounds = Bounds(loss.clip_low, loss.clip_high, loss.dual_clip)
        self.seen: list[Seen] = []

    def __call__(self, batch: Batch, scored: Scored) -> Tensor:
        """`batch`'s part of the update's loss: a scalar."""
        loss, new_N = self._loss, scored.logprobs_N
        behaviour_N, advantages_N, weights_N = (
            _trained(values_T, batch, new_N) for values_T in (batch.behaviour, batch.advantages, batch.weights)
        )
        now_N = new_N.detach()
        sequences = Sequences(*_sequences(batch, new_N.device), self._total)
        proximal_N = now_N if batch.proximal is None else _trained(batch.proximal, batch, new_N)
        old_N, moved_N = (behaviour_N, now_N) if loss.old == "behaviour" else (proximal_N, proximal_N)
        ages_N = self._step - torch.from_numpy(batch.versions[batch.mask].astype(np.int64)).to(new_N.device)
        stale = Stale(log_ratio(moved_N, behaviour_N), ages_N, sequences)
        corrected = correct(stale, loss.corrections)
        one = self._surrogate(new_N, old_N, advantages_N, sequences, self._bounds)
        value = policy_loss(one.values_N, weights_N * corrected.weights_N)
        if loss.entropy_weight > 0:
            value = value - loss.entropy_weight * (weights_N * scored.entropy_N).sum()
        kl = torch.zeros_like(value)
        if batch.reference is not None:
            reference_N = _trained(batch.reference, batch, new_N)
            kl = kl_loss(new_N, reference_N, weights_N, kind=loss.kl_kind)
            if loss.kl_in == "loss":
                value = value + loss.kl_weight * kl
        rows = [now_N, behaviour_N, scored.entropy_N.detach(), one.low_N, one.high_N, corrected.weights_N]
        rows_xN = torch.stack([row.to(now_N.dtype) for row in [*rows, *corrected.touched.values()]])
        self.seen.append(Seen(rows_xN, kl.detach()))
        return value


def _trained(values_T: Float32, batch: Batch, like: Tensor) -> Tensor:
    return torch.from_numpy(values_T[batch.mask]).to(like.device, non_blocking=True)


def _sequences(batch: Batch, device: torch.device) -> tuple[Tensor, int]:
    lengths_S = np.diff(batch.starts)
    of_T = np.repeat(np.arange(lengths_S.size), lengths_S)
    return torch.from_numpy(of_T[batch.mask]).to(device), int(lengths_S.size)


def joined_rows(seen: Sequence[Seen], corrections: int, like: Tensor) -> Tensor:
    """`[x, N]` of all micro-batches side by side; no columns of none."""
    return torch.cat([like.new_zeros(len(ROWS) + corrections, 0), *[part.rows_xN for part in seen]], 1)
