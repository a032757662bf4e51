"""What every dispatch over several ranks promises: on any topology it is the dense sum, in value and in gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contraflow.dispatch.domains import Topology
from contraflow.dispatch.exchange import Links
from contraflow.dispatch.open import open_dispatch
from contraflow.dispatch.split import SplitTokens
from contraflow.dispatch.virtual import VirtualWorld
from contraflow.errors import DispatchError
from tests.dispatch.mixture import Case, check, dense, make_case, run_rank, through

KINDS = ("per_expert", "all_to_all", "hierarchical")
TOPOLOGIES = {
    "1": Topology.even(1, 1),
    "2 in one domain": Topology.even(2, 2),
    "2 apart": Topology.even(2, 1),
    "4 in one domain": Topology.even(4, 4),
    "2 x 2": Topology.even(4, 2),
    "2 x 2 interleaved": Topology((0, 1, 0, 1)),
    "4 apart": Topology.even(4, 1),
}
EXACT = {"rtol": 1e-5, "atol": 2e-5}
HALF = {"rtol": 5e-2, "atol": 2e-1}
FORMS: dict[str, dict[str, Any]] = {"exact": {}, "fixed": {"capacity": 40}}


def run(case: Case, topology: Topology, kind: str, **settings: Any) -> list[Any]:
    def work(links: Links) -> Any:
        dispatch = open_dispatch(kind, links, experts=case.experts, **settings)
        seen = run_rank(dispatch, case, links.rank, topology.ranks)
        if topology.ranks > 1:
            dispatch.check()
        return seen

    return VirtualWorld(topology).run(work)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_routing_on_any_topology_equals_the_dense_sum(kind: str, form: str, data: st.DataObject) -> None:
    topology = data.draw(st.sampled_from(list(TOPOLOGIES.values())))
    experts = topology.ranks * data.draw(st.integers(1, 3))
    case = make_case(
        data.draw(st.lists(st.integers(0, 9), min_size=topology.ranks, max_size=topology.ranks)),
        experts=experts,
        choices=data.draw(st.integers(1, experts)),
        dim=data.draw(st.sampled_from([2, 3, 9])),
        seed=data.draw(st.integers(0, 10**6)),
        absent=data.draw(st.sampled_from([0.0, 0.3, 1.0])),
        popular=data.draw(st.sampled_from([0.0, 3.0])),
    )
    check(case, run(case, topology, kind, **({"capacity": 90} if form == "fixed" else {})), **EXACT)


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [[0, 0, 0, 0], [7, 0, 0, 0], [0, 3, 5, 2], [1, 1, 1, 1], [1, 3, 7, 29]], ids=str)
def test_ranks_may_bring_no_tokens_or_one_or_an_odd_number(
    tokens: list[int], kind: str, form: str, topology: Topology
) -> None:
    case = make_case(tokens[: topology.ranks], experts=4, choices=2, dim=5, seed=3)
    check(case, run(case, topology, kind, **({"capacity": 60} if form == "fixed" else {})), **EXACT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_carried_as_they_are(kind: str, dtype: torch.dtype) -> None:
    case = make_case([5, 3, 0, 8], experts=8, choices=3, dim=8, seed=5, dtype=dtype)
    check(case, run(case, TOPOLOGIES["2 x 2"], kind), **(EXACT if dtype == torch.float64 else HALF))


def target(experts: list[int], tokens: int) -> Tensor:
    return torch.tensor([experts] * tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "experts",
    [[5, -1], [4, 5], [4, 7], [-1, -1], [6, 6]],
    ids=["one expert", "one rank", "one domain", "none", "twice the same"],
)
def test_extreme_skew_loses_nothing(kind: str, experts: list[int]) -> None:
    case = make_case([6, 4, 9, 2], experts=8, choices=2, dim=4, seed=9)
    case.ids = [target(experts, len(x)) for x in case.x]
    check(case, run(case, TOPOLOGIES["2 x 2"], kind), **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_of_zero_for_expert_zero_still_has_its_gradient(kind: str) -> None:
    case = make_case([3, 2], experts=2, choices=1, dim=4, seed=1, absent=0.0)
    case.ids = [torch.zeros_like(ids) for ids in case.ids]
    case.weights = [torch.zeros_like(weights) for weights in case.weights]
    check(case, run(case, TOPOLOGIES["2 apart"], kind, capacity=8), **EXACT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [72, 2880, 7168])
def test_widths_of_real_models_pass(kind: str, dim: int) -> None:
    case = make_case([2, 1, 3, 1], experts=8, choices=2, dim=1, seed=2)  # its matrices, which none needs, stay small
    noise = torch.Generator().manual_seed(2)
    case.x = [torch.randn(len(ids), dim, generator=noise) for ids in case.ids]
    got = VirtualWorld(TOPOLOGIES["2 x 2"]).run(lambda links: _copied(links, kind, case))
    for rank, out in enumerate(got):
        share = torch.where(case.ids[rank] >= 0, case.weights[rank], 0.0).sum(1, keepdim=True)
        torch.testing.assert_close(out, case.x[rank] * share, rtol=1e-5, atol=1e-5)


def _copied(links: Links, kind: str, case: Case) -> Tensor:
    dispatch = open_dispatch(kind, links, experts=case.experts)
    rows = dispatch.dispatch(case.x[links.rank], case.ids[links.rank], case.weights[links.rank])
    return dispatch.combine(rows.x_RD * rows.weights_R[:, None], rows.handle)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [lambda x: x.t().contiguous().t(), lambda x: x.repeat_interleave(2, 1)[:, ::2]])
def test_inputs_need_not_be_contiguous(kind: str, make: Callable[[Tensor], Tensor]) -> None:
    case = make_case([6, 4, 9, 2], experts=8, choices=2, dim=4, seed=9)
    case.x, case.ids = [make(x) for x in case.x], [ids.t().contiguous().t() for ids in case.ids]

    def work(links: Links) -> Tensor:
        dispatch = open_dispatch(kind, links, experts=8)
        x, ids, weights = (of[links.rank] for of in (case.x, case.ids, case.weights))
        assert not x.is_contiguous() or len(x) < 2
        return through(dispatch, x, ids, weights, case.matrices[2 * links.rank :][:2])

    for rank, out in enumerate(VirtualWorld(TOPOLOGIES["2 x 2"]).run(work)):
        right = dense(case.x[rank], case.ids[rank], case.weights[rank], case.matrices)
        torch.testing.assert_close(out.double(), right, **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_expanded_inputs_are_taken_too(kind: str) -> None:
    case = make_case([3, 3], experts=2, choices=1, dim=4, seed=0, absent=0.0)
    case.x = [torch.ones(1, 4).expand(3, 4) for _ in case.x]
    got = VirtualWorld(TOPOLOGIES["2 apart"]).run(lambda links: _copied(links, kind, case))
    for out, weights in zip(got, case.weights, strict=True):
        torch.testing.assert_close(out, weights.expand(3, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_repeats_give_the_same_bits(kind: str) -> None:
    case = make_case([6, 4, 9, 2], experts=8, choices=3, dim=16, seed=4)
    first, second = (run(case, TOPOLOGIES["2 x 2"], kind) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.out, b.out)
        assert torch.equal(a.grad_x, b.grad_x)


def test_all_forms_agree_bit_for_bit_where_sums_are_exact() -> None:
    case = make_case([6, 4, 9, 2], experts=8, choices=3, dim=4, seed=4)
    case.x = [x.mul(4).round() for x in case.x]
    case.weights = [torch.ones_like(weights) for weights in case.weights]
    case.matrices = case.matrices.mul(2).round()
    outs = [[seen.out for seen in run(case, TOPOLOGIES["2 x 2"], kind)] for kind in KINDS]
    for other in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outs[0], other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_a_histogram_of_the_ids(kind: str) -> None:
    case = make_case([6, 4, 9, 2], experts=8, choices=3, dim=4, seed=4)

    def work(links: Links) -> list[int]:
        dispatch = open_dispatch(kind, links, experts=8)
        rows = dispatch.dispatch(case.x[links.rank], case.ids[links.rank], case.weights[links.rank])
        counts: list[int] = rows.counts_E.tolist()
        dispatch.combine(rows.x_RD, rows.handle)
        return counts

    got = [count for counts in VirtualWorld(TOPOLOGIES["2 x 2"]).run(work) for count in counts]
    ids = torch.cat(case.ids)
    assert got == [int((ids == expert).sum()) for expert in range(8)]


@pytest.mark.parametrize("kind", KINDS)
def test_two_dispatches_in_flight_do_not_mix(kind: str) -> None:
    one = make_case([6, 4, 9, 2], experts=8, choices=3, dim=4, seed=4)
    two = make_case([1, 0, 3, 5], experts=8, choices=3, dim=4, seed=5)

    def work(links: Links) -> list[Tensor]:
        dispatch = open_dispatch(kind, links, experts=8)
        rows = [dispatch.dispatch(c.x[links.rank], c.ids[links.rank], c.weights[links.rank]) for c in (one, two)]
        return [dispatch.combine(r.x_RD * r.weights_R[:, None], r.handle) for r in reversed(rows)]

    for rank, (second, first) in enumerate(VirtualWorld(TOPOLOGIES["2 x 2"]).run(work)):
        for case, out in ((one, first), (two, second)):
            share = torch.where(case.ids[rank] >= 0, case.weights[rank], 0.0).sum(1, keepdim=True)
            torch.testing.assert_close(out, case.x[rank] * share, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [0, 1, 2, 7])
def test_ranks_that_hold_the_same_tokens_share_them_out(kind: str, tokens: int) -> None:
    one = make_case([tokens], experts=8, choices=3, dim=4, seed=4)
    case = Case(8, one.x * 4, one.ids * 4, one.weights * 4, one.matrices)

    def work(links: Links) -> Any:
        inner = open_dispatch(kind, links, experts=8)
        return run_rank(SplitTokens(inner, links.exchange(range(4))), case, links.rank, 4)

    got = VirtualWorld(TOPOLOGIES["2 x 2"]).run(work)
    total = sum(seen.grad_matrices for seen in got)
    for seen in got:
        seen.grad_matrices = total  # of one copy of the tokens; `check` adds four
    check(case, got, **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_a_handle_is_good_for_one_combine(kind: str) -> None:
    def work(links: Links) -> None:
        dispatch = open_dispatch(kind, links, experts=2)
        rows = dispatch.dispatch(torch.ones(1, 3), torch.tensor([[1]]), torch.ones(1, 1))
        dispatch.combine(rows.x_RD, rows.handle)
        with pytest.raises(DispatchError, match="before"):
            dispatch.combine(rows.x_RD, rows.handle)

    VirtualWorld(TOPOLOGIES["2 apart"]).run(work)


@pytest.mark.parametrize("kind", KINDS)
def test_a_capacity_that_is_too_small_is_an_error_and_never_a_silent_loss(kind: str) -> None:
    def work(links: Links) -> None:
        dispatch = open_dispatch(kind, links, experts=2, capacity=2)
        rows = dispatch.dispatch(torch.ones(3, 3), torch.tensor([[1]] * 3), torch.ones(3, 1))
        dispatch.combine(rows.x_RD, rows.handle)
        with pytest.raises(DispatchError, match=r"3 rows .* capacity is 2: 1 were lost"):
            dispatch.check()
        dispatch.check()  # told once

    VirtualWorld(TOPOLOGIES["2 apart"]).run(work)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"ids": [[2]]}, r"expert id 2 is not in \[-1, 2\)"),
        ({"ids": [[-2]]}, r"expert id -2 is not in \[-1, 2\)"),
        ({"ids": [[0]] * 5}, "5 tokens, but the group agreed on at most 4"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_bad_input_is_refused_before_anything_is_sent(kind: str, wanted: dict[str, Any], said: str) -> None:
    def work(links: Links) -> None:
        dispatch = open_dispatch(kind, links, experts=2, max_tokens=4)
        ids = torch.tensor(wanted["ids"])
        with pytest.raises(DispatchError, match=said):
            dispatch.dispatch(torch.ones(len(ids), 3), ids, torch.ones(len(ids), 1))
        assert links.traffic.inside == links.traffic.across == 0

    VirtualWorld(TOPOLOGIES["2 apart"]).run(work)


@pytest.mark.parametrize(
    ("settings_of_rank_1", "said"),
    [
        ({"experts": 8}, r"disagree on experts: rank . has ., rank . has ."),
        ({"max_tokens": 5}, "disagree on max_tokens"),
        ({"wire": "bf16"}, "disagree on wire"),
        ({"kind": "per_expert"}, "disagree on dispatch"),
        ({"capacity": 3}, "disagree on capacity"),
    ],
)
def test_ranks_that_were_set_up_differently_are_told_so(settings_of_rank_1: dict[str, Any], said: str) -> None:
    def work(links: Links) -> None:
        given = {"kind": "all_to_all", "experts": 4, "max_tokens": 4} | (settings_of_rank_1 if links.rank else {})
        with pytest.raises(DispatchError, match=said):
            open_dispatch(given.pop("kind"), links, **given)

    VirtualWorld(TOPOLOGIES["2 apart"]).run(work)


@pytest.mark.parametrize(
    ("kind", "experts", "topology", "said"),
    [
        ("all_to_all", 5, Topology.even(2, 2), "5 experts cannot be shared out evenly among 2 ranks"),
        ("hierarchical", 6, Topology((0, 0, 1)), r"domains hold \[2, 1\] ranks"),
        ("fastest", 4, Topology.even(2, 2), "dispatch 'fastest' is not known"),
        ("all_to_all", 40000, Topology.even(2, 2), "int16"),
    ],
)
def test_what_cannot_be_set_up_is_refused(kind: str, experts: int, topology: Topology, said: str) -> None:
    def work(links: Links) -> None:
        with pytest.raises(DispatchError, match=said):
            open_dispatch(kind, links, experts=experts)

    VirtualWorld(topology).run(work)


def test_auto_takes_two_hops_only_where_every_rank_has_partners() -> None:
    for topology, kind in ((Topology((0, 1, 1)), "all_to_all"), (Topology((0, 1, 0, 1)), "hierarchical")):
        opened = VirtualWorld(topology).run(lambda links: open_dispatch("auto", links, experts=12).kind)
        assert set(opened) == {kind}


def test_a_rank_that_skips_a_layer_is_noticed_and_not_mixed_up() -> None:
    def work(links: Links) -> None:
        dispatch = open_dispatch("all_to_all", links, experts=2)
        more = open_dispatch("all_to_all", links, experts=2)
        rows = dispatch.dispatch(torch.ones(1, 3), torch.tensor([[1]]), torch.ones(1, 1))
        if links.rank == 0:
            dispatch.combine(rows.x_RD, rows.handle)
        dispatch.dispatch(torch.ones(1, 3), torch.tensor([[1]]), torch.ones(1, 1))
        del more

    with pytest.raises(DispatchError, match="skipped or repeated a layer"):
        VirtualWorld(TOPOLOGIES["2 apart"]).run(work)


def test_with_a_capacity_a_skipped_layer_sets_a_flag() -> None:
    def work(links: Links) -> None:
        dispatch = open_dispatch("all_to_all", links, experts=2, capacity=4)
        dispatch.hops[0]._calls += links.rank  # as if it had been in one exchange more
        rows = dispatch.dispatch(torch.ones(1, 3), torch.tensor([[1]]), torch.ones(1, 1))
        dispatch.combine(rows.x_RD, rows.handle)
        with pytest.raises(DispatchError, match="skipped or repeated a layer"):
            dispatch.check()

    VirtualWorld(TOPOLOGIES["2 apart"]).run(work)
