"""Tokens of values: equal exactly where Python says equal."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contraflow.rewards.sandbox.values import number_of, tokens_of

NUMBERS = st.one_of(
    st.booleans(), st.integers(), st.integers(-3, 3), st.floats(allow_nan=False), st.floats(-2, 2, width=16)
)
HASHABLE = st.recursive(
    st.one_of(st.none(), NUMBERS, st.text(max_size=3), st.binary(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3).map(tuple), st.frozensets(inner, max_size=3)),
    max_leaves=6,
)
VALUES = st.recursive(
    HASHABLE,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.sets(HASHABLE, max_size=3),
        st.dictionaries(HASHABLE, inner, max_size=3),
    ),
    max_leaves=12,
)


@settings(max_examples=150)
@given(VALUES, VALUES)
def test_values_have_equal_tokens_exactly_when_they_are_equal(one, other):
    assert (tokens_of(one) == tokens_of(other)) == (one == other)


@given(st.permutations(["a", "b", "c", (1, 2), frozenset({1}), None]))
def test_the_order_of_a_set_or_of_a_dicts_keys_is_no_matter(items):
    assert tokens_of(set(items)) == tokens_of(frozenset(reversed(items)))
    assert tokens_of(dict.fromkeys(items, 1)) == tokens_of(dict.fromkeys(sorted(items, key=str), 1.0))


@pytest.mark.parametrize(
    ("one", "other"), [(["a", "b"], [["a"], "b"]), ([], [[]]), ("n1", 1), ("", []), (["end"], [[]])]
)
def test_no_value_can_be_spelt_as_another(one, other):
    assert tokens_of(one) != tokens_of(other)


@given(st.one_of(st.integers(-(2**60), 2**60), st.floats(allow_nan=False)))
def test_a_number_comes_back(number):
    assert number_of(tokens_of(number)[0]) == float(number)


@pytest.mark.parametrize("token", ["s1", "nzz", "n", "none", "[", "n0x", "n" + "f" * 300])
def test_a_token_that_is_no_number_is_refused(token):
    with pytest.raises((ValueError, OverflowError)):
        number_of(token)


def test_what_a_subclass_says_of_itself_is_not_asked():
    class Mine(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    for value in (Mine(1), object(), iter([]), range(3), [Mine(2)], 1j):
        with pytest.raises(TypeError, match="none of the types"):
            tokens_of(value)
    assert tokens_of(math.nan) != tokens_of(1.0)
