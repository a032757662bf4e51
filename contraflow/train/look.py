"""The look before a step: what the policy as it stands, and a frozen reference, say of every token of a take.

Takes samples and the passes to make, gives the samples with what was found. Runs models without gradients; does not
give credit or move weights. Shape letters: T packed tokens, N trained tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
import torch

from contraflow.train.batcher import packed
from contraflow.train.crew import Crew
from contraflow.train.passes import Passes
from contraflow.types import Batch, Float32, Sample

Finding = Literal["proximal", "reference"]


def look(
    samples: Sequence[Sample],
    passes: Mapping[Finding, Passes],
    crew: Crew,
    *,
    device: torch.device,
    tokens_per_batch: int,
    experts: int = 0,
) -> list[Sample]:
    """Each sample with the log-probabilities that every one of `passes` gave its trained tokens. Collective.

    For a policy of `experts` whose choices shall be kept, also with the experts that its fed tokens went to.
    """
    if not samples or not (passes or experts):
        return list(samples)
    nothing_S = np.zeros(len(samples), np.float32)  # nobody's share of a loss
    bins, batches = packed(samples, nothing_S, tokens_per_batch, crew.team.shares)
    mine, feds = crew.feeds(batches, device)
    found = list(samples)
    if experts:
        for bin_, batch, ids_FMK in zip(bins, batches, crew.routes(batches, feds, experts=experts), strict=True):
            ends_S = batch.starts[1:] - np.arange(1, batch.starts.size)  # in fed tokens
            for place, ids_LMK in zip(bin_, np.split(ids_FMK, ends_S[:-1])[: len(bin_)], strict=True):
                known_L = np.ones(len(ids_LMK), np.bool_)
                found[place] = msgspec.structs.replace(found[place], routes=ids_LMK, routed=known_L)
    free = [fed._replace(given=None) for fed in feds]  # experts of the policy say nothing to another model's routers
    for name, one in passes.items():
        answers = [scored.logprobs_N for scored in one.scored(feds if name == "proximal" else free)]
        for place, values_L in by_sample(bins, batches, crew.everywhere(batches, mine, answers)):
            found[place] = msgspec.structs.replace(found[place], **{name: values_L})
    return found


def by_sample(
    bins: Sequence[Sequence[int]], batches: Sequence[Batch], values: Sequence[Float32]
) -> Iterator[tuple[int, Float32]]:
    """Each sample's place and its `[L]` of what `values` has for its batch, `[T]`; as `packed` laid them out."""
    for bin_, batch, values_T in zip(bins, batches, values, strict=True):
        parts: list[Float32] = np.split(values_T, batch.starts[1:-1])
        yield from zip(bin_, parts[: len(bin_)], strict=True)
