"""Dispatch on one rank that holds all experts: a sort by expert, a gather out and a sum back.

On a CPU, without a capacity, there is one row per chosen expert; their number depends on the data and is read. With a
capacity, and always on a GPU, the number of rows follows from shapes alone and nothing is read on the host, so that it
can run inside a CUDA graph. Shape letters as in `base`; P = T*K pairs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contraflow.compiled import compiled
from contraflow.dispatch.base import Dispatch, Rows, check_pairs, check_rows
from contraflow.errors import DispatchError


@dataclass(slots=True)
class Places:
    """Where each row came from; and, when rows are of a fixed number, where each pair went and whether it is there."""

    token_R: Tensor
    tokens: int
    row_TK: Tensor | None = None
    present_TK: Tensor | None = None
    used: bool = False


class LocalDispatch(Dispatch[Places]):
    """All experts on this rank; `capacity` is the most rows of a call, None for as many as there are pairs.

    Invariant: `overflow` is true if and only if some call since the last `check_overflow` had more pairs than capacity.
    Expert ids are trusted to be in [-1, num_experts): looking at them would wait for the device.
    """

    def __init__(self, num_experts: int, capacity: int | None = None) -> None:
        if num_experts < 1 or (capacity is not None and capacity < 1):
            raise DispatchError(f"experts {num_experts} and capacity {capacity} must be at least 1")
        self.num_experts = num_experts
        self.capacity = capacity
        self.fuse = False  # compile the fixed form's passes over rows: one for a sum, one for its gradient
        self._experts_E = torch.arange(num_experts)
        self._needed: Tensor | None = None  # most rows any call asked for

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Rows[Places]:
        """See `Dispatch.dispatch`. Rows are min(capacity, T*K) where their number is fixed."""
        check_pairs(x_TD, expert_ids_TK, weights_TK)
        if self.capacity is not None or x_TD.is_cuda:
            return self._fixed(x_TD, expert_ids_TK, weights_TK)
        tokens, choices = expert_ids_TK.shape
        # The sort is stable: rows of an expert keep token order. Pairs without an expert (-1) come first, and are cut.
        keys_P, pair_R = expert_ids_TK.reshape(-1).sort(stable=True)
        ends_E = torch.searchsorted(keys_P, self._experts_E, right=True, out_int32=True)
        if tokens * choices and keys_P[0].item() < 0:
            absent = int((keys_P < 0).sum())
            pair_R, ends_E = pair_R[absent:], ends_E - absent
        token_R = torch.floor_divide(pair_R, choices) if choices > 1 else pair_R
        weights_R = weights_TK.reshape(-1).index_select(0, pair_R)
        return Rows(x_TD.index_select(0, token_R), weights_R, ends_E, Places(token_R, tokens))

    def _fixed(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Rows[Places]:
        (tokens, choices), pairs = expert_ids_TK.shape, expert_ids_TK.numel()
        experts, device = self.num_experts, x_TD.device
        # -1 becomes E, so that pairs without an expert sort last. A GPU sorts short keys in fewer passes.
        short = torch.int16 if experts < 1 << 15 else torch.int64
        keys_P, pair_P = expert_ids_TK.reshape(-1).remainder(experts + 1).to(short).sort(stable=True)
        bounds_E = torch.arange(experts, dtype=short, device=device)
        ends_E = torch.searchsorted(keys_P, bounds_E, right=True, out_int32=True)
        rows = pairs
        if self.capacity is not None:
            self._note(ends_E[-1])
            rows = min(self.capacity, pairs)
            ends_E = ends_E.clamp_max(rows)
        row_P = torch.empty_like(pair_P).scatter_(0, pair_P, torch.arange(pairs, device=device))
        present_P = row_P < ends_E[-1]
        token_R = pair_P[:rows] // max(choices, 1)
        weights_R = weights_TK.reshape(-1).index_select(0, pair_P[:rows])
        weights_R = torch.where(torch.arange(rows, device=device) < ends_E[-1], weights_R, 0.0)
        row_TK, present_TK = torch.where(present_P, row_P, 0).view(tokens, choices), present_P.view(tokens, choices)
        x_RD = _Spread.apply(x_TD, token_R, row_TK, present_TK, self.fuse)  # type: ignore[no-untyped-call]
        return Rows(x_RD, weights_R, ends_E, Places(token_R, tokens, row_TK, present_TK))

    def combine(self, y_RD: Tensor, handle: Places) -> Tensor:
        """See `Dispatch.combine`."""
        if handle.used:
            raise DispatchError("this dispatch handle was combined before; dispatch again")
        check_rows(y_RD, handle.token_R.shape[0])
        handle.used = True
        if handle.row_TK is None:
            return y_RD.new_zeros(handle.tokens, y_RD.shape[1]).index_add_(0, handle.token_R, y_RD)
        sums: Tensor = _Gather.apply(y_RD, handle.token_R, handle.row_TK, handle.present_TK, self.fuse)  # type: ignore[no-untyped-call]
        return sums

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

    def _note(self, total: Tensor) -> None:
        if self._needed is None:
            with torch.inference_mode(False):  # it outlives the call, so it must be an ordinary tensor
                self._needed = torch.zeros_like(total, dtype=torch.int64)
        torch.maximum(self._needed, total, out=self._needed)


class _Spread(torch.autograd.Function):
    """Copy tokens to rows. Its backward is `_Gather`'s forward, which no atomic addition makes random on a GPU."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_R: Tensor, row_TK: Tensor, present_TK: Tensor, fuse: bool) -> Tensor:
        ctx.save_for_backward(row_TK, present_TK)
        ctx.fuse = fuse
        return x_TD.index_select(0, token_R)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        return (compiled(_added_rows) if ctx.fuse else _sum_rows)(grad_RD, *ctx.saved_tensors), None, None, None, None


class _Gather(torch.autograd.Function):
    """Sum the rows of each token. Its backward is `_Spread`'s forward; rows nobody owns get a zero gradient."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, token_R: Tensor, row_TK: Tensor, present_TK: Tensor, fuse: bool) -> Tensor:
        ctx.save_for_backward(token_R, present_TK)
        ctx.fuse = fuse
        return (compiled(_added_rows) if fuse else _sum_rows)(y_RD, row_TK, present_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        return compiled(_owned_rows, ctx.fuse)(grad_TD, *ctx.saved_tensors), None, None, None, None


def _owned_rows(grad_TD: Tensor, token_R: Tensor, present_TK: Tensor) -> Tensor:
    owned_R = torch.arange(token_R.shape[0], device=token_R.device) < present_TK.sum()
    return torch.where(owned_R[:, None], grad_TD.index_select(0, token_R), 0.0)


def _sum_rows(y_RD: Tensor, row_TK: Tensor, present_TK: Tensor) -> Tensor:
    tokens, choices = row_TK.shape
    if y_RD.shape[0] == 0:
        return y_RD.new_zeros(tokens, y_RD.shape[1])
    y_TKD = y_RD.index_select(0, row_TK.reshape(-1)).view(tokens, choices, -1)
    # where, not times: rows past the real ones may hold NaN after a grouped matmul
    return torch.where(present_TK[..., None], y_TKD, 0.0).sum(1)


def _added_rows(y_RD: Tensor, row_TK: Tensor, present_TK: Tensor) -> Tensor:
    # Choice by choice: as a reduction over so few, the compiler makes a kernel that takes five times as long.
    wide = torch.promote_types(y_RD.dtype, torch.float32)
    sum_TD = y_RD.new_zeros(row_TK.shape[0], y_RD.shape[1], dtype=wide)
    if y_RD.shape[0] == 0:
        return sum_TD.to(y_RD.dtype)
    for row_T, present_T in zip(row_TK.unbind(1), present_TK.unbind(1), strict=True):
        sum_TD = sum_TD + torch.where(present_T[:, None], y_RD.index_select(0, row_T), 0.0)
    return sum_TD.to(y_RD.dtype)
