from itertools import combinations
from math import comb, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contraflow.algo.estimates import LEVEL, intervals, paired, pass_at_k
from contraflow.errors import ConfigError


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_that_hold_a_right_one(case):
    samples, right, k = case
    answers = [True] * right + [False] * (samples - right)
    chosen = [any(some) for some in combinations(answers, k)]
    assert pass_at_k([right], samples=samples, k=k)[0] == pytest.approx(sum(chosen) / len(chosen), abs=1e-12)


def test_pass_at_k_of_many_samples_keeps_its_digits():
    found = pass_at_k([1, 3, 999, 1000, 0], samples=1000, k=200)
    exact = [1 - comb(1000 - right, 200) / comb(1000, 200) for right in (1, 3, 999, 1000, 0)]
    assert found == pytest.approx(exact, abs=1e-12)


def test_pass_at_k_is_unbiased():
    # Fewer samples, averaged over all their counts, say what the true chance says.
    chance, samples, k = 0.3, 6, 4
    weights = [comb(samples, right) * chance**right * (1 - chance) ** (samples - right) for right in range(7)]
    assert np.dot(weights, pass_at_k(range(7), samples=samples, k=k)) == pytest.approx(1 - 0.7**4, abs=1e-12)


@pytest.mark.parametrize(("right", "samples", "k"), [([1], 4, 5), ([1], 4, 0), ([5], 4, 1), ([-1], 4, 1)])
def test_a_k_or_a_count_that_does_not_fit_is_refused(right, samples, k):
    with pytest.raises(ConfigError):
        pass_at_k(right, samples=samples, k=k)


def test_an_interval_is_as_wide_as_the_normal_law_says():
    values = (np.arange(2000) % 10 < 3).astype(float)  # a share of 0.3
    (found,) = intervals(values[:, None], seed=5)
    spread = 1.96 * sqrt(0.3 * 0.7 / 2000)
    assert found.mean == pytest.approx(0.3)
    assert found.low == pytest.approx(0.3 - spread, abs=0.1 * spread)
    assert found.high == pytest.approx(0.3 + spread, abs=0.1 * spread)


def test_intervals_hold_the_truth_as_often_as_they_say():
    draws, hits = np.random.default_rng(3), 0
    for seed in range(200):
        (found,) = intervals(draws.normal(1.0, 2.0, (60, 1)), seed=seed)
        hits += found.low <= 1.0 <= found.high
    assert hits / 200 == pytest.approx(LEVEL, abs=0.05)


def test_a_seed_gives_the_same_interval_and_another_one_does_not():
    values = np.random.default_rng(1).random((50, 2))
    assert intervals(values, seed=1) == intervals(values, seed=1)
    assert intervals(values, seed=1) != intervals(values, seed=2)


def test_one_task_or_equal_ones_have_no_spread_and_none_is_refused():
    assert intervals(np.array([[0.25]]), seed=0)[0] == (0.25, 0.25, 0.25)
    assert intervals(np.full((9, 1), 0.5), seed=0)[0] == (0.5, 0.5, 0.5)
    with pytest.raises(ConfigError, match="at least one task"):
        intervals(np.zeros((0, 1)), seed=0)


def test_pairs_tell_a_small_gain_that_two_intervals_apart_would_hide():
    before = np.random.default_rng(2).random((100, 1))
    gain = paired(before, before + 0.01, seed=0)[0]
    assert gain == pytest.approx((0.01, 0.01, 0.01))
    (apart,) = intervals(before, seed=0)
    assert apart.high - apart.low > 0.05
    with pytest.raises(ConfigError, match="in pairs"):
        paired(before, before[:50], seed=0)
