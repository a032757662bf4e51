"""Lengths are counted by power of two, and the bias is the ratio of exact means."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contraflow.algo.lengths import Lengths, bin_name, length_record


@given(st.lists(st.integers(0, 1 << 20), max_size=60), st.lists(st.integers(0, 1 << 20), max_size=60))
def test_counts_and_bias_are_those_of_the_lengths(posed: list[int], trained: list[int]) -> None:
    both = []
    for lengths in (posed, trained):
        seen = Lengths()
        for one in lengths:
            seen.add([one])
        assert sum(seen.counts) == seen.episodes == len(lengths)
        assert seen.mean == pytest.approx(float(np.mean(lengths)) if lengths else 0.0)
        for place, count in enumerate(seen.counts):
            low, _, high = bin_name(place).partition(" to ")
            assert count == sum(int(low) <= one <= int(high or low) for one in lengths)
        both.append(seen)
    record = length_record(*both, 3)
    assert record["cut"] == 3
    fair = np.mean(trained or [0]) / np.mean(posed) if posed and np.mean(posed) else 1.0
    assert record["bias"] == pytest.approx(fair, abs=1e-3, rel=1e-3)


def test_dropping_the_long_ones_shows() -> None:
    posed, trained = Lengths(), Lengths()
    posed.add([10, 10, 100])
    trained.add([10, 10])
    assert length_record(posed, trained, 0)["bias"] == 0.25
