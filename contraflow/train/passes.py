"""Forward and backward over the micro-batches of an update: the seam where a pipeline puts its schedule.

Takes fed micro-batches and what their losses are, leaves gradients on the parameters and gives what was seen. Does not
know other ranks, clip, or move weights. Shape letters: B micro-batches, M MoE layers, E experts.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from contraflow.model.decoder import Decoder
from contraflow.model.router import RouterTape
from contraflow.telemetry import Account
from contraflow.train.forward import Fed, Reading, Scored, score

LossOf = Callable[[int, Scored], Tensor]  # of a micro-batch, by its place: its part of the loss, a scalar


class Balance(NamedTuple):
    """The load-balancing loss: its weight, and what one forward pass (or one stage's layers of it) adds to it."""

    weight: float
    of: Callable[[RouterTape], Tensor]


class Passed(NamedTuple):
    """What the passes saw, detached. A rank that has no part in a number gives zeros for it."""

    values_B2: Tensor  # fp32: each micro-batch's loss, all terms; and its balance loss before the weight
    loads_ME: Tensor | None  # int64 tokens given to each expert, over all micro-batches; None without experts
    differing_M3: Tensor | None = None  # int64, the same of `RouterTape.differing`


class Passes(Protocol):
    """Gradients are added to those that are there: they are sums over micro-batches, never means."""

    def run(self, feds: Sequence[Fed], loss_of: LossOf, balance: Balance | None) -> Passed:
        """Forward and backward of every micro-batch. A loss that is not finite is the caller's to refuse, afterwards:
        a rank that left early would keep the others waiting."""
        ...

    def loads(self, feds: Sequence[Fed]) -> Tensor:
        """Expert loads `[M, E]` by forward passes alone."""
        ...

    def routes(self, feds: Sequence[Fed]) -> list[Tensor]:
        """The experts of every fed token, int64 `[F, M, K]`, by forward passes alone; zeros for layers elsewhere."""
        ...

    def scored(self, feds: Sequence[Fed]) -> list[Scored]:
        """What the decoder gives the trained tokens of each micro-batch, without gradients."""
        ...


class PlainPasses:
    """One micro-batch after the other, the whole model in this rank's hands."""

    def __init__(self, decoder: Decoder, account: Account, reading: Reading) -> None:
        self._decoder = decoder
        self._account = account
        self._reading = reading
        self._mixture = bool(decoder.config.moe_layers)

    def run(self, feds: Sequence[Fed], loss_of: LossOf, balance: Balance | None) -> Passed:
        """See `Passes.run`."""
        values, loads, differing = list[Tensor](), list[Tensor](), list[Tensor]()
        for place, fed in enumerate(feds):
            tape = RouterTape(fed.given) if self._mixture else None
            with self._account.charge("forward"):
                loss = loss_of(place, score(self._decoder, fed, self._reading, tape=tape))
                uneven = torch.zeros_like(loss)
                if tape is not None and balance is not None:
                    uneven = balance.of(tape)
                    loss = loss + balance.weight * uneven
                values.append(torch.stack([loss.detach(), uneven.detach()]))
            with self._account.charge("backward"):
                loss.backward()
            if tape is not None:
                loads.append(tape.loads())
                differing.append(tape.differing())
        if not loads:
            return Passed(torch.stack(values), None)
        return Passed(torch.stack(values), torch.stack(loads).sum(0), torch.stack(differing).sum(0))

    def loads(self, feds: Sequence[Fed]) -> Tensor:
        """See `Passes.loads`."""
        return torch.stack([self._taped(fed).loads() for fed in feds]).sum(0)

    def routes(self, feds: Sequence[Fed]) -> list[Tensor]:
        """See `Passes.routes`."""
        return [self._taped(fed).routes().long() for fed in feds]

    @torch.no_grad()
    def scored(self, feds: Sequence[Fed]) -> list[Scored]:
        """See `Passes.scored`."""
        with self._account.charge("forward"):
            return [score(self._decoder, fed, self._reading, tape=_replay(fed)) for fed in feds]

    @torch.no_grad()
    def _taped(self, fed: Fed) -> RouterTape:
        tape = RouterTape(fed.given)
        with self._account.charge("forward"):
            self._decoder(fed.tokens_F, fed.positions_F, fed.plan, tape=tape)
        return tape


def _replay(fed: Fed) -> RouterTape | None:
    return None if fed.given is None else RouterTape(fed.given)
