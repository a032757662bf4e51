"""How the ranks of one trainer share out an update: whose micro-batches, how they run, what all have seen.

Takes a model spread over a mesh (or a whole one), gives its `Crew`. Does not know losses or move weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from contraflow.model.decoder import Decoder
from contraflow.model.value import ValueHead
from contraflow.parallel.context import Exchange, held, share
from contraflow.parallel.experts import links
from contraflow.parallel.mesh import Mesh
from contraflow.parallel.team import Team
from contraflow.telemetry import Account
from contraflow.train.batcher import pack
from contraflow.train.forward import Fed, Reading, fed_tokens, feed
from contraflow.train.passes import Passes, PlainPasses
from contraflow.train.staged import StagedPasses
from contraflow.types import Batch, Float32, Int32, Routes, Sample
from contraflow.weights.probe import probe_logprobs


@dataclass(frozen=True)
class Crew:
    """One rank's view. `context` are the ranks that share the tokens of each sequence, if there are several."""

    team: Team
    passes: Passes
    context: Exchange | None = None
    prober: StagedPasses | None = None  # where layers are on several ranks: the probe's forward pass, at temperature 1

    def feeds(self, batches: Sequence[Batch], device: torch.device) -> tuple[list[Batch], list[Fed]]:
        """This rank's share of the micro-batches that all ranks packed alike, and the same laid out for the decoder."""
        mine, context = self.team.mine(batches), self.context
        if context is not None:
            mine = [share(batch, context.size, context.place) for batch in mine]
        return mine, [feed(batch, device, context) for batch in mine]

    def everywhere(self, batches: Sequence[Batch], mine: Sequence[Batch], values: Sequence[Tensor]) -> list[Float32]:
        """Of each of `batches`: `[T]`, what the ranks found for its trained tokens, on every rank; 0 where not trained.

        `values[i]` are this rank's `[N]` for the trained tokens of `mine[i]`, both as `feeds` shared them out.
        """
        starts = np.concatenate([[0], np.cumsum([batch.tokens.size for batch in batches])])
        places = self.team.mine(range(len(batches)))
        all_T = torch.zeros(int(starts[-1]), device=values[0].device)
        for place, batch, values_N in zip(places, mine, values, strict=True):
            all_T[torch.from_numpy(starts[place] + np.flatnonzero(batch.mask)).to(all_T.device)] = values_N.float()
        return np.split(self.team.once(all_T).cpu().numpy(), starts[1:-1])

    def routes(self, batches: Sequence[Batch], feds: Sequence[Fed], *, experts: int) -> list[Routes]:
        """Of each of `batches`: `[F, M, K]`, the experts of its fed tokens as the model sends them now, on every rank.

        `feds` are this rank's, as `feeds` shared them out.
        """
        starts = np.cumsum([0, *(fed_tokens(batch) for batch in batches)])
        places, taken = self.team.mine(range(len(batches))), self.passes.routes(feds)
        all_FMK = taken[0].new_zeros(int(starts[-1]), *taken[0].shape[1:], dtype=torch.int32)
        for place, ids_FMK in zip(places, taken, strict=True):
            here_F = np.arange(fed_tokens(batches[place]))
            if self.context is not None:
                fed_starts = batches[place].starts - np.arange(batches[place].starts.size)
                here_F = held(fed_starts.tolist(), self.context.size, self.context.place)
            all_FMK[torch.from_numpy(starts[place] + here_F).to(all_FMK.device)] = ids_FMK.int()
        found = self.team.total(all_FMK).cpu().numpy().astype(np.uint8 if experts <= 256 else np.uint16)
        return np.split(found, starts[1:-1])

    def probe_logprobs(self, decoder: Decoder, prompts: Sequence[Int32], compute: torch.dtype) -> tuple[Float32, ...]:
        """See `weights.probe`, computed in `compute`; on every rank, whatever layers it holds."""
        with decoder.computing_in(compute):
            if self.prober is None:
                return probe_logprobs(decoder, prompts)
            (batch,) = pack([_asked(prompt) for prompt in prompts], tokens_per_batch=2**31, reduction="token")
            (scored,) = self.prober.scored([feed(batch, next(decoder.parameters()).device)])
        ends = np.cumsum([len(prompt) - 1 for prompt in prompts])
        return tuple(np.split(scored.logprobs_N.cpu().numpy(), ends[:-1]))


def open_crew(
    decoder: Decoder, mesh: Mesh | None, account: Account, *, temperature: float, value: ValueHead | None = None
) -> Crew:
    """The crew of a decoder that is spread over `mesh`; of one rank for None. Collective.

    `value`: a head whose values are read in the same passes.
    """
    passes = open_passes(decoder, mesh, account, Reading(temperature, value))
    if mesh is None:
        return Crew(Team(), passes)
    prober = StagedPasses(decoder, mesh, account, Reading()) if mesh.parallel.pp > 1 else None
    context = links(mesh, mesh.cp).exchange(range(mesh.parallel.cp)) if mesh.parallel.cp > 1 else None
    return Crew(Team(mesh), passes, context, prober)


def open_passes(decoder: Decoder, mesh: Mesh | None, account: Account, reading: Reading) -> Passes:
    """How micro-batches go through a decoder that is spread over `mesh`. Collective."""
    if mesh is not None and mesh.parallel.pp > 1:
        return StagedPasses(decoder, mesh, account, reading)
    return PlainPasses(decoder, account, reading)


def _asked(prompt: Int32) -> Sample:
    """A prompt all of whose tokens but the first are looked at."""
    mask_L = np.arange(len(prompt)) > 0
    nothing_L = np.zeros(len(prompt), np.float32)
    versions_L = np.full(len(prompt), -1, np.int32)
    return Sample(tokens=prompt, mask=mask_L, behaviour=nothing_L, advantages=nothing_L, versions=versions_L)
