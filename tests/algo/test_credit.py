import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from contraflow.algo.credit import (
    COMPARING_KINDS,
    gae,
    group_scores,
    overlong_penalty,
    returns_to_go,
    token_rewards,
    whitened,
)

finite = st.floats(-100, 100, allow_nan=False, width=32)
rewards = st.lists(finite, min_size=2, max_size=32).map(lambda values: torch.tensor(values, dtype=torch.float64))


def test_grpo_divides_by_the_population_standard_deviation():
    # mean 2, deviations -2 -1 0 3, variance 14 / 4
    advantages = group_scores(torch.tensor([0.0, 1.0, 2.0, 5.0], dtype=torch.float64), kind="grpo")
    expected = torch.tensor([-2.0, -1.0, 0.0, 3.0], dtype=torch.float64) / math.sqrt(3.5)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=0)


def test_dr_grpo_only_subtracts_the_mean():
    advantages = group_scores(torch.tensor([0.0, 1.0, 2.0, 5.0]), kind="dr_grpo")
    assert advantages.tolist() == [-2.0, -1.0, 0.0, 3.0]


@pytest.mark.parametrize("kind", COMPARING_KINDS)
@pytest.mark.parametrize("rewards", [[], [3.0], [0.7] * 8, [0.0] * 4])
def test_a_group_with_nothing_to_compare_gets_exact_zeros(kind, rewards):
    advantages = group_scores(torch.tensor(rewards, dtype=torch.float64), kind=kind)
    assert advantages.tolist() == [0.0] * len(rewards)


def test_rounding_noise_between_equal_rewards_is_no_signal():
    noisy = [0.1 + 0.2, 0.3, 0.1 + 0.2, 0.3]
    assert len(set(noisy)) == 2
    assert group_scores(torch.tensor(noisy, dtype=torch.float64), kind="grpo").tolist() == [0.0] * 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_never_smoothed_over(bad):
    advantages = group_scores(torch.tensor([0.0, 1.0, bad], dtype=torch.float64), kind="grpo")
    assert not torch.isfinite(advantages).any()


@settings(deadline=None)
@given(rewards)
def test_advantages_sum_to_zero_and_grpo_has_unit_spread_or_none(rewards_G):
    advantages_G = group_scores(rewards_G, kind="grpo")
    assert abs(float(advantages_G.sum())) < 1e-6 * len(rewards_G)
    spread = float(advantages_G.square().mean())
    assert spread == 0 or spread == pytest.approx(1, abs=1e-6)


@settings(deadline=None)
@given(rewards, st.floats(0.1, 10), st.floats(-10, 10))
def test_grpo_ignores_the_scale_and_the_offset_of_rewards(rewards_G, scale, offset):
    spread = float((rewards_G - rewards_G.mean()).square().mean().sqrt())
    assume(spread > 1e-2)  # where rounding decides, only exact zeros are promised
    shifted_G = group_scores(rewards_G * scale + offset, kind="grpo")
    torch.testing.assert_close(shifted_G, group_scores(rewards_G, kind="grpo"), rtol=1e-6, atol=1e-6)


def test_rloo_compares_each_episode_with_the_mean_of_the_others():
    rewards_G = torch.tensor([1.0, 0.0, 0.5, 2.0], dtype=torch.float64)
    others = [(rewards_G.sum() - r) / 3 for r in rewards_G]
    expected = torch.stack([r - o for r, o in zip(rewards_G, others, strict=True)])
    torch.testing.assert_close(group_scores(rewards_G, kind="rloo"), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["reinforce", "reinforce++", "gae"])
def test_kinds_that_compare_nothing_keep_the_reward_even_of_one_episode(kind):
    assert group_scores(torch.tensor([0.25]), kind=kind).tolist() == [0.25]


def test_the_last_token_earns_the_reward_and_every_token_pays_its_penalty():
    rewards_N = token_rewards(2.0, torch.tensor([0.5, -0.25, 1.0], dtype=torch.float64))
    assert rewards_N.tolist() == [-0.5, 0.25, 1.0]
    assert returns_to_go(rewards_N).tolist() == [0.75, 1.25, 1.0]
    assert token_rewards(2.0, torch.zeros(0)).shape == returns_to_go(torch.zeros(0)).shape == (0,)


def written_out(rewards, values, last, discount, trace):
    """GAE from its definition: a double sum, in Python floats."""
    ahead = [*values, last][1:]
    errors = [r + discount * a - v for r, a, v in zip(rewards, ahead, values, strict=True)]
    return [sum((discount * trace) ** (j - i) * errors[j] for j in range(i, len(errors))) for i in range(len(errors))]


numbers = st.floats(-3, 3, width=32)


@settings(deadline=None)
@given(st.lists(st.tuples(numbers, numbers), max_size=12), numbers, st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_its_double_sum(steps, last, discount, trace):
    rewards, values = [r for r, _ in steps], [v for _, v in steps]
    found = gae(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(values, dtype=torch.float64),
        last,
        discount=discount,
        trace=trace,
    )
    assert found.advantages_N.tolist() == pytest.approx(written_out(rewards, values, last, discount, trace), abs=1e-9)
    assert found.returns_N.tolist() == pytest.approx(
        [a + v for a, v in zip(found.advantages_N.tolist(), values, strict=True)]
    )


def test_gae_with_full_trace_is_the_return_minus_the_value_and_with_none_the_one_step_error():
    rewards_N, values_N = torch.tensor([0.0, 0.0, 1.0]).double(), torch.tensor([0.2, 0.4, 0.7]).double()
    full = gae(rewards_N, values_N, 0.0, discount=1.0, trace=1.0)
    assert full.advantages_N.tolist() == pytest.approx([0.8, 0.6, 0.3])
    assert full.returns_N.tolist() == pytest.approx([1.0] * 3)
    assert gae(rewards_N, values_N, 0.0, discount=1.0, trace=0.0).advantages_N.tolist() == pytest.approx(
        [0.2, 0.3, 0.3]
    )


def test_an_episode_that_was_cut_off_goes_on_with_the_value_of_where_it_stood():
    values_N = torch.tensor([0.5, 0.5]).double()
    ended, cut = (gae(torch.zeros(2).double(), values_N, last, discount=1.0, trace=1.0) for last in (0.0, 0.5))
    assert ended.advantages_N.tolist() == pytest.approx([-0.5, -0.5])
    assert cut.advantages_N.tolist() == pytest.approx([0.0, 0.0])


@settings(deadline=None)
@given(rewards)
def test_whitening_gives_mean_zero_and_spread_one_or_all_zeros(values_K):
    white_K = whitened(values_K)
    assert abs(float(white_K.mean())) < 1e-6
    assert float(white_K.square().mean()) == pytest.approx(1, abs=1e-6) or not white_K.any()


def test_whitening_nothing_gives_nothing_and_never_hides_what_is_not_finite():
    assert whitened(torch.zeros(0)).shape == (0,)
    assert not torch.isfinite(whitened(torch.tensor([0.0, math.nan, 1.0]))).any()


def test_an_answer_loses_reward_in_a_straight_line_over_the_stated_stretch():
    found = [overlong_penalty(length, begin=10, end=14) for length in (0, 10, 11, 12, 14, 99)]
    assert found == [0.0, 0.0, 0.25, 0.5, 1.0, 1.0]
    assert overlong_penalty(99, begin=0, end=0) == 0.0
