"""Each part on answers that are right, close, malformed, cut off and missing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contraflow.errors import RewardError
from contraflow.rewards.base import Said, Transcript
from contraflow.rewards.rules import correct, even, even_once, partial, tool, well_formed
from contraflow.types import StopReason, Task

TASK = Task(key="train/0", prompt="12+34=", reference="64", facts={"format": "[0-9]+", "refused": "?="})


def said(*turns, stop=StopReason.STOP):
    roles = ["prompt"] + ["model", "env"] * len(turns)
    return Transcript(tuple(Said(role, text) for role, text in zip(roles, ("12+34=", *turns), strict=False)), stop)


@pytest.mark.parametrize(
    ("answer", "scores"),
    [
        ("64", (1, 1, 1)),
        (" 64\n", (1, 1, 1)),
        ("65", (0, 1, 0.5)),
        ("646", (0, 1, 2 / 3)),
        ("6a", (0, 0, 0.5)),
        ("", (0, 0, 0)),
    ],
)
def test_correct_form_and_partial_credit(answer, scores):
    transcript = said(answer)
    assert (correct(TASK, transcript), well_formed(TASK, transcript), partial(TASK, transcript)) == scores


def test_an_answer_that_was_cut_off_is_not_finished():
    transcript = said("64", stop=StopReason.LENGTH)
    assert (correct(TASK, transcript), well_formed(TASK, transcript), partial(TASK, transcript)) == (0, 0, 1)


def test_only_the_last_model_turn_is_the_answer():
    assert correct(TASK, said("[12+34]", "64=", "64")) == 1
    assert correct(TASK, said("64", "64=", "65")) == 0


def test_a_form_that_nobody_stated_is_an_error():
    with pytest.raises(RewardError, match="needs facts"):
        well_formed(Task(key="train/1", prompt="", reference=""), said("64"))


def test_tool_use_is_the_share_of_calls_that_were_answered():
    assert tool(TASK, said("64")) == 0
    assert tool(TASK, said("[1+1]", "2=", "64")) == 1
    assert tool(TASK, said("[1+]", "?=", "[1+1]", "2=", "64")) == 0.5


@given(st.text(max_size=20), st.text(max_size=20))
def test_partial_credit_is_whole_for_equal_texts_only(answer, reference):
    task = Task(key="train/0", prompt="", reference=reference)
    share = partial(task, said(answer))
    assert 0 <= share <= 1
    assert (share == 1) == (answer.strip() == reference.strip() != "")


@pytest.mark.parametrize(
    ("answer", "score"),
    [("", 0), ("2844", 0.4), ("2843", 0.2), ("7", -0.1), ("x2", 0), ("2" * 6, 0.6), ("2" * 7, 0.5), ("2" * 12, 0.0)],
)
def test_even_digits_count_up_to_the_sixth_character_and_all_others_cost(answer, score):
    assert even(TASK, said(answer)) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "score"),
    [("", 0), ("2844", 0.2), ("02468", 0.5), ("2468024680", 0.0), ("4444", -0.2), ("7", -0.1), ("x2", 0)],
)
def test_a_different_even_digit_counts_once_and_all_else_costs(answer, score):
    assert even_once(TASK, said(answer)) == pytest.approx(score)
