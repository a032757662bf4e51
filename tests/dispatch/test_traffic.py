"""Bytes are accounted for: what a dispatch counts is what its routing says, and that is what the formulas say."""

import pytest
import torch

from contraflow.dispatch.domains import Topology, Traffic
from contraflow.dispatch.exchange import Links
from contraflow.dispatch.open import open_dispatch
from contraflow.dispatch.traffic import Copies, bytes_of, copies, expected_across
from contraflow.dispatch.virtual import VirtualWorld
from contraflow.dispatch.wire import Wire
from tests.dispatch.routings import MODELS, Shape, draw

KINDS = ("per_expert", "all_to_all", "hierarchical")
SMALL = Shape(32, 8, 16)


def ranks_that_divide(experts: int, domains: int) -> int:
    """Ranks of a domain: 8, or as many as share the experts evenly (160 does not divide by 64)."""
    return next(size for size in (8, 5, 4, 2, 1) if experts % (domains * size) == 0)


@pytest.mark.parametrize("skew", ["uniform", "log-normal", "zipf"])
@pytest.mark.parametrize("wire", ["same", "bf16", "fp8"])
@pytest.mark.parametrize("domains", [2, 4, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_counted_bytes_equal_what_the_routing_says(kind: str, domains: int, wire: Wire, skew: str) -> None:
    topology = Topology.even(2 * domains, 2)
    ids = [draw(SMALL, 11 + rank, seed=rank, skew=skew) for rank in range(topology.ranks)]

    def work(links: Links) -> tuple[Traffic, Traffic]:
        mine = ids[links.rank]
        dispatch = open_dispatch(kind, links, experts=32, wire=wire)
        x = torch.ones(len(mine), SMALL.dim, requires_grad=True)
        weights = torch.ones(mine.shape, requires_grad=True)
        links.traffic.take()
        rows = dispatch.dispatch(x, mine, weights)
        out = links.traffic.take()
        dispatch.combine(rows.x_RD, rows.handle)
        return out, links.traffic.take()

    seen = VirtualWorld(topology).run(work)
    rows = sum((copies(kind, own, rank, topology, 32) for rank, own in enumerate(ids)), Copies(0, 0))
    for back in (False, True):
        counted = Copies(sum(pair[back].inside for pair in seen), sum(pair[back].across for pair in seen))
        said = bytes_of(rows, kind, dim=SMALL.dim, choices=8, wire=wire, dtype=torch.float32, back=back)
        assert counted == said


@pytest.mark.parametrize("kind", KINDS)
def test_the_backward_pass_sends_what_the_forward_pass_sent_the_other_way(kind: str) -> None:
    topology = Topology.even(4, 2)
    ids = [draw(SMALL, 13, seed=rank) for rank in range(4)]

    def work(links: Links) -> tuple[Traffic, Traffic]:
        mine = ids[links.rank]
        dispatch = open_dispatch(kind, links, experts=32)
        x = torch.ones(13, SMALL.dim, requires_grad=True)
        weights = torch.ones(mine.shape, requires_grad=True)
        rows = dispatch.dispatch(x, mine, weights)
        out = dispatch.combine(rows.x_RD * rows.weights_R[:, None], rows.handle)
        forward = links.traffic.take()
        out.sum().backward()
        return forward, links.traffic.take()

    seen = VirtualWorld(topology).run(work)
    extra = 2 * 8 if kind != "per_expert" else 2  # ids, as int16, go out and have no gradient
    rows = sum((copies(kind, own, rank, topology, 32) for rank, own in enumerate(ids)), Copies(0, 0))
    for where in ("inside", "across"):
        forward, backward = (sum(getattr(pair[i], where) for pair in seen) for i in (0, 1))
        assert forward - backward == extra * getattr(rows, where)


@pytest.mark.parametrize("domains", [2, 4, 8, 16])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_uniform_routing_crosses_domains_as_often_as_the_closed_form_says(kind: str, model: str, domains: int) -> None:
    shape = MODELS[model]
    size = ranks_that_divide(shape.experts, domains)
    topology = Topology.even(domains * size, size)
    free = Shape(shape.experts, shape.choices, shape.dim)
    tokens = 4000
    found = copies(kind, draw(free, tokens, seed=1), 0, topology, shape.experts).across / tokens
    said = expected_across(kind, experts=shape.experts, choices=shape.choices, domains=domains, domain_ranks=size)
    assert found == pytest.approx(said, rel=0.02)


# Rows a token sends across domains under DeepSeek-V3's limit of 4 groups in 8, 8 ranks a domain. Known from sampling.
@pytest.mark.parametrize(
    ("domains", "per_expert", "per_rank", "per_domain"),
    [(2, 4.0, 2.86, 0.98), (4, 6.0, 5.13, 2.35), (8, 7.0, 6.56, 3.48), (16, 7.5, 7.34, 5.35)],
)
def test_limited_groups_cross_domains_less(domains: int, per_expert: float, per_rank: float, per_domain: float) -> None:
    shape, topology, tokens = MODELS["DeepSeek-V3"], Topology.even(domains * 8, 8), 4000
    ids = draw(shape, tokens, seed=2)
    # Averaged over sources: with a limit, a domain's own share of a token's experts comes and goes in whole groups.
    sources = range(0, topology.ranks, 8)
    for kind, said in zip(KINDS, (per_expert, per_rank, per_domain), strict=True):
        mean = sum(copies(kind, ids, s, topology, 256).across for s in sources) / tokens / len(sources)
        assert mean == pytest.approx(said, rel=0.03), kind


@pytest.mark.parametrize("skew", ["log-normal", "zipf"])
@pytest.mark.parametrize("domains", [2, 4, 8])
def test_skew_leaves_the_saving_of_one_row_a_domain_as_it_is(domains: int, skew: str) -> None:
    shape, topology, tokens = MODELS["Qwen3-30B-A3B"], Topology.even(domains * 8, 8), 4000

    def saving(how: str) -> float:
        ids = draw(shape, tokens, seed=3, skew=how)
        of = {
            kind: sum(copies(kind, ids, s, topology, 128).across for s in range(0, topology.ranks, 8)) for kind in KINDS
        }
        return of["per_expert"] / of["hierarchical"]

    assert saving(skew) == pytest.approx(saving("uniform"), rel=0.12)


def test_two_domains_of_two_ranks_send_a_quarter_of_the_rows() -> None:
    """The shape of the slow-link experiment: 32 experts, top 8, rows of 1024 fp32 values."""
    topology, ids = Topology.even(4, 2), draw(SMALL, 20000, seed=5)
    across = {
        kind: bytes_of(
            copies(kind, ids, 0, topology, 32), kind, dim=1024, choices=8, dtype=torch.float32, back=False
        ).across
        for kind in KINDS
    }
    assert across["hierarchical"] / across["per_expert"] <= 0.27
    assert across["hierarchical"] / across["all_to_all"] <= 0.56


def test_fp8_halves_what_bf16_sends() -> None:
    rows = Copies(0, 1000)
    sizes = {
        wire: bytes_of(rows, "hierarchical", dim=7168, choices=8, wire=wire, dtype=torch.float32, back=False).across
        for wire in ("same", "bf16", "fp8")
    }
    assert sizes["fp8"] / sizes["bf16"] == pytest.approx(0.516, rel=0.01)
    assert sizes["bf16"] / sizes["same"] == pytest.approx(0.5, rel=0.01)
