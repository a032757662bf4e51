"""Repetition against a count by sets, and its closed forms."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contraflow.algo.repetition import repeated_share


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 5))
def test_it_is_what_counting_by_hand_gives(tokens: list[int], n: int) -> None:
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    expected = 1 - len(set(grams)) / len(grams) if grams else 0.0
    assert repeated_share(np.array(tokens, np.int32), n) == pytest.approx(expected)


@pytest.mark.parametrize("period", [1, 2, 7])
def test_a_loop_has_as_many_grams_as_its_period(period: int) -> None:
    tokens = np.resize(np.arange(period, dtype=np.int32), 1003)
    assert repeated_share(tokens) == pytest.approx(1 - period / 1000)


def test_what_never_repeats_and_what_is_too_short_have_none() -> None:
    assert repeated_share(np.arange(500, dtype=np.int32)) == 0.0
    assert repeated_share(np.zeros(3, np.int32)) == 0.0
    assert repeated_share(np.zeros(0, np.int32)) == 0.0
