"""One optimizer update over packed micro-batches, whatever the objective: forward, backward, clip, apply.

Takes micro-batches whose `weights` are shares of the whole update and an objective on their log-probabilities; gives
the losses and the gradient norm. The gradient is that of one large batch, for any split. Does not choose samples.
Shape letters: F fed tokens, M MoE layers, E experts.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from contraflow.errors import TrainingError
from contraflow.model.decoder import Decoder
from contraflow.model.router import RouterTape
from contraflow.parallel.team import Team
from contraflow.telemetry import Account
from contraflow.train.forward import Fed, Scored, fed_tokens, feed
from contraflow.train.optimizer import Applied, Optimizer
from contraflow.train.passes import Balance, Passes, PlainPasses
from contraflow.types import Batch

Objective = Callable[[Batch, Fed, Scored], Tensor]  # a micro-batch's part of the loss, a scalar


class Updated(NamedTuple):
    """One update. `loss` holds all terms; `balance` is the router's before its weight."""

    loss: float
    balance: float
    loads_ME: Tensor | None  # int64 tokens given to each expert; None for a model without experts
    applied: Applied


class Updater:
    """Moves a decoder's weights. `balance_weight` adds the load-balancing loss of its routers, if it has any.

    With a `team` every rank calls `update` with the same micro-batches, runs its share of them, and gets the same
    answer or the same error. `passes` is how micro-batches run; None is one after the other.
    """

    def __init__(
        self,
        decoder: Decoder,
        optimizer: Optimizer,
        account: Account,
        *,
        temperature: float = 1.0,
        balance_weight: float = 0.0,
        team: Team | None = None,
        passes: Passes | None = None,
    ) -> None:
        self.device = decoder.head.device
        self._optimizer = optimizer
        self._account = account
        self._team = team or Team()
        self._passes = passes or PlainPasses(decoder, account, temperature=temperature)
        self._balance_weight = balance_weight if decoder.config.moe_layers else 0.0

    def update(self, batches: Sequence[Batch], objective: Objective) -> Updated:
        """Raises TrainingError, with the weights as they were, when a loss or the gradient is not finite."""
        self._optimizer.clear()
        mine = self._team.mine(batches)
        with self._account.charge("batch"):
            feds = [feed(batch, self.device) for batch in mine]
        balance = self._balance(feds, sum(fed_tokens(batch) for batch in batches))
        seen = self._passes.run(feds, lambda place, scored: objective(mine[place], feds[place], scored), balance)
        values = self._team.rows(seen.values_B2, len(batches)).tolist()
        loads_ME = None if seen.loads_ME is None else self._team.total(seen.loads_ME)
        for place, (value, _) in enumerate(values):
            if not math.isfinite(value):
                raise TrainingError(f"the loss of micro-batch {place + 1} of {len(batches)} is {value}")
        with self._account.charge("optimizer"):
            applied = self._optimizer.apply()
        loss, uneven = (sum(column) for column in zip(*values, strict=True))
        return Updated(loss, uneven, loads_ME, applied)

    def _balance(self, feds: Sequence[Fed], tokens: int) -> Balance | None:
        """The balance loss of a micro-batch among all `tokens` fed in this update.

        It is a product of loads and probabilities: its gradient is that of one large batch only if every micro-batch
        knows the loads of all. With several micro-batches that takes one more forward pass.
        """
        team = self._team
        if self._balance_weight == 0:
            return None
        known_ME = team.total(self._passes.loads(feds)) if len(feds) > 1 else None

        def of(tape: RouterTape) -> Tensor:
            loads_ME = team.total(tape.loads()) if known_ME is None else known_ME
            return tape.balance_loss(loads_ME=loads_ME, tokens=tokens)

        return Balance(self._balance_weight, of)
