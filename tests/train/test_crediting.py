"""Credit by the token, from a take's samples: worked by hand, and what it refuses."""

import msgspec
import numpy as np
import pytest

from contraflow.config import Critic, Loss
from contraflow.errors import TrainingError
from contraflow.train.crediting import credited
from contraflow.types import Sample


def sample(score, *, trained=(False, True, True, True), behaviour=0.0, reference=None):
    mask = np.array(trained)

    def column(value):
        return np.where(mask, np.float32(value), np.float32(0)).astype(np.float32)

    return Sample(
        tokens=np.arange(len(trained), dtype=np.int32),
        mask=mask,
        behaviour=column(behaviour),
        advantages=column(score),
        versions=np.where(mask, np.int32(0), np.int32(-1)),
        reference=None if reference is None else column(reference),
    )


def advantages(samples, **loss):
    return [one.advantages.tolist() for one in credited(samples, Loss(**loss))]


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_kinds_that_compare_episodes_leave_their_credit_as_it_is(kind):
    given = [sample(0.5), sample(-0.5)]
    assert credited(given, Loss(advantages=kind)) == given


def test_plain_returns_carry_the_reward_to_every_trained_token():
    assert advantages([sample(2.0, trained=(False, True, False, True))], advantages="reinforce") == [[0, 2, 0, 2]]


def test_a_penalty_for_leaving_the_reference_is_paid_by_the_tokens_before_it_too():
    # log(mu / reference) = 0.5 at each of three tokens, times 0.2
    one = sample(1.0, behaviour=-1.0, reference=-1.5)
    (found,) = advantages([one], advantages="reinforce", kl_in="reward", kl_weight=0.2, kl_kind="k1")
    assert found == pytest.approx([0, 0.7, 0.8, 0.9])


def test_reinforce_plus_plus_normalises_over_all_tokens_of_the_take():
    found = advantages([sample(1.0), sample(0.0, trained=(False, True))], advantages="reinforce++")
    # returns 1 1 1 0: mean 3/4, spread sqrt(3)/4
    assert found[0][1:] == pytest.approx([1 / 3**0.5] * 3)
    assert found[1][1:] == pytest.approx([-(3**0.5)])


def test_equal_rewards_of_a_take_teach_nothing_when_normalised():
    assert not np.any(advantages([sample(0.7), sample(0.7)], advantages="reinforce++"))


def test_a_reward_that_is_not_finite_reaches_the_step_for_it_to_refuse():
    found = advantages([sample(np.nan), sample(1.0)], advantages="reinforce++")
    assert np.isnan(found[0][1:]).all()


def test_a_reward_penalty_without_a_look_at_the_reference_is_refused():
    with pytest.raises(TrainingError, match="reference"):
        credited([sample(1.0)], Loss(advantages="reinforce", kl_in="reward", kl_weight=0.1))


def test_nothing_gives_nothing():
    assert credited([], Loss(advantages="reinforce++")) == []


# --- by values -------------------------------------------------------------------------------------------------------

TURNS = (False, True, True, False, False, True, True, True)  # prompt, a turn, two tokens of the environment, a turn


def valued(score, values, *, trained=TURNS, last=None, version=4):
    one = sample(score, trained=trained)
    laid_out = np.zeros(len(trained), np.float32)
    laid_out[one.mask] = values
    return msgspec.structs.replace(
        one, values=laid_out, valued=version, truncated=last is not None, bootstrap=last or 0.0
    )


def by_values(one, **critic):
    (found,) = credited([one], Loss(advantages="gae"), Critic(**({"whiten": False} | critic)), version=4)
    return found.advantages[found.mask].tolist(), found.returns[found.mask].tolist()


def test_by_token_the_environments_tokens_are_passed_over():
    values = [0.1, 0.2, 0.3, 0.4, 0.5]
    advantages, returns = by_values(valued(1.0, values), discount=0.9, trace=0.0)
    assert advantages == pytest.approx([0.08, 0.07, 0.06, 0.05, 0.5])
    assert returns == pytest.approx([a + v for a, v in zip(advantages, values, strict=True)])


def test_by_turn_the_discount_counts_turns_and_every_token_has_what_its_turn_has():
    advantages, returns = by_values(valued(1.0, [0.1, 9, 0.3, 9, 9]), unit="turn", discount=0.5, trace=1.0)
    # second turn: 1 - 0.3; first: 0.5 * 0.3 - 0.1 + 0.5 * 0.7
    assert advantages == pytest.approx([0.4, 0.4, 0.7, 0.7, 0.7])
    assert returns == pytest.approx([0.5, 0.5, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("unit", ["token", "turn"])
def test_an_episode_that_was_cut_off_goes_on_with_the_value_of_where_it_was(unit):
    ended, _ = by_values(valued(0.0, [0.5] * 5), unit=unit, trace=1.0)
    cut_off, _ = by_values(valued(0.0, [0.5] * 5, last=0.8), unit=unit, trace=1.0)
    assert ended == pytest.approx([-0.5] * 5)
    assert cut_off == pytest.approx([0.3] * 5)


def test_returns_are_not_whitened_advantages_are():
    given = [valued(1.0, [0.0] * 5), valued(0.0, [0.0] * 5)]
    found = credited(given, Loss(advantages="gae"), Critic(trace=1.0), version=4)
    assert [one.returns[one.mask].tolist() for one in found] == [[1.0] * 5, [0.0] * 5]
    assert [one.advantages[one.mask].tolist() for one in found] == [[1.0] * 5, [-1.0] * 5]


def test_values_of_another_version_or_none_are_refused():
    with pytest.raises(TrainingError, match=r"missing version: .* 4 .* those of version 3"):
        by_values(valued(1.0, [0.0] * 5, version=3))
    with pytest.raises(TrainingError, match=r"missing version.*none"):
        by_values(sample(1.0, trained=TURNS))


def test_a_value_that_is_infinite_reaches_the_step_for_it_to_refuse():
    assert not np.isfinite(by_values(valued(1.0, [0, np.inf, 0, 0, 0]))[0]).all()
