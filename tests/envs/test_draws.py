"""The counter-based draws: fixed for ever, uniform, and split by the question alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contraflow.envs.draws import Draws, derive_seed, in_test_split


def test_draws_are_the_same_for_ever():
    draws = Draws(7, "train", 3)
    assert [draws.word() for _ in range(2)] == [1748038136172583519, 485328966143474097]
    assert derive_seed(7, "episode", 0) == 7730371605479704250


def test_names_do_not_run_into_each_other():
    assert derive_seed(0, "a", "b") != derive_seed(0, "ab")
    assert derive_seed(1, "2") != derive_seed(12)


@given(st.integers(0, 2**63 - 1), st.text(), st.integers(0, 10**9))
def test_seeds_fit_a_signed_word(seed, name, index):
    assert 0 <= derive_seed(seed, name, index) < 2**63


def test_below_is_uniform():
    draws = Draws(0, "uniform")
    counts = [0] * 10
    for _ in range(20_000):
        counts[draws.below(10)] += 1
    chi_square = sum((count - 2000) ** 2 / 2000 for count in counts)
    assert chi_square < 27.9  # 0.1 % point of 9 degrees of freedom


@given(st.lists(st.floats(0, 10), min_size=1, max_size=6).filter(lambda weights: sum(weights) > 0), st.integers(0, 99))
def test_pick_gives_an_index_that_has_weight(weights, seed):
    draws = Draws(seed, "pick")
    assert all(weights[draws.pick(weights)] > 0 for _ in range(20))


def test_pick_follows_its_weights():
    draws = Draws(0, "weights")
    picks = [draws.pick([1.0, 3.0]) for _ in range(8000)]
    assert sum(picks) / 8000 == pytest.approx(0.75, abs=0.02)


def test_the_test_split_has_its_share():
    held_out = sum(in_test_split(5, str(question), 0.1) for question in range(20_000))
    assert held_out / 20_000 == pytest.approx(0.1, abs=0.01)
