"""A dispatch whose experts lie where a placement put them, some of them several times.

Takes tokens with logical expert ids, hands them to a dispatch of physical slots, and counts what each logical expert
was given: what the next placement is made from. Routers, tapes and recorded routes see logical ids only. Shape letters
as in `placement` and `base`.
"""

import torch
from torch import Tensor

from contraflow.dispatch.base import Answer, Dispatch, H, Phase, Rows, check_pairs
from contraflow.dispatch.placement import Table, to_slots
from contraflow.errors import DispatchError


class Placed(Dispatch[H]):
    """One layer's dispatch. `rows.ends_E` counts slots, so the experts' weights must lie slot by slot.

    Args: `inner` carries to slots, as many as the placement has; `turn` the number of this rank; `device` that of the
    ids. `table` here is a copy, and its storage never moves: whoever writes to it, as a CUDA graph finds it, sends
    tokens elsewhere from then on. That must be at the same moment as the weights come to lie so, between two passes.
    Invariant: `loads_E` is the number of pairs each logical expert was given since `take_loads`.
    """

    def __init__(self, inner: Dispatch[H], table: Table, *, turn: int = 0, device: torch.device | str = "cpu") -> None:
        self._inner = inner
        self.table = Table(table.slots_EC.to(device, copy=True), table.replicas_E.to(device, copy=True))
        self._turn = turn
        self.loads_E = torch.zeros_like(self.table.replicas_E)

    def take_loads(self) -> Tensor:
        """Pairs of each logical expert since the last call, int64 `[E]`; counting starts anew."""
        taken = self.loads_E.clone()
        self.loads_E.zero_()
        return taken

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Rows[H]:
        """See `Dispatch.dispatch`; rows are sorted by slot. On a CPU ids out of range are refused."""
        return self._inner.dispatch(x_TD, self._slots(x_TD, expert_ids_TK, weights_TK), weights_TK)

    def mix(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, answer: Answer) -> Tensor:
        """See `Dispatch.mix`; as the inner one does it."""
        return self._inner.mix(x_TD, self._slots(x_TD, expert_ids_TK, weights_TK), weights_TK, answer)

    def combine(self, y_RD: Tensor, handle: H) -> Tensor:
        """See `Dispatch.combine`."""
        return self._inner.combine(y_RD, handle)

    def enter(self, phase: Phase) -> None:
        """See `Dispatch.enter`."""
        self._inner.enter(phase)

    def _slots(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        check_pairs(x_TD, expert_ids_TK, weights_TK)
        ids_N = expert_ids_TK.reshape(-1)
        if len(ids_N) and not ids_N.is_cuda:
            self._check_ids(*ids_N.aminmax())
        self.loads_E.scatter_add_(0, ids_N.clamp_min(0), (ids_N >= 0).to(torch.int64))
        return to_slots(expert_ids_TK, self.table, turn=self._turn)

    def _check_ids(self, low: Tensor, high: Tensor) -> None:
        experts = len(self.loads_E)
        if low < -1 or high >= experts:
            stray = int(low) if low < -1 else int(high)
            raise DispatchError(f"expert id {stray} is not in [-1, {experts}), the logical experts")
