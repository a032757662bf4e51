"""Dispatch on one rank that holds all experts: a sort by expert and two gathers.

Exact form (`capacity=None`): one row per chosen expert, so the number of rows depends on the data and is read on the
host. Fixed form (`capacity=C`): at most C rows and nothing read on the host, so it can run inside a CUDA graph; pairs
past C are lost and noted in `overflow`. Shape letters as in `base`; P = T*K pairs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contraflow.dispatch.base import Rows, check_pairs, check_rows
from contraflow.errors import DispatchError


@dataclass(slots=True)
class Places:
    """Where each row came from and where each pair went. `present_TK` is None when every pair has a row."""

    token_R: Tensor
    row_TK: Tensor
    present_TK: Tensor | None
    used: bool = False


class LocalDispatch:
    """All experts on this rank.

    Invariant: `overflow` is true if and only if some call since the last `check_overflow` had more pairs than rows.
    Expert ids are trusted to be in [-1, num_experts): looking at them would wait for the device.
    """

    def __init__(self, num_experts: int, capacity: int | None = None) -> None:
        if num_experts < 1 or (capacity is not None and capacity < 1):
            raise DispatchError(f"experts {num_experts} and capacity {capacity} must be at least 1")
        self.num_experts = num_experts
        self.capacity = capacity
        self._needed: Tensor | None = None  # most rows any call asked for

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Rows[Places]:
        """See `Dispatch.dispatch`. The fixed form gives min(capacity, T*K) rows."""
        check_pairs(x_TD, expert_ids_TK, weights_TK)
        pairs, experts = expert_ids_TK.numel(), self.num_experts
        # -1 becomes E, so pairs without an expert sort last. The sort is stable: rows of an expert keep token order.
        keys_P, pair_P = torch.sort(expert_ids_TK.reshape(-1).remainder(experts + 1), stable=True)
        ends_E = torch.searchsorted(keys_P, torch.arange(experts, device=keys_P.device), right=True, out_int32=True)
        rows = self._rows(ends_E[-1], pairs)
        pair_R = pair_P[:rows]
        row_P = torch.empty_like(pair_P).scatter_(0, pair_P, torch.arange(pairs, device=pair_P.device))
        weights_R = weights_TK.reshape(-1).index_select(0, pair_R)
        present_P = None
        if self.capacity is not None:
            ends_E = ends_E.clamp_max(rows)
            present_P = row_P < ends_E[-1]
            weights_R = torch.where(torch.arange(rows, device=pair_R.device) < ends_E[-1], weights_R, 0.0)
        elif rows < pairs:
            present_P = row_P < rows
        if present_P is not None:
            row_P = torch.where(present_P, row_P, 0)
        shape = expert_ids_TK.shape
        places = Places(
            token_R=pair_R // shape[1] if shape[1] > 1 else pair_R,
            row_TK=row_P.view(shape),
            present_TK=None if present_P is None else present_P.view(shape),
        )
        return Rows(_spread(x_TD, places), weights_R, ends_E, places)

    def combine(self, y_RD: Tensor, handle: Places) -> Tensor:
        """See `Dispatch.combine`."""
        if handle.used:
            raise DispatchError("this dispatch handle was combined before; dispatch again")
        check_rows(y_RD, handle.token_R.shape[0])
        handle.used = True
        return _gather(y_RD, handle)

    @property
    def overflow(self) -> Tensor:
        """Bool `[]` on the device: pairs were lost since the last `check_overflow`."""
        if self._needed is None or self.capacity is None:
            return torch.zeros((), dtype=torch.bool)
        return self._needed > self.capacity

    def check_overflow(self) -> None:
        """Raise DispatchError if pairs were lost since the last look, and start anew. Waits for the device."""
        if self._needed is None or self.capacity is None:
            return
        needed = int(self._needed)
        self._needed.zero_()
        if needed > self.capacity:
            raise DispatchError(
                f"experts were given {needed} rows, but capacity is {self.capacity}: {needed - self.capacity} were "
                "lost; raise the capacity to tokens * experts per token"
            )

    def _rows(self, total: Tensor, pairs: int) -> int:
        if self.capacity is None:
            return int(total)
        if self._needed is None:
            with torch.inference_mode(False):  # it outlives the call, so it must be an ordinary tensor
                self._needed = torch.zeros((), dtype=torch.int32, device=total.device)
        torch.maximum(self._needed, total, out=self._needed)
        return min(self.capacity, pairs)


def _spread(x_TD: Tensor, places: Places) -> Tensor:
    if not x_TD.requires_grad:  # generation: an autograd function costs more than its work on a few tokens
        return x_TD.index_select(0, places.token_R)
    rows: Tensor = _Spread.apply(x_TD, places.token_R, places.row_TK, places.present_TK)  # type: ignore[no-untyped-call]
    return rows


def _gather(y_RD: Tensor, places: Places) -> Tensor:
    if not y_RD.requires_grad:
        return _sum_rows(y_RD, places.row_TK, places.present_TK)
    sums: Tensor = _Gather.apply(y_RD, places.token_R, places.row_TK, places.present_TK)  # type: ignore[no-untyped-call]
    return sums


class _Spread(torch.autograd.Function):
    """Copy tokens to rows. Its backward is `_Gather`'s forward, which no atomic addition makes random on a GPU."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_R: Tensor, row_TK: Tensor, present_TK: Tensor | None) -> Tensor:
        ctx.save_for_backward(row_TK, present_TK)
        return x_TD.index_select(0, token_R)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None, None]:
        row_TK, present_TK = ctx.saved_tensors
        return _sum_rows(grad_RD, row_TK, present_TK), None, None, None


class _Gather(torch.autograd.Function):
    """Sum the rows of each token. Its backward is `_Spread`'s forward; rows nobody owns get a zero gradient."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, token_R: Tensor, row_TK: Tensor, present_TK: Tensor | None) -> Tensor:
        ctx.save_for_backward(token_R, present_TK)
        return _sum_rows(y_RD, row_TK, present_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None, None]:
        token_R, present_TK = ctx.saved_tensors
        grad_RD = grad_TD.index_select(0, token_R)
        if present_TK is not None:
            owned = torch.arange(grad_RD.shape[0], device=grad_RD.device) < present_TK.sum()
            grad_RD = torch.where(owned[:, None], grad_RD, 0.0)
        return grad_RD, None, None, None


def _sum_rows(y_RD: Tensor, row_TK: Tensor, present_TK: Tensor | None) -> Tensor:
    tokens, choices = row_TK.shape
    if y_RD.shape[0] == 0:
        return y_RD.new_zeros(tokens, y_RD.shape[1])
    y_TKD = y_RD.index_select(0, row_TK.reshape(-1)).view(tokens, choices, -1)
    if present_TK is not None:  # where, not times: rows past the real ones may hold NaN after a grouped matmul
        y_TKD = torch.where(present_TK[..., None], y_TKD, 0.0)
    return y_TKD.sum(1)
