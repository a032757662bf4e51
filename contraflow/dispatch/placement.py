"""Which rank holds which experts, and which of them more than once, so that no rank has much more to do than another.

Takes the tokens each expert was given, gives for each layer what every physical slot holds; says which replica a token
goes to; cuts a rank's slots out of whole tensors. Does not measure loads, and moves nothing between ranks.

The way is that of EPLB (DeepSeek 2025): the expert with most tokens a replica gets the next replica; then experts are
packed heaviest first, each onto the ranks with least to do that have a slot left (Graham 1969: longest processing time
first).

Shape letters: M MoE layers, E logical experts, R ranks, S slots of a rank, P = R*S slots (slot p is on rank p // S),
C replicas of an expert at most, T tokens, K experts per token, N = T*K pairs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import isfinite
from typing import Literal

import torch
from torch import Tensor

from contraflow.errors import DispatchError

Near = Literal["any", "domain", "rank"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How many slots there are, and where. `groups` are the router's expert groups: runs of E / groups experts."""

    experts: int
    ranks: int
    slots: int  # of a rank; those beyond experts / ranks hold replicas
    domain_ranks: int  # ranks joined by NVLink; they are numbered one after the other
    groups: int = 1

    def __post_init__(self) -> None:
        if min(self.experts, self.ranks, self.slots, self.domain_ranks, self.groups) < 1:
            raise DispatchError(f"{self!r}: every size must be at least 1")
        if self.ranks * self.slots < self.experts:
            raise DispatchError(
                f"{self.ranks} ranks of {self.slots} slots cannot hold {self.experts} experts: give each rank at least "
                f"{-(-self.experts // self.ranks)} slots"
            )
        if self.ranks % self.domain_ranks:
            raise DispatchError(f"domains of {self.domain_ranks} ranks do not divide {self.ranks} ranks")
        if self.experts % self.groups:
            raise DispatchError(f"{self.groups} groups do not divide {self.experts} experts")

    @property
    def domains(self) -> int:
        return self.ranks // self.domain_ranks

    @property
    def grouped(self) -> bool:
        """Whether each group is kept inside a domain: a router that picks few groups then reaches few domains."""
        return self.groups > 1 and self.groups % self.domains == 0

    @property
    def most_replicas(self) -> int:
        """C: no placement of these sizes has more replicas of an expert."""
        reach = self.domain_ranks if self.grouped else self.ranks
        return min(reach, self.ranks * self.slots - self.experts + 1)


@dataclass(frozen=True)
class Table:
    """Where one rank sends each logical expert's tokens. Shapes follow from the sizes alone, whatever the placement."""

    slots_EC: Tensor  # int64; -1 past the last replica
    replicas_E: Tensor  # int64, at least 1


@dataclass(frozen=True, eq=False)
class Placement:
    """What the slots of one layer hold. Invariant: each expert is in some slot, and on no rank twice."""

    sizes: Sizes
    experts_P: Tensor  # int64; -1 is an empty slot, which no token is sent to

    @property
    def replicas_E(self) -> Tensor:
        """How many slots hold each expert, int64."""
        held = self.experts_P[self.experts_P >= 0]
        return torch.bincount(held, minlength=self.sizes.experts)

    def on(self, rank: int) -> Tensor:
        """What the slots of `rank` hold: `[S]`."""
        return self.experts_P[rank * self.sizes.slots : (rank + 1) * self.sizes.slots]

    def table(self, rank: int, near: Near = "any") -> Table:
        """Where `rank` sends tokens: to all replicas alike, or to those in its domain or on itself where there are any.

        What is near costs no slow link, but `rank_loads` expects "any": a domain that sends more than others then
        loads its own replicas more. "rank" looks in the domain next.
        """
        slots: list[list[int]] = [[] for _ in range(self.sizes.experts)]
        for slot, expert in enumerate(self.experts_P.tolist()):
            if expert >= 0:
                slots[expert].append(slot)
        reach = {"any": (), "domain": (self.sizes.domain_ranks,), "rank": (1, self.sizes.domain_ranks)}[near]
        for ranks in reversed(reach):
            home, width = rank // ranks, ranks * self.sizes.slots
            slots = [[slot for slot in found if slot // width == home] or found for found in slots]
        most = self.sizes.most_replicas
        return Table(
            torch.tensor([found + [-1] * (most - len(found)) for found in slots]),
            torch.tensor([len(found) for found in slots]),
        )


def place(loads_ME: Tensor, sizes: Sizes) -> list[Placement]:
    """For each layer the placement that balances these loads, as far as the greedy way sees.

    Args: `loads_ME` tokens of each expert, any dtype, finite and not negative; all zero where nothing is known.
    A pure function: ranks that give it the same loads get the same placement. Never worse on `loads_ME` than
    `contiguous`, which it falls back to. Raises DispatchError for loads of another shape or out of range.
    """
    if loads_ME.ndim != 2 or loads_ME.shape[1] != sizes.experts:
        raise DispatchError(f"loads {list(loads_ME.shape)} must be [layers, {sizes.experts} experts]")
    rows = loads_ME.tolist()
    if not all(isfinite(load) and load >= 0 for row in rows for load in row):
        raise DispatchError("loads must be finite and not negative: they are counts of tokens")
    plain = contiguous(sizes)
    found = []
    for row, loads_E in zip(rows, loads_ME, strict=True):
        best = balanced(row, sizes)
        worse = rank_loads(loads_E, best).max() > rank_loads(loads_E, plain).max()
        found.append(plain if worse else best)
    return found


def contiguous(sizes: Sizes) -> Placement:
    """Experts in order, the same number on each rank or one more, no replicas; what is laid out without measuring."""
    bounds = [rank * sizes.experts // sizes.ranks for rank in range(sizes.ranks + 1)]
    return _placement(sizes, [range(bounds[rank], bounds[rank + 1]) for rank in range(sizes.ranks)])


def balanced(loads: Sequence[float], sizes: Sizes) -> Placement:
    """The greedy placement of one layer. Renaming experts of distinct loads renames its answer and changes nothing."""
    held: list[Sequence[int]] = []
    for experts in _experts_of_domains(loads, sizes):
        ranks = sizes.domain_ranks if sizes.grouped else sizes.ranks
        theirs = {expert: loads[expert] for expert in experts}
        held += _pack(theirs, _replicate(theirs, ranks * sizes.slots, most=ranks), ranks, sizes.slots)
    return _placement(sizes, held)


def rank_loads(loads_E: Tensor, placement: Placement) -> Tensor:
    """Tokens each rank works on when an expert's are shared out evenly among its replicas: `[R]` fp64."""
    shares_E = loads_E.double() / placement.replicas_E
    shares_P = torch.where(placement.experts_P >= 0, shares_E[placement.experts_P], 0.0)
    return shares_P.view(placement.sizes.ranks, placement.sizes.slots).sum(1)


def imbalance(loads_E: Tensor, placement: Placement) -> float:
    """Tokens of the busiest rank over the mean of all: what the slowest rank costs. 1 is even; 1 for no tokens."""
    loads_R = rank_loads(loads_E, placement)
    return float(loads_R.max() / loads_R.mean()) if loads_R.any() else 1.0


def to_slots(ids_TK: Tensor, table: Table, *, turn: int = 0) -> Tensor:
    """The slot of each (token, expert) pair: int64 `[T, K]`, -1 staying -1.

    The n-th pair of an expert, counted in token order, goes to replica (n + turn) modulo their number, so that their
    loads differ by one at most. Give each source rank its own `turn`, else ranks of few tokens all choose the first.
    Reads no value on the host. Ids are trusted to be in [-1, E).
    """
    ids_N = ids_TK.reshape(-1)
    absent_N, experts_N = ids_N < 0, ids_N.clamp_min(0)
    if table.slots_EC.shape[1] == 1:
        slots_N = table.slots_EC[:, 0].index_select(0, experts_N)
    else:
        keys_N, order_N = ids_N.sort(stable=True)
        nth_N = torch.arange(turn, turn + len(ids_N), device=ids_N.device) - torch.searchsorted(keys_N, keys_N)
        nth_N = torch.empty_like(nth_N).scatter_(0, order_N, nth_N)
        slots_N = table.slots_EC[experts_N, nth_N % table.replicas_E.index_select(0, experts_N)]
    return torch.where(absent_N, -1, slots_N).view_as(ids_TK)


def place_experts(whole: Tensor, placement: Placement, rank: int) -> Tensor:
    """The slots of `rank` out of the whole tensor of one layer: `[E, ...]` -> `[S, ...]`, a copy.

    Every replica is cut from the same whole, so ranks that give it the same version hold equal replicas. Call it for
    every rank at each new version, and at each new placement: slots of either left as they were are wrong experts.
    Empty slots are zero.
    """
    if whole.shape[0] != placement.sizes.experts:
        raise DispatchError(f"a tensor {list(whole.shape)} does not hold {placement.sizes.experts} experts")
    experts_S = placement.on(rank).to(whole.device)
    part = whole.index_select(0, experts_S.clamp_min(0))
    part[experts_S < 0] = 0
    return part


def _experts_of_domains(loads: Sequence[float], sizes: Sizes) -> list[list[int]]:
    """Experts that each domain holds when groups stay inside domains; all of them in one list when they need not."""
    if not sizes.grouped:
        return [list(range(sizes.experts))]
    size = sizes.experts // sizes.groups
    weights = {group: sum(loads[group * size : (group + 1) * size]) for group in range(sizes.groups)}
    packed = _pack(weights, dict.fromkeys(weights, 1), sizes.domains, sizes.groups // sizes.domains)
    return [[group * size + expert for group in groups for expert in range(size)] for groups in packed]


def _replicate(loads: Mapping[int, float], slots: int, most: int) -> dict[int, int]:
    """Replicas of each expert, `most` at most: the next one is always of the expert with the largest load a replica."""
    replicas = dict.fromkeys(loads, 1)
    heap = [(-load, 1, expert) for expert, load in loads.items()]  # of equal loads, one with fewer replicas first
    heapify(heap)
    for _ in range(min(slots, most * len(loads)) - len(loads)):
        _, count, expert = heap[0]
        replicas[expert] = count + 1
        full = count + 1 == most
        heapreplace(heap, (1.0 if full else -loads[expert] / (count + 1), count + 1, expert))
    return replicas


def _pack(loads: Mapping[int, float], copies: Mapping[int, int], bins: int, room: int) -> list[list[int]]:
    """What each bin holds: items heaviest copy first, to the lightest bins that have room, no item twice in a bin.

    An item with more copies than there are bins with room left goes into those; what is left of the room stays empty.
    """
    held: list[list[int]] = [[] for _ in range(bins)]
    weights = [0.0] * bins
    for item in sorted(loads, key=lambda item: (-loads[item] / copies[item], -loads[item], item)):
        with_room = (index for index in range(bins) if len(held[index]) < room)
        for index in sorted(with_room, key=lambda index: (weights[index], len(held[index]), index))[: copies[item]]:
            held[index].append(item)
            weights[index] += loads[item] / copies[item]
    return held


def _placement(sizes: Sizes, held: Sequence[Sequence[int]]) -> Placement:
    rows = [[*experts] + [-1] * (sizes.slots - len(experts)) for experts in held]
    return Placement(sizes, torch.tensor(rows, dtype=torch.int64).view(-1))
