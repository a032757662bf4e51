"""One dispatch whose form follows the phase: large passes and small ones are best carried differently.

Takes a dispatch a phase; `enter` says which carries from now on. All ranks enter the same phases in the same order.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from contraflow.dispatch.base import Answer, Dispatch, Phase, Rows


@dataclass(slots=True)
class Leg:
    """The form that gave out the rows, and its handle: they come home by the same, whatever phase it is then."""

    form: Dispatch[Any]
    handle: Any


class Phased(Dispatch[Leg]):
    """See `Dispatch`."""

    def __init__(self, forms: Mapping[Phase, Dispatch[Any]]) -> None:
        """`forms` of every phase there will be; the first is entered."""
        self._forms = dict(forms)
        self._form = next(iter(self._forms.values()))

    def enter(self, phase: Phase) -> None:
        """See `Dispatch.enter`."""
        self._form = self._forms[phase]

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Rows[Leg]:
        """See `Dispatch.dispatch`."""
        rows = self._form.dispatch(x_TD, expert_ids_TK, weights_TK)
        return Rows(rows.x_RD, rows.weights_R, rows.ends_E, Leg(self._form, rows.handle))

    def mix(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, answer: Answer) -> Tensor:
        """See `Dispatch.mix`."""
        return self._form.mix(x_TD, expert_ids_TK, weights_TK, answer)

    def combine(self, y_RD: Tensor, handle: Leg) -> Tensor:
        """See `Dispatch.combine`."""
        return handle.form.combine(y_RD, handle.handle)
