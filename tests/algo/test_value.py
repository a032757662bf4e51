"""The value loss with its clip, worked by hand; and how much of the returns values foretell."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contraflow.algo.value import explained_variance, value_loss

NUMBER = st.floats(-3, 3, width=32)


def loss_of(values, old, returns, weights=None, *, clip):
    columns = [torch.tensor(column, dtype=torch.float64) for column in (values, old, returns)]
    columns[0].requires_grad_()
    weights_N = torch.ones(len(values)).double() if weights is None else torch.tensor(weights, dtype=torch.float64)
    found = value_loss(*columns, weights_N, clip=clip)
    found.loss.backward()
    return float(found.loss.detach()), found.clipped_N.tolist(), columns[0].grad.tolist()


def test_a_value_that_left_its_bound_towards_the_return_is_held_there():
    # old 0, return 1, clip 0.2: value 0.1 is free (1/2 0.81), 0.5 is held at 0.2 (1/2 0.64), -0.5 is not (1/2 2.25)
    loss, clipped, gradient = loss_of([0.1, 0.5, -0.5], [0.0] * 3, [1.0] * 3, clip=0.2)
    assert loss == pytest.approx((0.81 + 0.64 + 2.25) / 2)
    assert clipped == [False, True, False]
    assert gradient == pytest.approx([-0.9, 0.0, -1.5])


def test_without_a_clip_it_is_half_the_squared_error_by_shares():
    loss, clipped, gradient = loss_of([1.0, 5.0], [0.0, 0.0], [3.0, 1.0], [0.25, 0.5], clip=0.0)
    assert loss == pytest.approx(0.5 * (0.25 * 4 + 0.5 * 16))
    assert (clipped, gradient) == ([False, False], pytest.approx([-0.5, 2.0]))


def test_a_token_of_no_weight_is_out_whatever_its_value_and_none_give_nothing():
    assert loss_of([float("inf"), 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0], clip=0.2)[0] == pytest.approx(0.5)
    assert loss_of([], [], [], clip=0.2)[0] == 0.0


@given(st.lists(st.tuples(NUMBER, NUMBER, NUMBER), min_size=1, max_size=8), st.floats(0.01, 2))
def test_the_clipped_loss_is_never_below_the_plain_one(rows, clip):
    values, old, returns = (list(column) for column in zip(*rows, strict=True))
    held, _, _ = loss_of(values, old, returns, clip=clip)
    assert held >= loss_of(values, old, returns, clip=0.0)[0] - 1e-12


def test_explained_variance_is_one_of_all_zero_of_a_constant_and_below_of_the_wrong():
    returns_N = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns_N, returns_N) == pytest.approx(1.0)
    assert explained_variance(torch.full((4,), 9.0), returns_N) == pytest.approx(0.0)
    assert explained_variance(-returns_N, returns_N) == pytest.approx(-3.0)
    assert explained_variance(returns_N, torch.ones(4)) == 0.0
    assert explained_variance(torch.zeros(0), torch.zeros(0)) == 0.0
