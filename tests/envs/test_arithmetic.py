"""Arithmetic: right answers, a mix that follows its weights, options that are checked."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contraflow.envs.arithmetic import Arithmetic, ArithmeticOptions, Kind, count_carries
from contraflow.envs.registry import make_env
from contraflow.errors import ConfigError

MIXED = {
    "kinds": [
        {"op": "+", "digits_a": 2, "digits_b": 3, "weight": 3.0},
        {"op": "-", "digits_a": 2, "digits_b": 2},
        {"op": "*", "digits_a": 1, "digits_b": 2},
    ],
    "seed": 4,
}


@given(st.integers(0, 10**12), st.sampled_from(["train", "test"]), st.booleans())
def test_references_are_right(index, split, backwards):
    task = make_env("arithmetic", MIXED | {"reversed": backwards}).task(split, index)
    answer = task.reference[::-1] if backwards else task.reference
    assert int(answer) == eval(task.prompt.removesuffix("=")) >= 0


def test_an_answer_is_written_units_first_when_reversed():
    env = make_env("arithmetic", {"kinds": [{"op": "+", "digits_a": 2, "digits_b": 2}]})
    task = env.task("train", 0)
    a, b = task.prompt.removesuffix("=").split("+")
    assert task.reference == str(int(a) + int(b))[::-1]


def test_kinds_follow_their_weights_and_digit_counts():
    env = make_env("arithmetic", MIXED)
    tasks = [env.task("train", index) for index in range(4000)]
    counts = Counter(task.facts["kind"] for task in tasks)
    assert counts["2+3"] / 4000 == pytest.approx(0.6, abs=0.03)
    assert counts["2-2"] / 4000 == pytest.approx(0.2, abs=0.03)
    sums = [task.prompt.removesuffix("=").split("+") for task in tasks if task.facts["kind"] == "2+3"]
    assert {(len(a), len(b)) for a, b in sums} == {(2, 3)}
    assert {a for a, _ in sums} == {str(number) for number in range(10, 100)}


def test_one_digit_operands_reach_zero():
    env = make_env("arithmetic", {"kinds": [{"op": "*", "digits_a": 1, "digits_b": 1}], "test_share": 0.1})
    operands = {part for index in range(2000) for part in env.task("train", index).prompt.removesuffix("=").split("*")}
    assert operands == set("0123456789")


@pytest.mark.parametrize("op", ["+", "-"])
@pytest.mark.parametrize(("low", "high"), [(0, 0), (0, 1), (2, 3), (3, 10)])
def test_the_number_of_carries_can_be_chosen(op, low, high):
    env = make_env(
        "arithmetic", {"kinds": [{"op": op, "digits_a": 4, "digits_b": 4, "min_carries": low, "max_carries": high}]}
    )
    for split in ("train", "test"):
        counts = {int(env.task(split, index).facts["carries"]) for index in range(300)}
        assert counts <= set(range(low, high + 1))
        assert len(counts) > 1 or low == high or op == "-"


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_carries_are_the_digits_that_a_sum_does_not_keep(a, b):
    def digits(number):
        return sum(map(int, str(number)))

    assert digits(a) + digits(b) - digits(a + b) == 9 * count_carries(a, "+", b)  # Kummer: each carry costs nine
    high, low = max(a, b), min(a, b)
    assert count_carries(high, "-", low) == count_carries(high - low, "+", low)


def test_an_operand_pair_is_held_out_in_either_order():
    env = make_env("arithmetic", {"kinds": [{"digits_a": 1, "digits_b": 2}, {"digits_a": 2, "digits_b": 1}]})

    def pairs(split):
        questions = [env.task(split, index).prompt.removesuffix("=").split("+") for index in range(5000)]
        return {frozenset(question) for question in questions}

    assert not pairs("train") & pairs("test")
    assert len(pairs("train") | pairs("test")) > 890  # of 900: both splits together leave next to nothing out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": []}, "unknown key 'env.options.kind'; did you mean 'kinds'?"),
        ({"kinds": []}, "env.options.kinds = "),
        ({"kinds": [{"op": "/"}]}, "env.options.kinds.0.op = '/': input should be '+', '-' or '*'"),
        ({"kinds": [{"digit_a": 1}]}, "unknown key 'env.options.kinds.0.digit_a'; did you mean 'digits_a'?"),
        ({"kinds": [{"digits_a": 0}]}, "env.options.kinds.0.digits_a = 0: input should be greater than or equal to 1"),
        ({"kinds": [{"weight": 0.0}]}, "env.options.kinds.0.weight = 0.0"),
        ({"kinds": [{"op": "*", "min_carries": 1}]}, "carries can be asked for in + and - only"),
        ({"kinds": [{"min_carries": 3, "max_carries": 2}]}, "min_carries = 3 is above max_carries = 2"),
        ({"reversed": "yes"}, "env.options.reversed = 'yes': input should be a valid boolean"),
        ({"seed": object()}, "numbers, strings, booleans, lists and tables only"),
    ],
)
def test_options_that_do_not_fit_are_named(options, message):
    with pytest.raises(ConfigError) as refusal:
        make_env("arithmetic", options)
    assert message in str(refusal.value)


def test_a_kind_without_questions_in_a_split_is_refused_at_once():
    # Thirty questions of this kind, one in a hundred held out: this seed holds out none of them.
    options = ArithmeticOptions(kinds=(Kind(op="+", digits_a=1, digits_b=1, max_carries=0),), test_share=0.01, seed=2)
    with pytest.raises(ConfigError, match=r"env\.options\.kinds\.0: no test question"):
        Arithmetic(options)
