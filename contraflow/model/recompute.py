"""Activations computed again in the backward pass: memory of one layer instead of all, for one more forward pass.

Takes a layer and its inputs, gives its output. A router's choices are kept from the first pass and taken again in the
second, so that a dispatch is repeated with the very same counts: rounding or noise must not send a token elsewhere, and
ranks that exchange must not disagree on how much. Does not keep a layer's intermediate results.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from contraflow.model.attention import LayerPlan
from contraflow.model.rotary import Rotation
from contraflow.model.router import RouterTape


class Replay:
    """One layer's routing over both passes. Invariant: the tape hears of the first pass, and only of it."""

    def __init__(self, tape: RouterTape | None) -> None:
        self._tape = tape
        self._ids_TK: Tensor | None = None

    @property
    def free(self) -> bool:
        """See `Tape.free`."""
        return self._ids_TK is None and (self._tape is None or self._tape.free)

    def take(self, choose: Callable[[], Tensor]) -> Tensor:
        """See `Tape.take`."""
        if self._ids_TK is not None:
            return self._ids_TK
        return choose() if self._tape is None else self._tape.take(choose)

    def record(self, ids_TK: Tensor, logits_TE: Tensor) -> None:
        """See `Tape.record`."""
        if self._ids_TK is None:
            self._ids_TK = ids_TK
            if self._tape is not None:
                self._tape.record(ids_TK, logits_TE)


def recomputed(layer: nn.Module, x_TD: Tensor, turn: Rotation, plan: LayerPlan, tape: RouterTape | None) -> Tensor:
    """`layer(x_TD, turn, plan, tape)`, keeping its inputs only.

    No random state is kept: the decoder draws nothing. The second pass runs to its end even where its last exchange is
    not needed, for whether it is may differ between ranks, and an exchange that some ranks leave out never ends.
    """
    out_TD: Tensor = checkpoint(
        layer, x_TD, turn, plan, Replay(tape), use_reentrant=False, preserve_rng_state=False, early_stop=False
    )
    return out_TD
