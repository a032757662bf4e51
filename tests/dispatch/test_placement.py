"""A placement holds every expert, none twice on a rank and is no worse than experts in order; replicas share evenly."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from contraflow.dispatch.placement import (
    Placement,
    Sizes,
    balanced,
    contiguous,
    imbalance,
    place,
    place_experts,
    rank_loads,
    to_slots,
)
from contraflow.errors import DispatchError


@st.composite
def sizes(draw: st.DrawFn, domains: int = 4) -> Sizes:
    """Any that can be: experts that ranks do not divide, more slots than experts, groups that domains do not divide."""
    domain_ranks, groups = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ranks, experts = domain_ranks * draw(st.integers(1, domains)), groups * draw(st.integers(1, 6))
    slots = -(-experts // ranks) + draw(st.integers(0, 3))
    return Sizes(experts=experts, ranks=ranks, slots=slots, domain_ranks=domain_ranks, groups=groups)


@st.composite
def cases(draw: st.DrawFn, least: int = 0) -> tuple[Sizes, Tensor]:
    """Sizes and the loads of one layer."""
    size = draw(sizes())
    load = st.one_of(st.integers(least, 20), st.integers(least, 10_000))
    loads = draw(st.lists(load, min_size=size.experts, max_size=size.experts))
    return size, torch.tensor(loads)


def held(placement: Placement) -> list[list[int]]:
    """Experts of each rank, empty slots left out."""
    ranks = range(placement.sizes.ranks)
    return [[expert for expert in placement.on(rank).tolist() if expert >= 0] for rank in ranks]


def plan(size: Sizes, loads_E: Tensor) -> Placement:
    return place(loads_E[None], size)[0]


@given(cases())
def test_every_expert_is_held_and_none_twice_on_a_rank(case: tuple[Sizes, Tensor]) -> None:
    size, loads_E = case
    placement = plan(size, loads_E)
    assert placement.experts_P.shape == (size.ranks * size.slots,)
    assert set().union(*held(placement)) == set(range(size.experts))
    assert all(len(set(experts)) == len(experts) for experts in held(placement))
    assert placement.replicas_E.sum() == sum(map(len, held(placement)))
    assert placement.replicas_E.max() <= size.most_replicas


@given(cases())
def test_a_placement_is_never_worse_than_experts_in_order(case: tuple[Sizes, Tensor]) -> None:
    size, loads_E = case
    assert rank_loads(loads_E, plan(size, loads_E)).max() <= rank_loads(loads_E, contiguous(size)).max()
    assert imbalance(loads_E, plan(size, loads_E)) <= imbalance(loads_E, contiguous(size)) + 1e-12


@given(cases())
def test_groups_stay_inside_domains_whenever_domains_divide_them(case: tuple[Sizes, Tensor]) -> None:
    size, loads_E = case
    placement = plan(size, loads_E)
    of_domain = placement.experts_P.view(size.domains, -1)
    homes = [set(row[row >= 0].div(size.experts // size.groups, rounding_mode="floor").tolist()) for row in of_domain]
    if size.groups > 1 and size.groups % size.domains == 0:
        assert sum(map(len, homes)) == size.groups


@given(cases())
def test_rank_loads_are_those_of_a_sum_by_hand(case: tuple[Sizes, Tensor]) -> None:
    size, loads_E = case
    placement = plan(size, loads_E)
    copies = [sum(e in experts for experts in held(placement)) for e in range(size.experts)]
    wanted = [sum(loads_E[e].item() / copies[e] for e in experts) for experts in held(placement)]
    loads_R = rank_loads(loads_E, placement)
    torch.testing.assert_close(loads_R, torch.tensor(wanted, dtype=torch.float64))
    assert loads_R.sum().item() == pytest.approx(loads_E.sum().item())


@given(cases(), st.randoms(use_true_random=False))
def test_renaming_experts_renames_the_answer(case: tuple[Sizes, Tensor], random: object) -> None:
    size, loads_E = case
    plain = Sizes(experts=size.experts, ranks=size.ranks, slots=size.slots, domain_ranks=size.ranks)
    distinct = (loads_E * size.experts + torch.arange(size.experts)).tolist()
    names = list(range(size.experts))
    random.shuffle(names)  # type: ignore[attr-defined]
    renamed = [0.0] * size.experts
    for expert, name in enumerate(names):
        renamed[name] = distinct[expert]
    wanted = [names[expert] if expert >= 0 else -1 for expert in balanced(distinct, plain).experts_P.tolist()]
    assert balanced(renamed, plain).experts_P.tolist() == wanted


@given(cases())
def test_the_same_loads_give_the_same_placement(case: tuple[Sizes, Tensor]) -> None:
    size, loads_E = case
    first, again = plan(size, loads_E), plan(size, loads_E.double())
    assert torch.equal(first.experts_P, again.experts_P)


@given(sizes())
def test_without_any_load_every_expert_is_held_and_replicas_are_spread(size: Sizes) -> None:
    placement = plan(size, torch.zeros(size.experts))
    assert set().union(*held(placement)) == set(range(size.experts))
    assert imbalance(torch.zeros(size.experts), placement) == 1.0
    if not size.grouped:
        assert placement.replicas_E.max() - placement.replicas_E.min() <= 1


def test_the_largest_load_a_replica_gets_the_next_replica() -> None:
    size, loads_E = Sizes(experts=4, ranks=4, slots=2, domain_ranks=4), torch.tensor([40, 10, 10, 20])
    placement = plan(size, loads_E)
    assert placement.replicas_E.tolist() == [4, 1, 1, 2]
    assert rank_loads(loads_E, placement).tolist() == [20.0] * 4


def test_one_hot_expert_is_replicated_on_every_rank_but_never_twice_on_one() -> None:
    size = Sizes(experts=8, ranks=4, slots=4, domain_ranks=2)
    loads_E = torch.tensor([800, 0, 0, 0, 0, 0, 0, 0])
    placement = plan(size, loads_E)
    assert placement.replicas_E[0] == 4
    assert imbalance(loads_E, placement) == 1.0
    assert imbalance(loads_E, contiguous(size)) == 4.0


def test_one_rank_holds_everything_once() -> None:
    size = Sizes(experts=5, ranks=1, slots=7, domain_ranks=1)
    assert sorted(plan(size, torch.arange(5)).experts_P.tolist()) == [-1, -1, 0, 1, 2, 3, 4]
    assert imbalance(torch.arange(5), plan(size, torch.arange(5))) == 1.0


def test_where_the_greedy_way_only_harms_experts_lie_in_order_and_spare_slots_stay_empty() -> None:
    size, loads_E = Sizes(experts=3, ranks=2, slots=2, domain_ranks=2), torch.tensor([3, 1, 2])
    assert imbalance(loads_E, balanced(loads_E.tolist(), size)) > 1.1
    assert imbalance(loads_E, plan(size, loads_E)) == 1.0
    assert plan(size, loads_E).experts_P.tolist() == [0, -1, 1, 2]


def test_no_layers_need_no_placement() -> None:
    assert place(torch.zeros(0, 4), Sizes(experts=4, ranks=2, slots=2, domain_ranks=1)) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"slots": 1}, "at least 2 slots"),
        ({"ranks": 0}, "at least 1"),
        ({"domain_ranks": 3}, "do not divide 4 ranks"),
        ({"groups": 3}, "do not divide 8 experts"),
    ],
)
def test_sizes_that_cannot_be_are_refused(wrong: dict[str, int], said: str) -> None:
    with pytest.raises(DispatchError, match=said):
        Sizes(**({"experts": 8, "ranks": 4, "slots": 2, "domain_ranks": 2} | wrong))


@pytest.mark.parametrize("loads", [[[1, 2, 3]], [1, 2, 3, 4], [[1, 2, -1, 4]], [[1, 2, math.nan, 4]]])
def test_loads_that_are_no_counts_of_these_experts_are_refused(loads: list[object]) -> None:
    with pytest.raises(DispatchError, match="loads"):
        place(torch.tensor(loads), Sizes(experts=4, ranks=2, slots=2, domain_ranks=1))


@st.composite
def routings(draw: st.DrawFn) -> tuple[Placement, Tensor]:
    """A placement, and distinct experts for some tokens with -1 sprinkled in."""
    size, loads_E = draw(cases())
    tokens, choices = draw(st.integers(0, 12)), draw(st.integers(1, size.experts))
    noise = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    ids_TK = torch.rand(tokens, size.experts, generator=noise).argsort(1)[:, :choices]
    return plan(size, loads_E), torch.where(torch.rand(ids_TK.shape, generator=noise) < 0.2, -1, ids_TK)


@given(routings(), st.sampled_from(["any", "domain", "rank"]), st.integers(0, 15))
def test_a_pair_goes_to_a_slot_of_its_expert_and_replicas_differ_by_one_token_at_most(
    case: tuple[Placement, Tensor], near: str, rank: int
) -> None:
    placement, ids_TK = case
    rank %= placement.sizes.ranks
    table = placement.table(rank, near)  # type: ignore[arg-type]
    slots_TK = to_slots(ids_TK, table, turn=rank)
    assert slots_TK.dtype == torch.int64
    assert slots_TK.shape == ids_TK.shape
    assert torch.equal(slots_TK < 0, ids_TK < 0)
    assert torch.equal(placement.experts_P[slots_TK[ids_TK >= 0]], ids_TK[ids_TK >= 0])
    assert table.slots_EC.shape == (placement.sizes.experts, placement.sizes.most_replicas)
    for expert in range(placement.sizes.experts):
        replicas = table.slots_EC[expert, : table.replicas_E[expert]]
        counts = (slots_TK[..., None] == replicas).sum((0, 1))
        assert counts.max() - counts.min() <= 1


@given(routings(), st.integers(0, 15))
def test_what_is_near_is_chosen_where_there_is_any(case: tuple[Placement, Tensor], rank: int) -> None:
    placement, _ = case
    size = placement.sizes
    rank %= size.ranks
    domain = rank // size.domain_ranks
    for expert, (everywhere, in_domain, here) in enumerate(
        zip(*(slots_of(placement, rank, near) for near in ("any", "domain", "rank")), strict=True)
    ):
        assert everywhere == (placement.experts_P == expert).nonzero().flatten().tolist()
        at_home = [slot for slot in everywhere if slot // (size.slots * size.domain_ranks) == domain]
        assert in_domain == (at_home or everywhere)
        own = [slot for slot in everywhere if slot // size.slots == rank]
        assert here == (own or in_domain)


def slots_of(placement: Placement, rank: int, near: str) -> list[list[int]]:
    table = placement.table(rank, near)  # type: ignore[arg-type]
    return [row[:n] for row, n in zip(table.slots_EC.tolist(), table.replicas_E.tolist(), strict=True)]


def test_ranks_with_one_token_each_do_not_all_choose_the_same_replica() -> None:
    size = Sizes(experts=2, ranks=4, slots=2, domain_ranks=4)
    placement = plan(size, torch.tensor([100, 100]))
    chosen = {int(to_slots(torch.tensor([[0]]), placement.table(rank), turn=rank)) for rank in range(4)}
    assert len(chosen) == placement.replicas_E[0] == 4


def test_ranks_work_on_as_many_tokens_as_the_plan_says() -> None:
    size = Sizes(experts=8, ranks=4, slots=3, domain_ranks=2)
    noise = torch.Generator().manual_seed(3)
    ids_RTK = (torch.rand(4, 50, 8, generator=noise) * torch.arange(1, 9)).argsort(-1, descending=True)[..., :2]
    loads_E = torch.bincount(ids_RTK.flatten(), minlength=8)
    placement = plan(size, loads_E)
    slots = torch.cat([to_slots(ids_RTK[r], placement.table(r), turn=r).flatten() for r in range(4)])
    got_R = torch.bincount(slots // size.slots, minlength=4).double()
    assert (got_R - rank_loads(loads_E, placement)).abs().max() <= size.ranks * size.slots


@given(cases(), st.integers(0, 100))
def test_after_an_update_all_replicas_of_an_expert_are_equal_and_new(case: tuple[Sizes, Tensor], seed: int) -> None:
    size, loads_E = case
    placement, noise = plan(size, loads_E), torch.Generator().manual_seed(seed)
    old_EFD, new_EFD = torch.rand(2, size.experts, 3, 2, generator=noise).unbind()
    live = [place_experts(old_EFD, placement, rank) for rank in range(size.ranks)]
    for rank, slots_SFD in enumerate(live):
        slots_SFD.copy_(place_experts(new_EFD, placement, rank))
    slots_PFD = torch.cat(live)
    hashes = [hash(slot.numpy().tobytes()) for slot in slots_PFD]
    wanted = [hash(expert.numpy().tobytes()) for expert in new_EFD]
    nothing = hash(torch.zeros(3, 2).numpy().tobytes())
    assert hashes == [wanted[expert] if expert >= 0 else nothing for expert in placement.experts_P.tolist()]


def test_a_rank_owns_what_it_cut_and_other_tensors_are_refused() -> None:
    placement = contiguous(Sizes(experts=4, ranks=2, slots=2, domain_ranks=1))
    whole_ED = torch.ones(4, 3)
    place_experts(whole_ED, placement, 0).zero_()
    assert whole_ED.all()
    with pytest.raises(DispatchError, match="4 experts"):
        place_experts(torch.ones(5, 3), placement, 0)
