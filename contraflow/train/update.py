"""One optimizer update over packed micro-batches, whatever the objective: forward, backward, clip, apply.

Takes micro-batches whose `weights` are shares of the whole update and an objective on their log-probabilities; gives
the losses and the gradient norm. The gradient is that of one large batch, for any split. Does not choose samples.
Shape letters: F fed tokens, M MoE layers, E experts.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

from torch import Tensor

from contraflow.errors import TrainingError
from contraflow.model.copies import compute_copies
from contraflow.model.decoder import Decoder
from contraflow.model.router import RouterTape
from contraflow.telemetry import Account
from contraflow.train.crew import Crew, open_crew
from contraflow.train.forward import Fed, Scored, fed_tokens
from contraflow.train.optimizer import Applied, Optimizer
from contraflow.train.passes import Balance
from contraflow.types import Batch

Objective = Callable[[Batch, Fed, Scored], Tensor]  # a micro-batch's part of the loss, a scalar


class Measured(NamedTuple):
    """What the passes of one update saw. `loss` holds all terms; `balance` is the router's before its weight."""

    loss: float
    balance: float
    loads_ME: Tensor | None  # int64 tokens given to each expert; None for a model without experts
    differing_M3: Tensor | None = None  # int64, see `RouterTape.differing`

    def moved(self, applied: Applied) -> "Updated":
        """The update, once its gradients are applied."""
        return Updated(self.loss, self.balance, self.loads_ME, applied, self.differing_M3)


class Updated(NamedTuple):
    """One update: what its passes saw, and how it was applied."""

    loss: float
    balance: float
    loads_ME: Tensor | None
    applied: Applied
    differing_M3: Tensor | None = None


class Updater:
    """Moves a decoder's weights. `balance_weight` adds the load-balancing loss of its routers, if it has any.

    Every rank of the crew calls `update` with the same micro-batches, runs its share of them, and gets the same answer
    or the same error.
    """

    def __init__(
        self,
        decoder: Decoder,
        optimizer: Optimizer,
        account: Account,
        crew: Crew | None = None,
        *,
        balance_weight: float = 0.0,
    ) -> None:
        self.device = next(decoder.parameters()).device
        self._decoder = decoder
        self._optimizer = optimizer
        self._account = account
        self._crew = crew or open_crew(decoder, None, account, temperature=1.0)
        self._balance_weight = balance_weight if decoder.config.moe_layers else 0.0

    def update(self, batches: Sequence[Batch], objective: Objective) -> Updated:
        """Raises TrainingError, with the weights as they were, when a loss or the gradient is not finite."""
        measured = self.measure(batches, objective)
        with self._account.charge("optimizer"):
            return measured.moved(self._optimizer.apply())

    def measure(self, batches: Sequence[Batch], objective: Objective) -> Measured:
        """Leave the gradients on the parameters, for the caller to apply. Raises TrainingError as `update` does."""
        self._optimizer.clear()
        team, passes = self._crew.team, self._crew.passes
        with self._account.charge("batch"):
            mine, feds = self._crew.feeds(batches, self.device)
        with compute_copies(self._decoder) if self._decoder.hold_copies else nullcontext():
            balance = self._balance(feds, sum(fed_tokens(batch) for batch in batches))
            seen = passes.run(feds, lambda place, scored: objective(mine[place], feds[place], scored), balance)
        values = team.rows(seen.values_B2, len(batches)).tolist()
        loads_ME = None if seen.loads_ME is None else team.total(seen.loads_ME)
        differing_M3 = None if seen.differing_M3 is None else team.total(seen.differing_M3)
        for place, (value, _) in enumerate(values):
            if not math.isfinite(value):
                raise TrainingError(f"the loss of micro-batch {place + 1} of {len(batches)} is {value}")
        loss, uneven = (sum(column) for column in zip(*values, strict=True))
        return Measured(loss, uneven, loads_ME, differing_M3)

    def _balance(self, feds: Sequence[Fed], tokens: int) -> Balance | None:
        """The balance loss of a micro-batch among all `tokens` fed in this update.

        It is a product of loads and probabilities: its gradient is that of one large batch only if every micro-batch
        knows the loads of all. With several micro-batches that takes one more forward pass.
        """
        team, passes = self._crew.team, self._crew.passes
        if self._balance_weight == 0:
            return None
        known_ME = team.total(passes.loads(feds)) if len(feds) > 1 or team.staged else None

        def of(tape: RouterTape) -> Tensor:
            loads_ME = team.total(tape.loads()) if known_ME is None else known_ME
            return tape.balance_loss(loads_ME=loads_ME, tokens=tokens)

        return Balance(self._balance_weight, of)
