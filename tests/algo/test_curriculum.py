"""The policy of the curriculum as laws."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contraflow.algo.curriculum import Band, draw

RATES = st.lists(st.floats(0, 1), max_size=80)
BAND = Band(low=0.1, high=0.9, keep=0.2, least=8)


@given(RATES, st.floats(0.01, 1), st.integers(1, 80))
def test_a_share_is_whole_or_keep_and_never_nothing(rates: list[float], keep: float, least: int) -> None:
    share = Band(low=0.1, high=0.9, keep=keep, least=least).share(rates)
    outside = len(rates) >= least and not 0.1 <= sum(rates) / len(rates) <= 0.9
    assert share == (keep if outside else 1.0)


@given(RATES, st.randoms(use_true_random=False))
def test_the_order_of_measurements_within_the_look_changes_nothing(rates: list[float], random) -> None:  # type: ignore[no-untyped-def]
    tenths = [round(rate * 16) / 16 for rate in rates]  # sums of these are exact
    shuffled = random.sample(tenths, len(tenths))
    assert BAND.share(shuffled) == BAND.share(tenths)


@pytest.mark.parametrize(
    ("rate", "share"), [(0.0, 0.2), (0.0625, 0.2), (0.125, 1.0), (0.875, 1.0), (0.9375, 0.2), (1.0, 0.2)]
)
def test_what_lies_outside_the_band_is_cut_to_keep(rate: float, share: float) -> None:
    assert BAND.share([rate] * 8) == share
    assert BAND.share([rate] * 7) == 1.0


@given(st.integers(-(2**63), 2**63), st.integers(0, 2**62))
def test_a_draw_is_a_number_below_one_of_seed_and_group_alone(seed: int, group: int) -> None:
    assert draw(seed, group) == draw(seed, group)
    assert 0.0 <= draw(seed, group) < 1.0


def test_draws_are_spread_evenly_and_differ_between_seeds() -> None:
    draws = [draw(3, group) for group in range(10_000)]
    assert abs(sum(each < 0.1 for each in draws) - 1000) < 4 * 30  # four sigma of a binomial
    assert draws != [draw(4, group) for group in range(10_000)]
