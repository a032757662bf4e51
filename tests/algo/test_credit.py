import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from contraflow.algo.credit import group_advantages

finite = st.floats(-100, 100, allow_nan=False, width=32)
rewards = st.lists(finite, min_size=2, max_size=32).map(lambda values: torch.tensor(values, dtype=torch.float64))


def test_grpo_divides_by_the_population_standard_deviation():
    # mean 2, deviations -2 -1 0 3, variance 14 / 4
    advantages = group_advantages(torch.tensor([0.0, 1.0, 2.0, 5.0], dtype=torch.float64), kind="grpo")
    expected = torch.tensor([-2.0, -1.0, 0.0, 3.0], dtype=torch.float64) / math.sqrt(3.5)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=0)


def test_centred_only_subtracts_the_mean():
    advantages = group_advantages(torch.tensor([0.0, 1.0, 2.0, 5.0]), kind="centred")
    assert advantages.tolist() == [-2.0, -1.0, 0.0, 3.0]


@pytest.mark.parametrize("kind", ["grpo", "centred"])
@pytest.mark.parametrize("rewards", [[], [3.0], [0.7] * 8, [0.0] * 4])
def test_a_group_with_nothing_to_compare_gets_exact_zeros(kind, rewards):
    advantages = group_advantages(torch.tensor(rewards, dtype=torch.float64), kind=kind)
    assert advantages.tolist() == [0.0] * len(rewards)


def test_rounding_noise_between_equal_rewards_is_no_signal():
    noisy = [0.1 + 0.2, 0.3, 0.1 + 0.2, 0.3]
    assert len(set(noisy)) == 2
    assert group_advantages(torch.tensor(noisy, dtype=torch.float64), kind="grpo").tolist() == [0.0] * 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_never_smoothed_over(bad):
    advantages = group_advantages(torch.tensor([0.0, 1.0, bad], dtype=torch.float64), kind="grpo")
    assert not torch.isfinite(advantages).any()


@settings(deadline=None)
@given(rewards)
def test_advantages_sum_to_zero_and_grpo_has_unit_spread_or_none(rewards_G):
    advantages_G = group_advantages(rewards_G, kind="grpo")
    assert abs(float(advantages_G.sum())) < 1e-6 * len(rewards_G)
    spread = float(advantages_G.square().mean())
    assert spread == 0 or spread == pytest.approx(1, abs=1e-6)


@settings(deadline=None)
@given(rewards, st.floats(0.1, 10), st.floats(-10, 10))
def test_grpo_ignores_the_scale_and_the_offset_of_rewards(rewards_G, scale, offset):
    spread = float((rewards_G - rewards_G.mean()).square().mean().sqrt())
    assume(spread > 1e-2)  # where rounding decides, only exact zeros are promised
    shifted_G = group_advantages(rewards_G * scale + offset, kind="grpo")
    torch.testing.assert_close(shifted_G, group_advantages(rewards_G, kind="grpo"), rtol=1e-6, atol=1e-6)
