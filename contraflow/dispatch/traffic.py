"""How many rows, and bytes, a routing sends inside and across domains: the arithmetic, without sending anything.

Serves tests (counted bytes must equal this), the choice of a backend, and anyone who plans a cluster. Closed forms are
of uniform routing: each token takes K distinct experts of E, all sets alike likely, experts shared out evenly.

Shape letters: T tokens, K experts of a token, E experts, R ranks, N domains.
"""

from dataclasses import dataclass
from math import comb

import torch
from torch import Tensor

from contraflow.dispatch.domains import Topology
from contraflow.dispatch.wire import Wire, back_wire, meta_bytes, value_bytes
from contraflow.errors import DispatchError


@dataclass(frozen=True)
class Copies:
    """Rows that leave a rank for another one, forwarded ones included."""

    inside: int
    across: int

    def __add__(self, other: "Copies") -> "Copies":
        return Copies(self.inside + other.inside, self.across + other.across)


def copies(kind: str, ids_TK: Tensor, source: int, topology: Topology, experts: int) -> Copies:
    """Rows that the tokens of rank `source` cause in one dispatch; one combine sends as many back.

    `ids_TK` int64, -1 for none.
    """
    ranks = topology.ranks
    rank_TK = torch.where(ids_TK < 0, ranks, ids_TK * ranks // experts)
    domain_R = torch.tensor(topology.domains)
    same_R = domain_R == domain_R[source]
    if kind == "per_expert":
        pairs_R = torch.bincount(rank_TK.reshape(-1), minlength=ranks + 1)[:ranks]
    else:
        hit_TR = torch.zeros(ids_TK.shape[0], ranks + 1, dtype=torch.bool).scatter_(1, rank_TK, True)[:, :ranks]
        if kind == "hierarchical":
            return _two_hops(hit_TR, source, topology)
        if kind != "all_to_all":
            raise DispatchError(f"no traffic is known for dispatch {kind!r}")
        pairs_R = hit_TR.sum(0)
    away = int(pairs_R[~same_R].sum())
    return Copies(int(pairs_R[same_R].sum() - pairs_R[source]), away)


def bytes_of(
    rows: Copies, kind: str, *, dim: int, choices: int, wire: Wire = "same", dtype: torch.dtype, back: bool
) -> Copies:
    """Bytes of so many rows on their way out (values, ids and weights), or `back` (values alone)."""
    choices = 1 if kind == "per_expert" else choices
    row = value_bytes(dim, back_wire(wire), dtype) if back else value_bytes(dim, wire, dtype) + meta_bytes(choices)
    return Copies(rows.inside * row, rows.across * row)


def expected_across(kind: str, *, experts: int, choices: int, domains: int, domain_ranks: int) -> float:
    """Rows a token sends across domains, on average, under uniform routing.

    per_expert: K (1 - 1/N). all_to_all: ranks elsewhere times the chance that one holds a chosen expert.
    hierarchical: other domains times the chance that one does.
    """
    if kind == "per_expert":
        return choices * (1 - 1 / domains)
    ranks = domains * domain_ranks
    if kind == "all_to_all":
        return (ranks - domain_ranks) * _reached(experts, choices, experts // ranks)
    return (domains - 1) * _reached(experts, choices, experts // domains)


def _reached(experts: int, choices: int, held: int) -> float:
    """Chance that a place with `held` of the experts holds one of K chosen: 1 - C(E - held, K) / C(E, K)."""
    return 1 - comb(experts - held, choices) / comb(experts, choices)


def _two_hops(hit_TR: Tensor, source: int, topology: Topology) -> Copies:
    """One row to each other domain hit, to the rank of the same place; from there one to each other rank hit."""
    grid = topology.grid()
    home = topology.domains[source]
    place = grid[home].index(source)
    inside = across = 0
    for domain, row in enumerate(grid):
        hit_Tr = hit_TR[:, list(row)]
        if domain != home:
            across += int(hit_Tr.any(1).sum())
        inside += int(hit_Tr.sum() - hit_Tr[:, place].sum())
    return Copies(inside, across)
