import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contraflow.algo.corrections import CORRECTIONS, Stale, correct, effective_share
from contraflow.algo.loss import Sequences


def stale(ratios, of=None, ages=None):
    log_N = torch.tensor(ratios, dtype=torch.float64).log()
    of_N = torch.tensor(of if of is not None else list(range(len(ratios))), dtype=torch.int64)
    ages_N = torch.tensor(ages if ages is not None else [0] * len(ratios))
    return Stale(log_N, ages_N, Sequences(of_N, int(of_N.max()) + 1 if of_N.numel() else 0))


RATIOS, OF = [0.25, 2.0, 1.0, 8.0, 0.5], [0, 0, 0, 1, 1]  # products 0.5 and 4, geometric means 0.794 and 2

BY_HAND = [
    ("tis", (0.0, 2.0), [0.25, 2.0, 1.0, 2.0, 0.5], [1, 3]),
    ("sequence_tis", (0.0, 2.0), [0.5, 0.5, 0.5, 2.0, 2.0], [3, 4]),
    ("icepop", (0.5, 5.0), [0, 1, 1, 0, 1], [0, 3]),
    ("sequence_mask", (0.4, 3.0), [1, 1, 1, 0, 0], [3, 4]),
    ("geometric_mask", (0.9, 2.5), [0, 0, 0, 1, 1], [0, 1, 2]),
    ("age_mask", (0, 3), [1, 1, 0, 1, 0], [2, 4]),
]


@pytest.mark.parametrize(("name", "bounds", "weights", "touched"), BY_HAND)
def test_each_correction_worked_by_hand(name, bounds, weights, touched):
    found = correct(stale(RATIOS, OF, [0, 3, 4, 1, 9]), {name: bounds})
    assert found.weights_N.tolist() == pytest.approx(weights)
    assert found.touched[name].nonzero().flatten().tolist() == touched


def test_every_correction_is_worked_by_hand_above():
    assert {name for name, *_ in BY_HAND} == set(CORRECTIONS)


def test_corrections_multiply_so_that_band_and_ratio_are_icepop_as_published():
    both = correct(stale(RATIOS, OF), {"tis": (0.0, 100.0), "icepop": (0.5, 5.0)})
    assert both.weights_N.tolist() == pytest.approx([0, 2.0, 1.0, 0, 0.5])
    assert correct(stale(RATIOS, OF), {}).weights_N.tolist() == [1.0] * 5


def test_truncated_importance_sampling_without_a_bound_in_reach_is_unbiased():
    # Expectation over a three-letter alphabet sampled by q, of a function of the letter under p.
    q, p = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    worth = torch.tensor([1.0, -2.0, 0.5]).double()
    weights = correct(stale((p / q).tolist()), {"tis": (0.0, 10.0)}).weights_N
    assert float((q * weights * worth).sum()) == pytest.approx(float((p * worth).sum()))


def test_a_ratio_that_is_not_finite_is_masked_by_every_band():
    broken = Stale(torch.tensor([math.nan, math.inf, 0.0]), torch.zeros(3), Sequences(torch.arange(3), 3))
    for name in ("icepop", "sequence_mask", "geometric_mask"):
        assert correct(broken, {name: (0.5, 2.0)}).weights_N.tolist() == [0, 0, 1], name


def test_a_product_of_a_thousand_ratios_is_compared_without_overflow():
    log_N = torch.full((1000,), 5.0)
    found = correct(
        Stale(log_N, torch.zeros(1000), Sequences(torch.zeros(1000, dtype=torch.int64), 1)),
        {"sequence_mask": (0.1, 1e30)},
    )
    assert not found.weights_N.any()


def test_corrections_of_nothing_give_nothing():
    for name in CORRECTIONS:
        found = correct(stale([]), {name: (0.5, 2.0)})
        assert found.weights_N.shape == found.touched[name].shape == (0,)
    assert effective_share(torch.zeros(0)) == 1.0


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20))
def test_the_effective_share_lies_between_one_token_and_all_and_equal_weights_give_all(weights):
    share = effective_share(torch.tensor(weights))
    assert 1 / len(weights) - 1e-9 <= share <= 1 + 1e-9
    assert effective_share(torch.full((7,), weights[0])) == pytest.approx(1.0)
    assert effective_share(torch.tensor([0.0, 3.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert effective_share(torch.zeros(3)) == 0.0
