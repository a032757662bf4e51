"""The calculator's parser against Python's own, and what it refuses."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contraflow.envs.expression import MAX_CHARS, evaluate

NUMBERS = st.integers(-9999, 9999)


@given(NUMBERS, st.lists(st.tuples(st.sampled_from("+-*"), NUMBERS), max_size=7))
def test_values_are_those_of_python(first, rest):
    text = str(first) + "".join(f"{op}{number}" for op, number in rest)
    assert evaluate(text, max_operands=8) == eval(text)  # the oracle; the parser itself never runs text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "+",
        "1+",
        "*2",
        "1**2",
        "1 + 2",
        "(1)",
        "1/2",
        "--1",
        "1e3",
        "0x10",
        "²",
        "١",
        "1_0",
        "1\n",
        "[1]",
        "1.5",
        "a",
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="joined by"):
        evaluate(text, max_operands=8)


@given(st.text(max_size=80))
def test_no_text_gives_anything_but_a_number_or_a_value_error(text):
    with contextlib.suppress(ValueError):
        assert isinstance(evaluate(text, max_operands=3), int)


def test_limits_name_what_is_allowed():
    with pytest.raises(ValueError, match="3 operands; at most 2"):
        evaluate("1+2+3", max_operands=2)
    with pytest.raises(ValueError, match=f"at most {MAX_CHARS}"):
        evaluate("1" * 65, max_operands=2)
