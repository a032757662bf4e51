"""How the ranks of one trainer share out an update: whose micro-batches, how they run, what all have seen.

Takes a model spread over a mesh (or a whole one), gives its `Crew`. Does not know losses or move weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from contraflow.model.decoder import Decoder
from contraflow.parallel.context import Exchange, share
from contraflow.parallel.experts import links
from contraflow.parallel.mesh import Mesh
from contraflow.parallel.team import Team
from contraflow.telemetry import Account
from contraflow.train.forward import Fed, feed
from contraflow.train.passes import Passes, PlainPasses
from contraflow.train.staged import StagedPasses
from contraflow.types import Batch


@dataclass(frozen=True)
class Crew:
    """One rank's view. `context` are the ranks that share the tokens of each sequence, if there are several."""

    team: Team
    passes: Passes
    context: Exchange | None = None

    def feeds(self, batches: Sequence[Batch], device: torch.device) -> tuple[list[Batch], list[Fed]]:
        """This rank's share of the micro-batches that all ranks packed alike, and the same laid out for the decoder."""
        mine, context = self.team.mine(batches), self.context
        if context is not None:
            mine = [share(batch, context.size, context.place) for batch in mine]
        return mine, [feed(batch, device, context) for batch in mine]


def open_crew(decoder: Decoder, mesh: Mesh | None, account: Account, *, temperature: float) -> Crew:
    """The crew of a decoder that is spread over `mesh`; of one rank for None. Collective."""
    if mesh is None:
        return Crew(Team(), PlainPasses(decoder, account, temperature=temperature))
    passes: Passes = PlainPasses(decoder, account, temperature=temperature)
    if mesh.parallel.pp > 1:
        passes = StagedPasses(decoder, mesh, account, temperature=temperature)
    context = links(mesh, mesh.cp).exchange(range(mesh.parallel.cp)) if mesh.parallel.cp > 1 else None
    return Crew(Team(mesh), passes, context)
