"""Weighted sums, and every way in which a part can break."""

import math

import numpy as np
import pytest

from contraflow.errors import ConfigError, RewardError
from contraflow.rewards.base import Said, Transcript
from contraflow.rewards.mix import Mix
from contraflow.rewards.registry import make_mix
from contraflow.types import StopReason, Task

TASK = Task(key="train/0", prompt="1+1=", reference="2", facts={"format": "[0-9]+"})
RIGHT = Transcript((Said("prompt", "1+1="), Said("model", "2")), StopReason.STOP)
WRONG = Transcript((Said("prompt", "1+1="), Said("model", "3")), StopReason.STOP)


def mix_of(part):
    return Mix({"mine": part}, {"mine": 2.0}, bounded=False)


def test_the_reward_is_the_weighted_sum_and_parts_are_told():
    mix = make_mix({"correct": 1.0, "format": 0.5})
    assert mix.score(TASK, RIGHT) == (1.5, {"correct": 1.0, "format": 1.0})
    assert mix.score(TASK, WRONG) == (0.5, {"correct": 0.0, "format": 1.0})


def test_correct_is_measured_even_when_it_weighs_nothing():
    assert make_mix({"format": 1.0}).score(TASK, WRONG) == (1.0, {"correct": 0.0, "format": 1.0})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_a_score_that_is_not_finite_is_named(value):
    with pytest.raises(RewardError, match=r"part 'mine' gave (nan|inf|-inf)"):
        mix_of(lambda task, transcript: value).score(TASK, RIGHT)


@pytest.mark.parametrize("value", [None, "1.0", [1.0], 1j, np.zeros(2)])
def test_a_score_that_is_no_number_is_named(value):
    with pytest.raises(RewardError, match=r"part 'mine' gave a .*, not a number"):
        mix_of(lambda task, transcript: value).score(TASK, RIGHT)


@pytest.mark.parametrize("value", [1, True, np.float32(1), np.int64(1), 1.0])
def test_any_real_number_is_a_score(value):
    assert mix_of(lambda task, transcript: value).score(TASK, RIGHT) == (2.0, {"mine": 1.0})


def test_a_part_that_raises_is_named():
    def broken(task, transcript):
        raise KeyError("gone")

    with pytest.raises(RewardError, match="part 'mine' raised KeyError: 'gone'"):
        mix_of(broken).score(TASK, RIGHT)


def test_a_weighted_sum_that_is_not_finite_is_refused():
    def huge(task, transcript):
        return 1e200

    mix = Mix({"huge": huge}, {"huge": 1e200}, bounded=True)
    with pytest.raises(RewardError, match=r"the weighted sum of \{'huge': 1e\+200\} is inf"):
        mix.score(TASK, RIGHT)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"corect": 1.0}, "unknown reward part 'corect'; did you mean 'correct'?"),
        ({"correct": math.nan}, "reward.parts.correct = nan: a weight is a finite number"),
        ({"correct": 0.0}, "at least one weight has to differ from 0"),
        ({}, "at least one weight has to differ from 0"),
        ({"math:pi": 1.0}, "reward part 'math:pi' is a float; it has to be a function"),
    ],
)
def test_a_mix_that_cannot_be_is_refused(weights, message):
    with pytest.raises(ConfigError) as refusal:
        make_mix(weights)
    assert message in str(refusal.value)


def test_only_shipped_parts_are_promised_to_be_quick(tmp_path):
    (tmp_path / "parts.py").write_text("def always(task, transcript): return 1.0")
    mine = f"{tmp_path}/parts.py:always"
    assert make_mix({"correct": 1.0}).bounded
    mix = make_mix({mine: 1.0})
    assert not mix.bounded
    assert mix.score(TASK, WRONG) == (1.0, {"correct": 0.0, mine: 1.0})
