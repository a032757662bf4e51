"""A dispatch that overlaps its hops gives what the plain one gives, whatever the routing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contraflow.dispatch.base import Rows
from contraflow.dispatch.domains import Topology
from contraflow.dispatch.exchange import Links
from contraflow.dispatch.open import open_dispatch
from contraflow.dispatch.overlap import OverlapDispatch
from contraflow.dispatch.spread import SpreadDispatch
from contraflow.dispatch.virtual import VirtualWorld
from contraflow.errors import DispatchError
from tests.dispatch.mixture import Case, dense, make_case


def mixed(case: Case, topology: Topology) -> list[Tensor]:
    def work(links: Links) -> Tensor:
        dispatch = open_dispatch("overlapped", links, experts=case.experts)
        assert isinstance(dispatch, OverlapDispatch)
        held = case.experts // topology.ranks
        own = case.matrices[links.rank * held :][:held]

        def answer(rows: Rows[object]) -> Tensor:
            ends = rows.ends_E.tolist()
            parts = [rows.x_RD[a:b] @ m for a, b, m in zip([0, *ends], ends, own, strict=False)]
            return torch.cat(parts) * rows.weights_R[:, None]

        return dispatch.mix(case.x[links.rank], case.ids[links.rank], case.weights[links.rank], answer)

    return VirtualWorld(topology).run(work)


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    choices=st.integers(1, 8),
    absent=st.sampled_from([0.0, 0.3, 1.0]),
    domain_ranks=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 1000),
)
def test_any_routing_equals_the_dense_sum(
    tokens: list[int], choices: int, absent: float, domain_ranks: int, seed: int
) -> None:
    case = make_case(tokens, experts=8, choices=choices, dim=5, seed=seed, absent=absent)
    for rank, out in enumerate(mixed(case, Topology.even(4, domain_ranks))):
        right = dense(case.x[rank], case.ids[rank], case.weights[rank], case.matrices)
        torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=2e-5)


def test_it_sends_no_more_across_domains_than_the_plain_form() -> None:
    case = make_case([9, 4, 7, 6], experts=8, choices=3, dim=64, seed=0)

    def plain(links: Links) -> int:
        dispatch = open_dispatch("hierarchical", links, experts=8)
        rows = dispatch.dispatch(case.x[links.rank], case.ids[links.rank], case.weights[links.rank])
        dispatch.combine(rows.x_RD, rows.handle)
        return links.traffic.across

    def overlapped(links: Links) -> int:
        dispatch = open_dispatch("overlapped", links, experts=8)
        given = (case.x[links.rank], case.ids[links.rank], case.weights[links.rank])
        dispatch.mix(*given, lambda rows: rows.x_RD)  # type: ignore[attr-defined]
        return links.traffic.across

    world = VirtualWorld(Topology.even(4, 2))
    assert world.run(plain) == VirtualWorld(Topology.even(4, 2)).run(overlapped)


@pytest.mark.parametrize(("kind", "capacity"), [("all_to_all", None), ("hierarchical", 4)])
def test_what_has_no_second_hop_or_a_fixed_size_cannot_overlap(kind: str, capacity: int | None) -> None:
    def work(links: Links) -> None:
        spread = SpreadDispatch(links, experts=4, kind=kind, capacity=capacity)
        with pytest.raises(DispatchError, match="only an exact hierarchical dispatch"):
            OverlapDispatch(spread)

    VirtualWorld(Topology.even(2, 1)).run(work)
