"""Micro-batches of an update through a pipeline: `Passes` where the layers lie on several ranks.

Each stage adds the balance loss of its own routers to the gradient that passes through it; the last one has the loss.
What a rank has not seen it gives as zeros: the sum over ranks is what one rank would have seen.
Shape letters: B micro-batches, M MoE layers, E experts, N trained tokens.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import Decoder
from contraflow.model.router import RouterTape
from contraflow.parallel import pipeline
from contraflow.parallel.mesh import Mesh
from contraflow.parallel.pipeline import Pipeline, add_loss, micro_batches
from contraflow.telemetry import Account
from contraflow.train.forward import Fed, Reading, Scored, score_hidden
from contraflow.train.passes import Balance, LossOf, Passed


class StagedPasses:
    """See `Passes`. Collective: all ranks of the mesh call the same, with as many micro-batches each.

    With a balance loss, the update must know the loads of all layers beforehand: no stage sees those of another.
    """

    def __init__(self, decoder: Decoder, mesh: Mesh, account: Account, reading: Reading) -> None:
        self._decoder, self._mesh, self._account = decoder, mesh, account
        self._reading = reading
        self._pipeline = Pipeline(decoder, mesh)

    def run(self, feds: Sequence[Fed], loss_of: LossOf, balance: Balance | None) -> Passed:
        """See `Passes.run`."""
        values_B2 = torch.zeros(len(feds), 2, device=self._mesh.device)
        loads_ME = self._no_loads()
        differing_M3 = loads_ME.new_zeros(len(loads_ME), 3)

        def after(seen: pipeline.Passed) -> Tensor:
            place, own = seen.number, seen.hidden_TD.new_zeros((), dtype=torch.float32)
            if seen.tape is not None:
                self._add_loads(loads_ME, seen.span, seen.tape)
                differing_M3[self._rows(seen.span)] += seen.tape.differing()
                if balance is not None:
                    uneven = balance.of(seen.tape)
                    own = balance.weight * uneven
                    _note(values_B2, place, own, uneven)
            if seen.span.stop < self._decoder.config.layers:
                return add_loss(seen.hidden_TD, own) if own.requires_grad else seen.hidden_TD
            if place >= len(feds):  # one of none: its loss is 0, and everybody's gradient of it
                return seen.hidden_TD.float().sum() + own
            loss = loss_of(place, score_hidden(seen.hidden_TD, self._decoder, feds[place], self._reading))
            _note(values_B2, place, loss)
            return loss + own

        self._run(feds, after, backward=True)
        return Passed(values_B2, loads_ME, differing_M3) if loads_ME.numel() else Passed(values_B2, None)

    def loads(self, feds: Sequence[Fed]) -> Tensor:
        """See `Passes.loads`; zeros for layers that are elsewhere."""
        loads_ME = self._no_loads()

        def after(seen: pipeline.Passed) -> Tensor:
            if seen.tape is not None:
                self._add_loads(loads_ME, seen.span, seen.tape)
            return seen.hidden_TD

        self._run(feds, after, backward=False)
        return loads_ME

    def routes(self, feds: Sequence[Fed]) -> list[Tensor]:
        """See `Passes.routes`."""
        config = self._decoder.config
        taken = [fed.tokens_F.new_zeros(fed.tokens_F.numel(), len(config.moe_layers), config.top_k) for fed in feds]

        def after(seen: pipeline.Passed) -> Tensor:
            if seen.tape is not None and seen.number < len(feds):
                taken[seen.number][:, self._rows(seen.span)] = seen.tape.routes().long()
            return seen.hidden_TD

        self._run(feds, after, backward=False)
        return taken

    def scored(self, feds: Sequence[Fed]) -> list[Scored]:
        """See `Passes.scored`; on every rank."""
        numbers = [fed.targets_N.numel() for fed in feds]
        all_xN = torch.zeros(len(Scored._fields), sum(numbers), device=self._mesh.device)
        parts = all_xN.split(numbers, 1)

        def after(seen: pipeline.Passed) -> Tensor:
            place = seen.number
            if seen.span.stop == self._decoder.config.layers and place < len(feds):
                found = score_hidden(seen.hidden_TD, self._decoder, feds[place], self._reading)
                parts[place].copy_(torch.stack(found))
            return seen.hidden_TD

        self._run(feds, after, backward=False)
        dist.broadcast(all_xN, group=self._mesh.pp, group_src=self._mesh.parallel.pp - 1)
        return [Scored(*part) for part in parts]

    def _run(self, feds: Sequence[Fed], after: pipeline.After, *, backward: bool) -> None:
        missing = micro_batches(len(feds), self._mesh.parallel) - len(feds)
        with self._account.charge("pipeline"):
            self._pipeline.run([*feds, *[_nothing(feds[0])] * missing], after, backward=backward)

    def _no_loads(self) -> Tensor:
        config = self._decoder.config
        return torch.zeros(len(config.moe_layers), config.experts, dtype=torch.int64, device=self._mesh.device)

    def _add_loads(self, loads_ME: Tensor, span: range, tape: RouterTape) -> None:
        loads_ME[self._rows(span)] += tape.loads()

    def _rows(self, span: range) -> list[int]:
        """Of the model's MoE layers, those in `span`."""
        return [row for row, layer in enumerate(self._decoder.config.moe_layers) if layer in span]


def _nothing(fed: Fed) -> Fed:
    """A micro-batch without tokens."""
    rows, device = fed.rows_N[:0], fed.tokens_F.device
    return Fed(fed.tokens_F[:0], fed.positions_F[:0], PackedPlan([0], device), rows, fed.targets_N[:0])


def _note(values_B2: Tensor, place: int, loss: Tensor, uneven: Tensor | None = None) -> None:
    if place < len(values_B2):
        values_B2[place, 0] += loss.detach()
        if uneven is not None:
            values_B2[place, 1] += uneven.detach()
