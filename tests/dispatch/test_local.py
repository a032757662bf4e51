"""The fixed-capacity form: what happens when it is too small, and that it never asks the host."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from contraflow.dispatch.local import LocalDispatch
from contraflow.errors import DispatchError


def routed(dispatch: LocalDispatch, ids: list[list[int]]) -> torch.Tensor:
    """Each token's number of rows that came through, by identity experts of weight 1."""
    ids_TK = torch.tensor(ids)
    rows = dispatch.dispatch(torch.ones(len(ids), 1), ids_TK, torch.ones(ids_TK.shape))
    return dispatch.combine(rows.x_RD * rows.weights_R[:, None], rows.handle)[:, 0]


def test_pairs_past_the_capacity_are_lost_and_the_rest_is_right() -> None:
    dispatch = LocalDispatch(3, capacity=3)
    assert routed(dispatch, [[2, 0], [0, 1]]).tolist() == [1.0, 2.0]  # sorted by expert, expert 2 falls off
    assert bool(dispatch.overflow)


def test_an_overflow_stays_noted_until_somebody_looks_and_then_starts_anew() -> None:
    dispatch = LocalDispatch(3, capacity=3)
    routed(dispatch, [[0, 1], [0, 1]])
    routed(dispatch, [[0, 1]])
    with pytest.raises(DispatchError, match="4 rows, but capacity is 3: 1 were lost"):
        dispatch.check_overflow()
    assert not bool(dispatch.overflow)
    routed(dispatch, [[0, 1]])
    dispatch.check_overflow()


def test_a_capacity_that_just_fits_is_no_overflow() -> None:
    dispatch = LocalDispatch(3, capacity=3)
    assert routed(dispatch, [[2, 0], [-1, 1]]).tolist() == [2.0, 1.0]
    assert not bool(dispatch.overflow)


@pytest.mark.parametrize("capacity", [None, 1 << 40])
def test_without_a_bound_nothing_overflows(capacity: int | None) -> None:
    dispatch = LocalDispatch(3, capacity)
    routed(dispatch, [[0, 1]] * 50)
    assert not bool(dispatch.overflow)
    dispatch.check_overflow()


def test_the_number_of_rows_of_the_fixed_form_depends_on_shapes_alone() -> None:
    for ids in ([[0, 0]] * 4, [[-1, -1]] * 4, [[2, 1]] * 4):
        ids_TK = torch.tensor(ids)
        assert len(LocalDispatch(3, capacity=6).dispatch(torch.ones(4, 1), ids_TK, torch.ones(4, 2)).x_RD) == 6
        assert len(LocalDispatch(3, capacity=90).dispatch(torch.ones(4, 1), ids_TK, torch.ones(4, 2)).x_RD) == 8


def test_only_the_exact_form_reads_values_on_the_host() -> None:
    with FakeTensorMode():
        routed_ids, x, weights = torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 8), torch.ones(4, 2)
        fixed = LocalDispatch(3, capacity=8)
        rows = fixed.dispatch(x, routed_ids, weights)
        assert fixed.combine(rows.x_RD, rows.handle).shape == (4, 8)
        with pytest.raises(DataDependentOutputException):
            LocalDispatch(3).dispatch(x, routed_ids, weights)


def test_a_dispatch_first_used_in_inference_mode_can_be_used_outside_it() -> None:
    dispatch = LocalDispatch(3, capacity=3)
    with torch.inference_mode():
        routed(dispatch, [[0, 1], [0, 1]])
    routed(dispatch, [[0, 1], [0, 1]])
    with pytest.raises(DispatchError):
        dispatch.check_overflow()


@pytest.mark.parametrize(("experts", "capacity"), [(0, None), (3, 0), (-1, 4)])
def test_sizes_below_one_are_refused(experts: int, capacity: int | None) -> None:
    with pytest.raises(DispatchError, match="at least 1"):
        LocalDispatch(experts, capacity)
