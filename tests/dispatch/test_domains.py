"""Which ranks share a domain: given, named, or read from the environment."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contraflow.dispatch.domains import DOMAIN_VARIABLE, Topology, Traffic, domain_name
from contraflow.errors import DispatchError


@given(st.integers(1, 6), st.integers(1, 6))
def test_even_domains_hold_neighbours(domains: int, size: int) -> None:
    topology = Topology.even(domains * size, size)
    assert (topology.ranks, topology.count) == (domains * size, domains)
    assert topology.grid() == tuple(tuple(range(d * size, (d + 1) * size)) for d in range(domains))


@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=12))
def test_ranks_share_a_domain_exactly_when_they_name_the_same(names: list[str]) -> None:
    topology = Topology.named(names)
    for one, its in enumerate(names):
        assert {r for r, n in enumerate(names) if n == its} == set(topology.members(topology.domains[one]))
    assert sorted(set(topology.domains)) == list(range(topology.count))
    assert Topology.named([str(d) for d in topology.domains]) == topology


@pytest.mark.parametrize(("ranks", "size"), [(4, 3), (4, 0), (4, 8)])
def test_domains_that_do_not_divide_the_ranks_are_refused(ranks: int, size: int) -> None:
    with pytest.raises(DispatchError, match=f"domains of {size} ranks do not divide {ranks}"):
        Topology.even(ranks, size)


def test_rails_need_domains_of_one_size() -> None:
    with pytest.raises(DispatchError, match=r"domains hold \[2, 1\] ranks"):
        Topology((0, 0, 1)).grid()


def test_a_domain_is_the_host_unless_the_environment_names_one() -> None:
    assert domain_name({}) == socket.gethostname()
    assert domain_name({DOMAIN_VARIABLE: "rack 7"}) == "rack 7"


def test_traffic_is_taken_once() -> None:
    traffic = Traffic()
    traffic.add(same_domain=True, nbytes=3)
    traffic.add(same_domain=False, nbytes=5)
    assert traffic.take() == Traffic(inside=3, across=5)
    assert traffic == Traffic()
