"""When an engine's experts are placed anew, and how: every few refreshes, from what they were given since last time.

Takes the loads that all ranks measured, gives a placement a layer. Pure bookkeeping on the leader; `parts.py` carries
it out. Shape letters as in `dispatch.placement`.
"""

from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor

from contraflow.dispatch.placement import Placement, Sizes, contiguous, imbalance, place


class Placer:
    """Invariant: `served` is what the slots of all ranks hold, outside of a refresh."""

    def __init__(self, sizes: Sizes, layers: int, *, every: int) -> None:
        self._plain = [contiguous(sizes)] * layers
        self.served = self._plain
        self.placed = 0  # times that experts were placed anew
        # Imbalance, mean over layers, of the loads that the last new placement was made from:
        self.in_order = 0.0  # had nothing ever been placed
        self.imbalance = 0.0  # as it was
        self.promised = 0.0  # had the new placement been in force
        self._sizes = sizes
        self._every = every
        self._refreshes = 0
        self._loads_ME = torch.zeros(layers, sizes.experts, dtype=torch.int64)

    def propose(self, loads_ME: Tensor) -> list[Placement]:
        """What the next version's experts should lie by, given what all ranks measured since the last call."""
        self._loads_ME += loads_ME
        if (self._refreshes + 1) % self._every or not self._loads_ME.any():
            return self.served
        return place(self._loads_ME, self._sizes)

    def accept(self, proposed: list[Placement]) -> None:
        """All ranks serve the version that was laid out by `proposed`. A version that was refused is not accepted."""
        self._refreshes += 1
        if proposed is self.served:
            return
        self.in_order, self.imbalance, self.promised = map(self._mean, (self._plain, self.served, proposed))
        self.served = proposed
        self.placed += 1
        self._loads_ME.zero_()

    def _mean(self, placements: Sequence[Placement]) -> float:
        return fmean(imbalance(loads_E, of) for loads_E, of in zip(self._loads_ME, placements, strict=True))
