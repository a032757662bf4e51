"""The definition of dispatch: plain loops over experts, tokens and choices.

Every other form must equal this one. It reads values on the host and is slow on purpose. Rows of one expert come in
token order. Shape letters as in `base`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from contraflow.dispatch.base import Dispatch, Rows, check_pairs, check_rows
from contraflow.errors import DispatchError


@dataclass(slots=True)
class Visits:
    """Which token each row came from."""

    tokens: list[int]
    total: int
    used: bool = False


class ReferenceDispatch(Dispatch[Visits]):
    """One rank holding all experts. Invariant: a handle is combined at most once."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Rows[Visits]:
        """See `Dispatch.dispatch`; also refuses expert ids out of range, which the fast forms cannot see."""
        check_pairs(x_TD, expert_ids_TK, weights_TK)
        ids = expert_ids_TK.tolist()
        stray = sorted({e for row in ids for e in row if not -1 <= e < self.num_experts})
        if stray:
            raise DispatchError(f"expert ids {stray} are not in [-1, {self.num_experts})")
        tokens, weights, counts = [], [], [0] * self.num_experts
        for expert in range(self.num_experts):
            for token, row in enumerate(ids):
                for choice, chosen in enumerate(row):
                    if chosen == expert:
                        tokens.append(token)
                        weights.append(weights_TK[token, choice])
                        counts[expert] += 1
        return Rows(
            x_RD=torch.stack([x_TD[t] for t in tokens]) if tokens else x_TD[:0],
            weights_R=torch.stack(weights) if weights else weights_TK.reshape(-1)[:0],
            ends_E=torch.tensor(counts, dtype=torch.int32, device=x_TD.device).cumsum(0, dtype=torch.int32),
            handle=Visits(tokens, total=x_TD.shape[0]),
        )

    def combine(self, y_RD: Tensor, handle: Visits) -> Tensor:
        """See `Dispatch.combine`."""
        if handle.used:
            raise DispatchError("this dispatch handle was combined before; dispatch again")
        check_rows(y_RD, len(handle.tokens))
        handle.used = True
        tokens = torch.tensor(handle.tokens, dtype=torch.int64, device=y_RD.device)
        return y_RD.new_zeros(handle.total, y_RD.shape[1]).index_add(0, tokens, y_RD)
