"""One optimizer update over packed micro-batches, whatever the objective: forward, backward, clip, apply.

Takes micro-batches whose `weights` are shares of the whole update and an objective on their log-probabilities; gives
the losses and the gradient norm. The gradient is that of one large batch, for any split. Does not choose samples.
Shape letters: F fed tokens, M MoE layers, E experts.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from contraflow.errors import TrainingError
from contraflow.model.decoder import Decoder
from contraflow.model.router import RouterTape
from contraflow.telemetry import Account
from contraflow.train.forward import Fed, Scored, feed, score
from contraflow.train.optimizer import Applied, Optimizer
from contraflow.types import Batch

Objective = Callable[[Batch, Fed, Scored], Tensor]  # a micro-batch's part of the loss, a scalar


class Updated(NamedTuple):
    """One update. `loss` holds all terms; `balance` is the router's before its weight."""

    loss: float
    balance: float
    loads_ME: Tensor | None  # int64 tokens given to each expert; None for a model without experts
    applied: Applied


class Updater:
    """Moves a decoder's weights. `balance_weight` adds the load-balancing loss of its routers, if it has any."""

    def __init__(
        self,
        decoder: Decoder,
        optimizer: Optimizer,
        account: Account,
        *,
        temperature: float = 1.0,
        balance_weight: float = 0.0,
    ) -> None:
        self.device = decoder.head.device
        self._decoder = decoder
        self._optimizer = optimizer
        self._account = account
        self._temperature = temperature
        self._mixture = bool(decoder.config.moe_layers)
        self._balance_weight = balance_weight if self._mixture else 0.0

    def update(self, batches: Sequence[Batch], objective: Objective) -> Updated:
        """Raises TrainingError, with the weights as they were, when a loss or the gradient is not finite."""
        self._optimizer.clear()
        with self._account.charge("batch"):
            feds = [feed(batch, self.device) for batch in batches]
        union_ME, tokens = self._loads(feds), sum(fed.tokens_F.numel() for fed in feds)
        total = total_balance = 0.0
        loads = []
        for place, (batch, fed) in enumerate(zip(batches, feds, strict=True)):
            tape = RouterTape() if self._mixture else None
            with self._account.charge("forward"):
                scored = score(self._decoder, fed, temperature=self._temperature, tape=tape)
                loss = objective(batch, fed, scored)
                balance = torch.zeros_like(loss)
                if tape is not None and self._balance_weight > 0:
                    balance = tape.balance_loss(loads_ME=union_ME, tokens=tokens)
                    loss = loss + self._balance_weight * balance
                value, balance_value = torch.stack([loss.detach(), balance.detach()]).tolist()
            if not math.isfinite(value):
                raise TrainingError(f"the loss of micro-batch {place + 1} of {len(batches)} is {value}")
            with self._account.charge("backward"):
                loss.backward()
            total, total_balance = total + value, total_balance + balance_value
            if tape is not None:
                loads.append(tape.loads())
        with self._account.charge("optimizer"):
            applied = self._optimizer.apply()
        return Updated(total, total_balance, torch.stack(loads).sum(0) if loads else None, applied)

    @torch.no_grad()
    def _loads(self, feds: Sequence[Fed]) -> Tensor | None:
        """Expert loads `[M, E]` of an update of several micro-batches, by one more forward pass; None if not needed.

        The balance loss is a product of loads and probabilities: its gradient is that of one large batch only if every
        micro-batch knows the loads of all.
        """
        if self._balance_weight == 0 or len(feds) == 1:
            return None
        loads = []
        with self._account.charge("forward"):
            for fed in feds:
                tape = RouterTape()
                self._decoder(fed.tokens_F, fed.positions_F, fed.plan, tape=tape)
                loads.append(tape.loads())
        return torch.stack(loads).sum(0)
