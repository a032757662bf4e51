"""Two-domain dispatch whose slow hop runs while experts work: for generation, where nothing is differentiated.

Tokens are cut into pieces. All pieces set out across domains at once; while they travel, the rank serves the tokens of
its own domain, then each piece as it arrives, and its answers travel home while the next piece is served. The link is
busy from the first byte to the last, and the experts' time hides behind it.

Shape letters as in `base`; N rows here.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from contraflow.dispatch import wire as w
from contraflow.dispatch.base import Answer, Dispatch, Rows
from contraflow.dispatch.hop import Hop, Trip
from contraflow.dispatch.spread import Journey, SpreadDispatch
from contraflow.errors import DispatchError


class OverlapDispatch(Dispatch[Journey]):
    """A hierarchical `SpreadDispatch`, and beside it `mix`, which does dispatch, experts and combine in one.

    Invariant: `mix` equals `combine(answer(dispatch(...)))` up to the order of additions.
    """

    def __init__(self, spread: SpreadDispatch, *, pieces: int = 2) -> None:
        if spread.kind != "hierarchical" or any(hop.capacity is not None for hop in spread.hops):
            raise DispatchError(f"only an exact hierarchical dispatch overlaps its hops, not {spread.kind!r}")
        self.spread = spread
        self._pieces = pieces
        self._across, self._inside = spread.hops
        topology, rank = spread.links.topology, spread.links.rank
        per_rank = spread.experts // topology.ranks
        own = [domain == topology.domains[rank] for domain in topology.domains]
        self._own_E = torch.tensor(own).repeat_interleave(per_rank)

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Rows[Journey]:
        """See `Dispatch.dispatch`."""
        return self.spread.dispatch(x_TD, expert_ids_TK, weights_TK)

    def combine(self, y_RD: Tensor, handle: Journey) -> Tensor:
        """See `Dispatch.combine`."""
        return self.spread.combine(y_RD, handle)

    def mix(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, answer: Answer) -> Tensor:
        """See `Dispatch.mix`. Overlapped where nothing is differentiated."""
        if torch.is_grad_enabled():
            return super().mix(x_TD, expert_ids_TK, weights_TK, answer)
        self.spread.check_inputs(x_TD, expert_ids_TK, weights_TK)
        own_TK = (expert_ids_TK >= 0) & self._own_E[expert_ids_TK.clamp_min(0)]
        near_TK, far_TK = torch.where(own_TK, expert_ids_TK, -1), torch.where(own_TK, -1, expert_ids_TK)
        values_TB = w.encode(x_TD, self.spread.wire)
        far_TB = torch.cat((values_TB, w.encode_meta(far_TK, weights_TK)), 1)
        near_TB = torch.cat((values_TB, w.encode_meta(near_TK, weights_TK)), 1)
        # All counts before any rows: behind rows they would wait for the slow link to clear.
        far_pieces = far_TB.tensor_split(self._pieces)
        trips = [self._across.plan(ids) for ids in far_TK.tensor_split(self._pieces)]
        arriving = [self._across.out(rows, trip) for rows, trip in zip(far_pieces, trips, strict=True)]
        near = self._serve(near_TB, x_TD, expert_ids_TK.shape[1], answer)
        leaving = []
        for arrival, trip in zip(arriving, trips, strict=True):
            partial_MD = self._serve(arrival(), x_TD, expert_ids_TK.shape[1], answer)
            leaving.append(self._across.home(w.encode(partial_MD, w.back_wire(self.spread.wire)), trip))
        far = [self._home(departure, trip, x_TD) for departure, trip in zip(leaving, trips, strict=True)]
        return near.add_(torch.cat(far))

    def _serve(self, rows_NB: Tensor, like: Tensor, choices: int, answer: Answer) -> Tensor:
        """Rows to the ranks of this domain, their experts' answers, and back: the sum for each row, `[N, D]`."""
        dim, dtype, wire = like.shape[1], like.dtype, self.spread.wire
        split = w.value_bytes(dim, wire, dtype)
        trip = self._inside.plan(w.decode_meta(rows_NB[:, split:], choices)[0])
        arrived = self._inside.out(rows_NB, trip)()
        ids_MK, weights_MK = w.decode_meta(arrived[:, split:], choices)
        rows = self.spread.local_rows(w.decode(arrived[:, :split], wire, dim, dtype), ids_MK, weights_MK)
        answers_MD = self.spread.local_sum(answer(rows), rows.handle)
        return self._home(self._inside.home(w.encode(answers_MD, w.back_wire(wire)), trip), trip, like, self._inside)

    def _home(self, departure: Callable[[], Tensor], trip: Trip, like: Tensor, hop: Hop | None = None) -> Tensor:
        values_SD = w.decode(departure(), w.back_wire(self.spread.wire), like.shape[1], like.dtype)
        return (hop or self._across).gather(values_SD, trip).to(like.dtype)
