"""One hop of rows: each goes once to every destination that owns one of its experts, and the answers come home summed.

A hop has an exchange and a map from expert to destination. Rows are bytes here: what is in them is `wire.py`'s. Flat
expert parallelism is one hop over all ranks; two domains are two hops (`spread.py`).

Exact: as many rows as there are, one exchange of counts first. With a capacity: that many rows for every destination
whatever the routing, with no look at counts on the host, so that a step can run inside a CUDA graph; rows beyond it set
a flag and are never silently dropped (`Hop.check`).

Shape letters: N rows here, K experts of a row, S rows sent, M rows received, B bytes, P destinations, C capacity.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from contraflow.dispatch.exchange import Exchange
from contraflow.errors import DispatchError

TAG_BYTES = 8


@dataclass(frozen=True, slots=True)
class Trip:
    """Which row each sent copy is of (-1: padding), how many go to and come from each member, and of how many rows."""

    source_S: Tensor
    send: tuple[int, ...]
    receive: tuple[int, ...]
    rows: int


class Hop:
    """Collective over the members of `exchange`. `goal_E` int64: the member that expert e is sent to.

    Invariant: `out` and `home` of one trip move the same rows, in opposite directions.
    """

    def __init__(self, exchange: Exchange, goal_E: Tensor, capacity: int | None = None) -> None:
        self.exchange = exchange
        self.capacity = capacity
        self._goal_E = goal_E
        self._calls = 0
        self._needed: Tensor | None = None  # most rows for one destination that any call had
        self._strayed: Tensor | None = None  # whether rows of another call were received

    def plan(self, ids_NK: Tensor) -> Trip:
        """Who gets which rows of `ids_NK` (int64, -1 for none). Exact: waits for the counts of the others."""
        hit_PN = self._hits(ids_NK)
        if self.capacity is not None:
            return self._fixed(hit_PN, self.capacity)
        send = hit_PN.sum(1).tolist()
        receive = self.exchange.counts(send)
        source_S = hit_PN.nonzero()[:, 1]
        return Trip(source_S, tuple(send), tuple(receive), ids_NK.shape[0])

    def out(self, rows_NB: Tensor, trip: Trip) -> Callable[[], Tensor]:
        """Start sending each row's copies; call the result for the received ones, `[M, B]`, by source and then row."""
        if self.capacity is None:
            return self.exchange.begin(rows_NB.index_select(0, trip.source_S), trip.send, trip.receive)
        return self._tagged(self._copies(rows_NB, trip), trip.send, trip.receive)

    def home(self, rows_MB: Tensor, trip: Trip) -> Callable[[], Tensor]:
        """Start sending answers back to where their rows came from; call the result for one answer a copy, `[S, B]`."""
        if self.capacity is None:
            return self.exchange.begin(rows_MB, trip.receive, trip.send)
        return self._tagged(rows_MB, trip.receive, trip.send)

    def gather(self, values_SD: Tensor, trip: Trip) -> Tensor:
        """Sum the answers of each row's copies: `[N, D]`, fp32 or wider while adding."""
        wide = torch.promote_types(values_SD.dtype, torch.float32)
        sums_ND = torch.zeros(trip.rows + 1, values_SD.shape[1], dtype=wide, device=values_SD.device)
        places_S = trip.source_S if self.capacity is None else trip.source_S % (trip.rows + 1)  # padding: a spare row
        return sums_ND.index_add_(0, places_S, values_SD.to(wide))[:-1]

    def check(self) -> None:
        """Raise DispatchError if rows were lost, or other rows came, since the last look. Waits for the device."""
        if self._needed is None or self._strayed is None:
            return
        needed, strayed = int(self._needed), bool(self._strayed)
        self._needed, self._strayed = None, None
        if strayed:
            raise DispatchError(
                "rows of another exchange were received: a rank skipped or repeated a layer; every rank must take part "
                "in every exchange, with zero tokens if it has none"
            )
        if self.capacity is not None and needed > self.capacity:
            raise DispatchError(
                f"{needed} rows were for one destination, but capacity is {self.capacity}: {needed - self.capacity} "
                "were lost; raise the capacity to the most tokens of a rank"
            )

    def _hits(self, ids_NK: Tensor) -> Tensor:
        """Bool `[P, N]`: whether a destination owns one of a row's experts."""
        places = self.exchange.size
        if not self._goal_E.numel():
            return torch.zeros(places, ids_NK.shape[0], dtype=torch.bool, device=ids_NK.device)
        goal_NK = torch.where(ids_NK < 0, places, self._goal_E[ids_NK.clamp_min(0)])
        hit_NP = torch.zeros(ids_NK.shape[0], places + 1, dtype=torch.bool, device=ids_NK.device)
        return hit_NP.scatter_(1, goal_NK, True)[:, :-1].t()

    def _fixed(self, hit_PN: Tensor, capacity: int) -> Trip:
        places, rows = hit_PN.shape
        counts_P = hit_PN.sum(1)
        self._needed = counts_P.amax() if self._needed is None else torch.maximum(self._needed, counts_P.amax())
        rank_PN = hit_PN.cumsum(1) - 1
        fits_PN = hit_PN & (rank_PN < capacity)
        slot_PN = rank_PN + torch.arange(places, device=hit_PN.device)[:, None] * capacity
        spare = places * capacity
        source = torch.full((spare + 1,), -1, dtype=torch.int64, device=hit_PN.device)
        row_PN = torch.arange(rows, device=hit_PN.device).expand(places, rows)
        source.scatter_(0, torch.where(fits_PN, slot_PN, spare).reshape(-1), row_PN.reshape(-1))
        each = (capacity,) * places
        return Trip(source[:spare], each, each, rows)

    def _copies(self, rows_NB: Tensor, trip: Trip) -> Tensor:
        """Copies by destination; padding is zero bytes."""
        padded = torch.cat((rows_NB, rows_NB.new_zeros(1, rows_NB.shape[1])))
        return padded.index_select(0, trip.source_S % (trip.rows + 1))

    def _tagged(self, rows_SB: Tensor, send: Sequence[int], receive: Sequence[int]) -> Callable[[], Tensor]:
        """Exchange blocks of a fixed size, each under a row that holds the number of the call."""
        self._calls += 1
        places, capacity = self.exchange.size, send[0]
        width = max(rows_SB.shape[1], TAG_BYTES)
        block = rows_SB.new_zeros(places, capacity + 1, width)
        block[:, 1:, : rows_SB.shape[1]] = rows_SB.view(places, capacity, -1)
        block[:, 0, :TAG_BYTES] = torch.tensor([self._calls], device=rows_SB.device).view(torch.uint8)
        each = (capacity + 1,) * places
        waiting = self.exchange.begin(block.flatten(0, 1), each, each)
        expected = block[0, 0, :TAG_BYTES]

        def finish() -> Tensor:
            found = waiting().view(places, capacity + 1, width)
            strayed = (found[:, 0, :TAG_BYTES] != expected).any()
            self._strayed = strayed if self._strayed is None else self._strayed | strayed
            return found[:, 1:, : rows_SB.shape[1]].flatten(0, 1)

        return finish
