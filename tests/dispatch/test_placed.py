"""A placed dispatch is the same mixture as any other; only where experts lie differs, and nobody above sees that."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from contraflow.dispatch.base import Dispatch
from contraflow.dispatch.domains import Topology
from contraflow.dispatch.exchange import Links
from contraflow.dispatch.local import LocalDispatch
from contraflow.dispatch.open import open_dispatch
from contraflow.dispatch.placed import Placed
from contraflow.dispatch.placement import Placement, Sizes, contiguous, place, place_experts
from contraflow.dispatch.reference import ReferenceDispatch
from contraflow.dispatch.virtual import VirtualWorld
from contraflow.errors import DispatchError
from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import Decoder
from contraflow.model.folder import load_folder
from contraflow.model.moe import MoE
from contraflow.model.router import RouterTape
from tests.dispatch.mixture import Case, Seen, check, dense, make_case, pull_of, through

DIM = 3
SPREAD = ("per_expert", "all_to_all", "hierarchical")
INNER: dict[str, Callable[[int], Dispatch[Any]]] = {
    "reference": ReferenceDispatch,
    "local exact": LocalDispatch,
    "local fixed": lambda slots: LocalDispatch(slots, capacity=1000),
}


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[Placement, Tensor, list[Tensor]]:
    """A placement, `[T, K]` distinct ids with -1 sprinkled in, and x, weights and expert matrices."""
    experts, ranks = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    slots = -(-experts // ranks) + draw(st.integers(0, 2))
    size = Sizes(experts=experts, ranks=ranks, slots=slots, domain_ranks=1)
    tokens, choices = draw(st.integers(0, 8)), draw(st.integers(1, experts))
    noise = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    ids_TK = torch.rand(tokens, experts, generator=noise).argsort(1)[:, :choices]
    ids_TK = torch.where(torch.rand(ids_TK.shape, generator=noise) < 0.2, -1, ids_TK)
    loads_ME = torch.randint(0, 100, (1, experts), generator=noise)
    shapes = (tokens, DIM), (tokens, choices), (experts, DIM, DIM)
    leaves = [torch.randn(shape, generator=noise).requires_grad_() for shape in shapes]
    return place(loads_ME, size)[0], ids_TK, leaves


@given(mixtures(), st.integers(0, 3))
@pytest.mark.parametrize("inner", INNER)
def test_a_placed_mixture_equals_the_dense_sum_in_value_and_gradient(
    inner: str, case: tuple[Placement, Tensor, list[Tensor]], rank: int
) -> None:
    placement, ids_TK, leaves = case
    size = placement.sizes
    x, weights, matrices = leaves
    placed = Placed(INNER[inner](size.ranks * size.slots), placement.table(rank % size.ranks), turn=rank)
    lying = torch.cat([place_experts(matrices, placement, r) for r in range(size.ranks)])
    got = through(placed, x, ids_TK, weights, lying)
    wanted = dense(x, ids_TK, weights, matrices)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    pull = torch.linspace(-1, 1, wanted.numel()).view(wanted.shape)
    got_grads = torch.autograd.grad(got, leaves, pull, allow_unused=True, materialize_grads=True)
    wanted_grads = torch.autograd.grad(wanted, leaves, pull.double(), allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(got_grads, wanted_grads, rtol=1e-5, atol=1e-5)


@given(mixtures())
def test_rows_come_sorted_by_slot_and_loads_are_counted_by_expert(
    case: tuple[Placement, Tensor, list[Tensor]],
) -> None:
    placement, ids_TK, _ = case
    size = placement.sizes
    placed = Placed(ReferenceDispatch(size.ranks * size.slots), placement.table(0))
    names = torch.arange(len(ids_TK), dtype=torch.float32)[:, None]
    for _ in range(2):
        rows = placed.dispatch(names, ids_TK, torch.rand(ids_TK.shape))
        of_expert = torch.zeros(size.experts, dtype=torch.int64)
        held = placement.experts_P >= 0
        of_expert.index_add_(0, placement.experts_P[held], rows.counts_E.long()[held])
        wanted = torch.tensor([int((ids_TK == expert).sum()) for expert in range(size.experts)])
        assert torch.equal(of_expert, wanted)
        assert not rows.counts_E[~held].any()
    assert torch.equal(placed.take_loads(), 2 * wanted)
    assert not placed.take_loads().any()


@settings(max_examples=25)
@given(st.sampled_from(SPREAD), st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (4, 1)]), st.data())
def test_replicas_on_several_ranks_equal_the_dense_sum_and_their_gradients_add_up(
    kind: str, shape: tuple[int, int], data: st.DataObject
) -> None:
    ranks, domain_ranks = shape
    experts, spare = data.draw(st.integers(1, 7)), data.draw(st.integers(0, 2))
    size = Sizes(experts=experts, ranks=ranks, slots=-(-experts // ranks) + spare, domain_ranks=domain_ranks)
    tokens = data.draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks))
    choices, seed = data.draw(st.integers(1, experts)), data.draw(st.integers(0, 1000))
    case = make_case(tokens, experts=experts, choices=choices, dim=3, seed=seed, popular=2.0)
    loads_E = torch.bincount(torch.cat([ids[ids >= 0] for ids in case.ids]), minlength=experts)
    placement, near = place(loads_E[None], size)[0], data.draw(st.sampled_from(["any", "domain", "rank"]))

    def work(links: Links) -> tuple[Seen, Tensor]:
        inner = open_dispatch(kind, links, experts=ranks * size.slots)
        placed = Placed(inner, placement.table(links.rank, near), turn=links.rank)
        return run_placed(placed, case, placement, links.rank), placed.take_loads()

    got = VirtualWorld(Topology.even(ranks, domain_ranks)).run(work)
    check(case, [seen for seen, _ in got], rtol=1e-5, atol=2e-5)
    assert torch.equal(torch.stack([loads for _, loads in got]).sum(0), loads_E)


def run_placed(placed: Dispatch[Any], case: Case, placement: Placement, rank: int) -> Seen:
    leaves = [leaf.clone().requires_grad_() for leaf in (case.x[rank], case.weights[rank], case.matrices)]
    x, weights, matrices = leaves
    out = through(placed, x, case.ids[rank], weights, place_experts(matrices, placement, rank))
    grads = torch.autograd.grad(out, leaves, pull_of(out), allow_unused=True, materialize_grads=True)
    return Seen(out.detach(), *grads)


def test_tokens_without_any_expert_come_back_as_zeros_and_count_for_nobody() -> None:
    placement = contiguous(Sizes(experts=4, ranks=2, slots=3, domain_ranks=1))
    placed = Placed(LocalDispatch(6), placement.table(1), turn=1)
    out = through(placed, torch.ones(3, DIM), torch.full((3, 2), -1), torch.ones(3, 2), torch.ones(6, DIM, DIM))
    assert out.shape == (3, DIM)
    assert not out.any()
    assert not placed.take_loads().any()


def test_a_new_placement_comes_with_its_weights_and_changes_no_answer() -> None:
    size, noise = Sizes(experts=5, ranks=2, slots=4, domain_ranks=1), torch.Generator().manual_seed(0)
    x, weights, matrices = (torch.rand(shape, generator=noise) for shape in ((9, DIM), (9, 2), (5, DIM, DIM)))
    ids_TK = torch.rand(9, 5, generator=noise).argsort(1)[:, :2]
    first, second = place(torch.tensor([[50, 1, 1, 1, 1], [1, 1, 2, 50, 9]]), size)
    assert not torch.equal(first.experts_P, second.experts_P)
    placed = Placed(LocalDispatch(8), first.table(0))
    wanted = dense(x, ids_TK, weights, matrices)
    for placement in (first, second):
        placed.table.slots_EC.copy_(placement.table(0).slots_EC)
        placed.table.replicas_E.copy_(placement.table(0).replicas_E)
        lying = torch.cat([place_experts(matrices, placement, rank) for rank in range(2)])
        torch.testing.assert_close(through(placed, x, ids_TK, weights, lying).double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stray", [-2, 4])
def test_ids_of_no_logical_expert_are_refused_though_there_is_such_a_slot(stray: int) -> None:
    placed = Placed(LocalDispatch(6), contiguous(Sizes(experts=4, ranks=2, slots=3, domain_ranks=1)).table(0))
    with pytest.raises(DispatchError, match=rf"expert id {stray} is not in \[-1, 4\)"):
        placed.dispatch(torch.ones(1, DIM), torch.tensor([[0, stray]]), torch.ones(1, 2))


def test_a_table_is_copied_and_a_dispatch_can_be_used_inside_and_outside_inference_mode() -> None:
    table = contiguous(Sizes(experts=2, ranks=1, slots=2, domain_ranks=1)).table(0)
    placed = Placed(LocalDispatch(2), table)
    table.slots_EC.zero_()
    ids_TK, ones = torch.tensor([[1]]), torch.ones(1, 1)
    with torch.inference_mode():
        assert placed.dispatch(ones, ids_TK, ones).ends_E.tolist() == [0, 1]
    assert placed.dispatch(ones, ids_TK, ones).ends_E.tolist() == [0, 1]
    assert placed.take_loads().tolist() == [0, 2]


def test_router_tape_and_logits_are_those_of_the_model_without_placement(tiny_moe: Path) -> None:
    plain, spread = load_folder(tiny_moe), load_folder(tiny_moe)
    loads_ME = torch.tensor([[90, 1, 5, 2], [3, 3, 50, 40]])
    placements = place(loads_ME, Sizes(experts=4, ranks=2, slots=3, domain_ranks=1))
    layers = [layer.mlp for layer in spread.layers if isinstance(layer.mlp, MoE)]
    for mlp, placement in zip(layers, placements, strict=True):
        mlp.dispatch = Placed(LocalDispatch(6), placement.table(1), turn=1)
        for name in ("gate_up", "down"):
            whole = getattr(mlp, name)
            lying = torch.cat([place_experts(whole.detach(), placement, rank) for rank in range(2)])
            setattr(mlp, name, nn.Parameter(lying))
    tokens = torch.randint(0, plain.config.vocab, (20,), generator=torch.Generator().manual_seed(1))
    (wanted, wanted_tape), (got, got_tape) = run(plain, tokens), run(spread, tokens)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(got_tape.routes(), wanted_tape.routes())
    assert torch.equal(got_tape.loads(), wanted_tape.loads())
    assert torch.equal(torch.stack([mlp.dispatch.take_loads() for mlp in layers]), wanted_tape.loads())


def run(decoder: Decoder, tokens_T: Tensor) -> tuple[Tensor, RouterTape]:
    tape, length = RouterTape(), len(tokens_T)
    with torch.no_grad():
        return decoder(tokens_T, torch.arange(length), PackedPlan([0, length]), tape=tape), tape
