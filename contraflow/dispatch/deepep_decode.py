"""Dispatch by DeepEP's low-latency mode: for decoding, few tokens a rank, no gradients, no look at counts on the host.

Every (token, expert) travels by itself into a fixed place, so rows are of a fixed number; a local dispatch brings those
that came together. The library applies the weights at home, so those of the rows are 1 (0 past the last end).

Shape letters as in `base`; L experts held here, C places of an expert, H width that the library takes, M = L*C.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contraflow.dispatch import deepep_library as library
from contraflow.dispatch import wire as w
from contraflow.dispatch.base import Dispatch, Rows
from contraflow.dispatch.deepep import Adapter, as_bf16, check_answers, merge_repeats, plain
from contraflow.dispatch.exchange import Links
from contraflow.dispatch.local import LocalDispatch, Places
from contraflow.errors import DispatchError

OUTSTANDING = 2  # dispatches that may wait for their combine: the library has two buffers


@dataclass(slots=True, eq=False, weakref_slot=True)
class DecodeFlight:
    """The library's handle, what it needs at home, and the places in the local dispatch."""

    port: library.LowLatencyPort
    handle: Any
    ids_TK: Tensor
    weights_TK: Tensor
    places: Places
    dim: int
    width: int
    used: bool = False


class DeepEPDecode(Adapter, Dispatch[DecodeFlight]):
    """See `Dispatch`; collective over all ranks of `links`, tokens or none. Takes and raises as `DeepEPDispatch`."""

    def __init__(self, links: Links, *, experts: int, max_tokens: int | None, wire: w.Wire = "same") -> None:
        super().__init__(links, experts=experts, max_tokens=max_tokens, wire=wire, low_latency=True, fixed=True)
        self._port: library.LowLatencyPort | None = None
        self._flights = weakref.WeakSet[DecodeFlight]()

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Rows[DecodeFlight]:
        """See `Dispatch.dispatch`."""
        width = self._admit(x_TD, expert_ids_TK, weights_TK, library.LOW_LATENCY_CHOICES)
        if torch.is_grad_enabled() and (x_TD.requires_grad or weights_TK.requires_grad):
            raise DispatchError("low latency has no gradients; use kind deepep, or torch.no_grad()")
        if sum(not flight.used for flight in self._flights) >= OUTSTANDING:
            raise DispatchError(f"{OUTSTANDING} dispatches of low latency wait for their combine; combine one first")
        if self._port is None:
            self._port = library.LowLatencyPort(
                self._module, self.links.group, experts=self.experts, width=width, max_tokens=self.max_tokens
            )
        ids_TK, weights_TK = merge_repeats(expert_ids_TK, weights_TK)
        x, counts_L, handle = self._port.out(as_bf16(x_TD, width), ids_TK.contiguous(), fp8=self.wire == "fp8")
        most = self.links.topology.ranks * self.max_tokens * min(ids_TK.shape[1], self.held)
        rows = together(plain(x, x_TD.dtype)[..., : x_TD.shape[1]], counts_L, most)
        flight = DecodeFlight(self._port, handle, ids_TK, weights_TK, rows.handle, x_TD.shape[1], width)
        self._flights.add(flight)
        return Rows(rows.x_RD, rows.weights_R, rows.ends_E, flight)

    def combine(self, y_RD: Tensor, handle: DecodeFlight) -> Tensor:
        """See `Dispatch.combine`."""
        if handle.used:
            raise DispatchError("this dispatch handle was combined before; dispatch again")
        check_answers(y_RD, handle.dim, self.wire)
        y_MD = LocalDispatch(self.held).combine(y_RD, handle.places)
        handle.used = True
        y_LCH = as_bf16(y_MD, handle.width).view(self.held, -1, handle.width)
        y_TH = handle.port.home(y_LCH, handle.ids_TK, handle.weights_TK, handle.handle)
        return y_TH[:, : handle.dim].to(y_RD.dtype)

    def check(self) -> None:
        """Nothing is ever lost: there is room for all that may come."""

    def close(self) -> None:
        """As `DeepEPDispatch.close`."""
        if self._port is not None:
            self._port.close()
            self._port, self._opened_for = None, None


def together(x_LCD: Tensor, counts_L: Tensor, most: int) -> Rows[Places]:
    """Rows of the first `counts_L[l]` places of each expert, expert by expert; `most` is the most there can be.

    Rows past the last end are zeros: places that nothing came to hold what was there before, which may be NaN.
    """
    held, places = x_LCD.shape[:2]
    came_LC = torch.arange(places, device=x_LCD.device) < counts_L[:, None]
    ids_M = torch.where(came_LC, torch.arange(held, device=x_LCD.device)[:, None], -1).view(-1, 1)
    ones_M = torch.ones(ids_M.shape, device=x_LCD.device)
    rows = LocalDispatch(held, most).dispatch(x_LCD.flatten(0, 1), ids_M, ones_M)
    real_R = torch.arange(rows.x_RD.shape[0], device=x_LCD.device) < rows.ends_E[-1]
    return Rows(torch.where(real_R[:, None], rows.x_RD, 0.0), rows.weights_R, rows.ends_E, rows.handle)
