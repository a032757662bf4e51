"""The seam that carries tokens to their experts and back.

Takes token rows and the experts a router chose, gives one row per (token, expert) sorted by expert, and sums the
experts' answers back per token. Does not: choose experts, run them, or apply router weights.

Shape letters: T tokens, K experts per token, E experts held here, R rows given to them, D model width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from contraflow.errors import DispatchError

H = TypeVar("H")
Phase = Literal["train", "prefill", "decode"]  # what a pass is part of: how large it is, and what it costs to be late


@dataclass(frozen=True, slots=True)
class Rows(Generic[H]):
    """What the experts of this rank work on.

    Expert e has rows `[ends_E[e - 1], ends_E[e])`. Rows past the last end (fixed-capacity forms only) hold arbitrary
    finite values and weight 0. `handle` belongs to the dispatch that made it and is good for one `combine`.
    """

    x_RD: Tensor
    weights_R: Tensor  # fp32; the caller multiplies the experts' answers by it
    ends_E: Tensor  # int32, on the device of x: what a grouped matmul takes
    handle: H

    @property
    def counts_E(self) -> Tensor:
        """Rows of each expert, int32 `[E]`."""
        return self.ends_E.diff(prepend=self.ends_E.new_zeros(1))


Answer = Callable[[Rows[Any]], Tensor]  # the experts: rows in, their answers times `rows.weights_R` out, `[R, D]`


class Dispatch(Protocol[H]):
    """Carries tokens to experts and back. Differentiable in `x`, `weights` and `y`."""

    def enter(self, phase: Phase) -> None:
        """The passes from now on are of this phase. Only forms that differ by phase care."""
        return

    def mix(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, answer: Answer) -> Tensor:
        """Dispatch, experts and combine in one, `[T, D]`: forms that can do one while another runs have their own."""
        rows = self.dispatch(x_TD, expert_ids_TK, weights_TK)
        return self.combine(answer(rows), rows.handle)

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Rows[H]:
        """Give every (token, expert) pair its row.

        Args: `x_TD` any float dtype; `expert_ids_TK` int64 in [-1, experts), -1 meaning no expert; `weights_TK` fp32.
        Raises: DispatchError when shapes or dtypes do not fit each other.
        """
        ...

    def combine(self, y_RD: Tensor, handle: H) -> Tensor:
        """Sum the rows of each token: `[T, D]`, zero where a token had no expert.

        Raises: DispatchError when the handle was used before, or `y_RD` has another number of rows than were given out.
        """
        ...


def check_pairs(x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> None:
    """Refuse inputs of `dispatch` that do not fit each other. Looks at shapes and dtypes only, never at values."""
    if x_TD.ndim != 2 or expert_ids_TK.ndim != 2 or expert_ids_TK.shape[0] != x_TD.shape[0]:
        raise DispatchError(
            f"x {list(x_TD.shape)} and expert ids {list(expert_ids_TK.shape)} must be [T, D] and [T, K] of one T"
        )
    if weights_TK.shape != expert_ids_TK.shape:
        raise DispatchError(
            f"weights {list(weights_TK.shape)} must have the shape of the expert ids {list(expert_ids_TK.shape)}"
        )
    if expert_ids_TK.dtype != torch.int64 or weights_TK.dtype != torch.float32:
        raise DispatchError(
            f"expert ids must be int64 and weights float32, not {expert_ids_TK.dtype} and {weights_TK.dtype}"
        )


def check_rows(y_RD: Tensor, rows: int) -> None:
    """Refuse expert answers that are not one per row given out."""
    if y_RD.ndim != 2 or y_RD.shape[0] != rows:
        raise DispatchError(f"combine got {list(y_RD.shape)}, but dispatch gave out {rows} rows")
