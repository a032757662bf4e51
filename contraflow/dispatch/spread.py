"""Dispatch to experts on other ranks: one hop over all ranks, or one across domains and one inside.

Each rank holds E/R neighbouring experts. A token's values travel once to each destination that owns one of its experts,
with its expert ids and weights; there a local dispatch sorts copies by expert. Answers are summed where they are made,
so one row a copy comes back, and are summed again at each hop on the way home, in fp32.

    per_expert     one row per (token, expert): what a plain all-to-all does
    all_to_all     one row per (token, rank)
    hierarchical   one row per (token, domain) across, then one per (token, rank) inside: first to the rank of the same
                   place in the other domain, which forwards it (DeepEP's and NCCL's rail rule)

Shape letters as in `base` and `hop`; X experts over all ranks, L experts held here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contraflow.dispatch import wire as w
from contraflow.dispatch.base import Dispatch, Rows, check_pairs
from contraflow.dispatch.exchange import Links, agree
from contraflow.dispatch.hop import Hop, Trip
from contraflow.dispatch.local import LocalDispatch, Places
from contraflow.errors import DispatchError


@dataclass(slots=True)
class Journey:
    """The hops that rows took, and their places in the local dispatch."""

    trips: tuple[Trip, ...]
    places: Places
    token_P: Tensor | None  # of each pair, when every pair travels by itself
    tokens: int
    used: bool = False


class SpreadDispatch(Dispatch[Journey]):
    """See `Dispatch`; collective over all ranks of `links`, forward and backward, tokens or none.

    Args: `experts` over all ranks; `wire` the precision of tokens on their way out; `max_tokens` the most tokens a rank
    may ever bring, the same on all; `capacity` the most rows for one destination of the first hop, None for the exact
    form. Raises: DispatchError when ranks were set up differently, or experts do not divide.
    """

    def __init__(
        self,
        links: Links,
        *,
        experts: int,
        kind: str,
        wire: w.Wire = "same",
        max_tokens: int | None = None,
        capacity: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        ranks = links.topology.ranks
        if experts < 1 or experts % ranks:
            raise DispatchError(f"{experts} experts cannot be shared out evenly among {ranks} ranks; give ep a divisor")
        if experts >= torch.iinfo(torch.int16).max:
            raise DispatchError(f"{experts} experts: their ids travel as int16, so at most {2**15 - 2}")
        agree(
            links,
            {"experts": experts, "dispatch": kind, "wire": wire, "max_tokens": max_tokens, "capacity": capacity,
             "domains": list(links.topology.domains)},
        )  # fmt: skip
        self.links = links
        self.kind = kind
        self.experts = experts
        self.held = experts // ranks
        self.wire: w.Wire = wire
        self.max_tokens = max_tokens
        self.hops = _hops(links, kind, experts, capacity, torch.device(device))
        self._local = LocalDispatch(self.held)

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Rows[Journey]:
        """See `Dispatch.dispatch`. On a CPU ids out of range are refused; on a GPU they are trusted."""
        self.check_inputs(x_TD, expert_ids_TK, weights_TK)
        tokens, token_P = x_TD.shape[0], None
        if self.kind == "per_expert":
            token_P, ids, weights = _pairs(expert_ids_TK, weights_TK)
            x = x_TD.index_select(0, token_P)
        else:
            x, ids, weights = x_TD, expert_ids_TK, weights_TK
        x_MD, weights_MK, ids_MK, trips = _Out.apply(x, weights, ids, self.hops, self.wire)  # type: ignore[no-untyped-call]
        rows = self.local_rows(x_MD, ids_MK, weights_MK)
        return Rows(rows.x_RD, rows.weights_R, rows.ends_E, Journey(trips, rows.handle, token_P, tokens))

    def combine(self, y_RD: Tensor, handle: Journey) -> Tensor:
        """See `Dispatch.combine`."""
        if handle.used:
            raise DispatchError("this dispatch handle was combined before; dispatch again")
        y_MD = self.local_sum(y_RD, handle.places)
        handle.used = True
        y_ND: Tensor = _Home.apply(y_MD, handle.trips, self.hops, w.back_wire(self.wire))  # type: ignore[no-untyped-call]
        if handle.token_P is None:
            return y_ND
        return y_ND.new_zeros(handle.tokens, y_ND.shape[1]).index_add(0, handle.token_P, y_ND)

    def check(self) -> None:
        """Raise DispatchError if a fixed-capacity call lost rows since the last look. Waits for the device."""
        for hop in self.hops:
            hop.check()

    def close(self) -> None:
        """Let go of what was opened; never waits for other ranks."""
        self.links.close()

    def local_rows(self, x_MD: Tensor, ids_MK: Tensor, weights_MK: Tensor) -> Rows[Places]:
        """Copies that have arrived, sorted by the experts held here; ids of other ranks' experts count as none."""
        first = self.links.rank * self.held
        mine_MK = torch.where((ids_MK >= first) & (ids_MK < first + self.held), ids_MK - first, -1)
        return self._local.dispatch(x_MD, mine_MK, weights_MK)

    def local_sum(self, y_RD: Tensor, places: Places) -> Tensor:
        """Answers of the experts held here, summed for each copy that had arrived."""
        return self._local.combine(y_RD, places)

    def check_inputs(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        """Raise DispatchError, before anything is sent, for what cannot be dispatched."""
        check_pairs(x_TD, ids_TK, weights_TK)
        tokens = ids_TK.shape[0]
        if self.max_tokens is not None and tokens > self.max_tokens:
            raise DispatchError(
                f"{tokens} tokens, but the group agreed on at most {self.max_tokens}; raise max_tokens on every rank"
            )
        if ids_TK.numel() and not ids_TK.is_cuda:
            low, high = ids_TK.aminmax()
            if low < -1 or high >= self.experts:
                stray = int(low) if low < -1 else int(high)
                raise DispatchError(f"expert id {stray} is not in [-1, {self.experts})")


def _hops(links: Links, kind: str, experts: int, capacity: int | None, device: torch.device) -> tuple[Hop, ...]:
    topology = links.topology
    owner_E = torch.arange(experts, device=device) // (experts // topology.ranks)
    if kind in ("per_expert", "all_to_all"):
        return (Hop(links.exchange(range(topology.ranks)), owner_E, capacity),)
    if kind != "hierarchical":
        raise DispatchError(f"dispatch {kind!r} is not known; per_expert, all_to_all and hierarchical are")
    grid = topology.grid()
    domain = topology.domains[links.rank]
    place = grid[domain].index(links.rank)
    # Made on every rank in the same order: first all that go across, then all inside.
    across = links.exchange([row[place] for row in grid])
    inside = links.exchange(grid[domain])
    domain_of = torch.tensor(topology.domains, device=device)
    place_of = torch.tensor([grid[d].index(r) for r, d in enumerate(topology.domains)], device=device)
    here_E = domain_of[owner_E] == domain
    # A row in hand may also name experts of other domains: those are no business of the inner hop.
    inner_goal_E = torch.where(here_E, place_of[owner_E], len(grid[domain]))
    inner = None if capacity is None else capacity * len(grid)
    return (Hop(across, domain_of[owner_E], capacity), Hop(inside, inner_goal_E, inner))


def _pairs(ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every (token, expert) pair as a token of its own: its token `[P]`, its id and its weight `[P, 1]`."""
    token_P, choice_P = (ids_TK >= 0).nonzero(as_tuple=True)
    return token_P, ids_TK[token_P, choice_P, None], weights_TK[token_P, choice_P, None]


class _Out(torch.autograd.Function):
    """Rows out over all hops. Backward: gradients of rows and weights home, summed at each hop."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weights_NK: Tensor, ids_NK: Tensor, hops: Sequence[Hop], wire: w.Wire
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Trip, ...]]:
        dim, choices = x_ND.shape[1], ids_NK.shape[1]
        rows_NB = torch.cat((w.encode(x_ND, wire), w.encode_meta(ids_NK, weights_NK)), 1)
        meta = w.value_bytes(dim, wire, x_ND.dtype)
        trips = []
        for hop in hops:
            trip = hop.plan(ids_NK)
            rows_NB = hop.out(rows_NB, trip)()
            ids_NK, weights_NK = w.decode_meta(rows_NB[:, meta:], choices)
            trips.append(trip)
        ctx.hops, ctx.trips, ctx.wire, ctx.dtype = hops, tuple(trips), w.back_wire(wire), x_ND.dtype
        x_MD = w.decode(rows_NB[:, :meta], wire, dim, x_ND.dtype)
        ctx.mark_non_differentiable(ids_NK)
        return x_MD, weights_NK, ids_NK, ctx.trips

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor, grad_MK: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        grad_ND, grad_NK = _sum_home(ctx.hops, ctx.trips, grad_MD, grad_MK, ctx.wire)
        return grad_ND, grad_NK, None, None, None


class _Home(torch.autograd.Function):
    """Answers home over all hops, summed at each. Backward: the gradient out to every copy."""

    @staticmethod
    def forward(ctx: Any, y_MD: Tensor, trips: Sequence[Trip], hops: Sequence[Hop], wire: w.Wire) -> Tensor:
        ctx.hops, ctx.trips, ctx.wire = hops, trips, wire
        return _sum_home(hops, trips, y_MD, y_MD.new_empty(y_MD.shape[0], 0, dtype=torch.float32), wire)[0]

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        dim, dtype = grad_ND.shape[1], grad_ND.dtype
        rows_NB = w.encode(grad_ND, ctx.wire)
        for hop, trip in zip(ctx.hops, ctx.trips, strict=True):
            rows_NB = hop.out(rows_NB, trip)()
        return w.decode(rows_NB, ctx.wire, dim, dtype), None, None, None


def _sum_home(
    hops: Sequence[Hop], trips: Sequence[Trip], values_MD: Tensor, extra_MK: Tensor, wire: w.Wire
) -> tuple[Tensor, Tensor]:
    """Values (in `wire` precision) and fp32 extras back over the hops, last first; each row's copies summed."""
    dim, dtype = values_MD.shape[1], values_MD.dtype
    split = w.value_bytes(dim, wire, dtype)
    for hop, trip in zip(reversed(hops), reversed(trips), strict=True):
        rows_MB = torch.cat((w.encode(values_MD, wire), w.as_bytes(extra_MK)), 1)
        rows_SB = hop.home(rows_MB, trip)()
        values_MD = hop.gather(w.decode(rows_SB[:, :split], wire, dim, dtype), trip).to(dtype)
        extra_MK = hop.gather(w.from_bytes(rows_SB[:, split:], torch.float32), trip)
    return values_MD, extra_MK
