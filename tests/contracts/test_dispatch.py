"""What every dispatch promises: it is the sum over chosen experts, in value and in gradient, whatever the routing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contraflow.dispatch.base import Dispatch
from contraflow.dispatch.local import LocalDispatch
from contraflow.dispatch.placed import Placed
from contraflow.dispatch.placement import Sizes, contiguous
from contraflow.dispatch.reference import ReferenceDispatch
from contraflow.errors import DispatchError

DIM = 3
FORMS: dict[str, Callable[[int], Dispatch[Any]]] = {
    "reference": ReferenceDispatch,
    "local exact": LocalDispatch,
    "local fixed": lambda experts: LocalDispatch(experts, capacity=1000),
    "placed": lambda experts: Placed(LocalDispatch(experts), contiguous(one_rank(experts)).table(0)),
}


def one_rank(experts: int) -> Sizes:
    return Sizes(experts=experts, ranks=1, slots=experts, domain_ranks=1)


@pytest.fixture(params=FORMS)
def make(request: pytest.FixtureRequest) -> Callable[[int], Dispatch[Any]]:
    return FORMS[request.param]


@st.composite
def routings(draw: st.DrawFn) -> tuple[int, Tensor]:
    """Experts and `[T, K]` ids, distinct in a row as a router gives them, with -1 sprinkled in."""
    experts = draw(st.integers(1, 6))
    choices = draw(st.integers(1, experts))
    rows = draw(st.lists(st.permutations(range(experts)).map(lambda p: p[:choices]), max_size=9))
    keep = draw(st.lists(st.booleans(), min_size=len(rows) * choices, max_size=len(rows) * choices))
    ids = torch.tensor(rows, dtype=torch.int64).view(len(rows), choices)
    return experts, torch.where(torch.tensor(keep, dtype=torch.bool).view_as(ids), ids, -1)


def leaves(ids_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(ids_TK.numel() + experts)
    x = torch.randn(len(ids_TK), DIM, generator=noise)
    weights = torch.rand(ids_TK.shape, generator=noise)
    matrices = torch.randn(experts, DIM, DIM, generator=noise)
    return x.requires_grad_(), weights.requires_grad_(), matrices.requires_grad_()


def through(dispatch: Dispatch[Any], ids_TK: Tensor, x: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
    """A mixture whose expert e multiplies by `matrices[e]`. Rows past the last end become NaN, as they may."""
    rows = dispatch.dispatch(x, ids_TK, weights)
    ends = rows.ends_E.tolist()
    parts = [rows.x_RD[a:b] @ m for a, b, m in zip([0, *ends], ends, matrices, strict=False)]
    answers = torch.cat([*parts, rows.x_RD[ends[-1] :] * torch.nan])
    return dispatch.combine(answers * rows.weights_R[:, None], rows.handle)


def dense(ids_TK: Tensor, x: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
    """The same by way of every expert for every token, in float64."""
    all_TED = torch.einsum("td,edf->tef", x.double(), matrices.double())
    choice_TKE = (ids_TK[..., None] == torch.arange(len(matrices))).double()
    return torch.einsum("tk,tke,tef->tf", weights.double(), choice_TKE, all_TED)


@settings(max_examples=40, deadline=None)
@given(routing=routings())
@pytest.mark.parametrize("form", FORMS)
def test_a_mixture_equals_the_dense_sum_in_value_and_gradient(form: str, routing: tuple[int, Tensor]) -> None:
    experts, ids_TK = routing
    inputs = leaves(ids_TK, experts)
    got, wanted = through(FORMS[form](experts), ids_TK, *inputs), dense(ids_TK, *inputs)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    pull = torch.linspace(-1, 1, wanted.numel()).view(wanted.shape)
    got_grads = torch.autograd.grad(got, inputs, pull, allow_unused=True, materialize_grads=True)
    wanted_grads = torch.autograd.grad(wanted, inputs, pull.double(), allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(got_grads, wanted_grads, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(routing=routings())
@pytest.mark.parametrize("form", FORMS)
def test_rows_come_sorted_by_expert_and_then_by_token(form: str, routing: tuple[int, Tensor]) -> None:
    experts, ids_TK = routing
    tokens = torch.arange(len(ids_TK), dtype=torch.float32)[:, None].expand(-1, DIM)
    weights = torch.arange(ids_TK.numel(), dtype=torch.float32).view(ids_TK.shape) + 1
    rows = FORMS[form](experts).dispatch(tokens, ids_TK, weights)
    wanted = [(t, k) for e in range(experts) for t, k in (ids_TK == e).nonzero().tolist()]
    real = int(rows.ends_E[-1])
    assert rows.counts_E.tolist() == [int((ids_TK == e).sum()) for e in range(experts)]
    assert rows.x_RD[:real, 0].tolist() == [t for t, _ in wanted]
    assert rows.weights_R[:real].tolist() == [float(weights[t, k]) for t, k in wanted]
    assert not rows.weights_R[real:].any()
    assert rows.x_RD.isfinite().all()


def test_tokens_without_any_expert_come_back_as_zeros(make: Callable[[int], Dispatch[Any]]) -> None:
    ids_TK = torch.full((4, 2), -1)
    x, weights, matrices = leaves(ids_TK, 3)
    out = through(make(3), ids_TK, x, weights, matrices)
    assert out.shape == (4, DIM)
    assert not out.any()


def test_no_tokens_give_no_tokens(make: Callable[[int], Dispatch[Any]]) -> None:
    ids_TK = torch.zeros(0, 2, dtype=torch.int64)
    assert through(make(3), ids_TK, *leaves(ids_TK, 3)).shape == (0, DIM)


def test_ids_and_weights_need_not_be_contiguous(make: Callable[[int], Dispatch[Any]]) -> None:
    ids_TK = torch.tensor([[0, 2], [1, 0], [2, 1]])
    x, weights, matrices = leaves(ids_TK, 3)
    plain = through(make(3), ids_TK, x, weights, matrices)
    turned = through(make(3), ids_TK.t().contiguous().t(), x, weights.t().contiguous().t(), matrices)
    assert torch.equal(plain, turned)


def test_a_handle_is_good_for_one_combine(make: Callable[[int], Dispatch[Any]]) -> None:
    dispatch = make(2)
    rows = dispatch.dispatch(torch.ones(1, DIM), torch.tensor([[1]]), torch.ones(1, 1))
    dispatch.combine(rows.x_RD, rows.handle)
    with pytest.raises(DispatchError, match="before"):
        dispatch.combine(rows.x_RD, rows.handle)


def test_answers_that_are_not_one_per_row_are_refused(make: Callable[[int], Dispatch[Any]]) -> None:
    dispatch = make(2)
    rows = dispatch.dispatch(torch.ones(2, DIM), torch.tensor([[1], [0]]), torch.ones(2, 1))
    with pytest.raises(DispatchError, match="2 rows"):
        dispatch.combine(torch.ones(3, DIM), rows.handle)


@pytest.mark.parametrize(
    ("x", "ids", "weights", "said"),
    [
        (torch.ones(2, 3), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), "one T"),
        (torch.ones(2, 3), torch.zeros(2, dtype=torch.int64), torch.ones(2), "one T"),
        (torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 2), "weights"),
        (torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1), "int64"),
        (torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1).double(), "float32"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    make: Callable[[int], Dispatch[Any]], x: Tensor, ids: Tensor, weights: Tensor, said: str
) -> None:
    with pytest.raises(DispatchError, match=said):
        make(2).dispatch(x, ids, weights)
