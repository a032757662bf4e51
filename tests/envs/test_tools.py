"""The calculator: a whole episode by hand, refused calls, the end of calls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contraflow.envs.base import Observation
from contraflow.envs.registry import make_env
from contraflow.errors import ConfigError

THREE = {"kinds": [{"operands": 3, "digits": 2}]}


def session(**options):
    env = make_env("calculator", THREE | options)
    return env.open(env.task("train", 0))


def test_an_episode_calls_reads_and_answers():
    calls = session()
    assert calls.step("[34*5]") == Observation("170=", done=False)
    assert calls.step("[12+170]") == Observation("182=", done=False)
    assert calls.step("182") == Observation("", done=True)


@pytest.mark.parametrize("call", ["[1+2", "1+2]", "]1+2[", "[]", "[1+]", "[2+2]4", "[[1+2]]", "[1+2+3]", "[9/3]"])
def test_a_call_that_cannot_be_worked_out_is_refused_and_the_episode_goes_on(call):
    calls = session()
    assert calls.step(call) == Observation("?=", done=False)
    assert calls.step("[1+2]") == Observation("3=", done=False)


def test_calls_end_after_the_allowed_number():
    calls = session(max_calls=2)
    assert not calls.step("[1+1]").done
    assert not calls.step("oops[").done
    assert calls.step("[1+1]") == Observation("", done=True)


def test_more_operands_a_call_can_be_allowed():
    assert session(operands_per_call=3).step("[12+34*5]") == Observation("182=", done=False)


@given(st.integers(0, 10**12), st.sampled_from(["train", "test"]))
def test_references_are_right(index, split):
    env = make_env("calculator", {"kinds": [{"operands": 4, "digits": 1}, {"operands": 2, "digits": 3}]})
    task = env.task(split, index)
    assert int(task.reference) == eval(task.prompt.removesuffix("="))


@given(st.text(alphabet="0123456789+-*[]=? ", max_size=70))
def test_any_action_gets_an_observation(action):
    assert isinstance(session().step(action), Observation)


def test_a_call_with_a_huge_value_still_fits_an_answer():
    observation = session().step(f"[{'9' * 31}*{'9' * 31}]")
    assert len(observation.text) == 63


def test_operators_outside_the_table_are_refused():
    with pytest.raises(ConfigError, match=r"env\.options\.kinds\.0\.ops\.0 = '/'"):
        make_env("calculator", {"kinds": [{"ops": ["/"]}]})
