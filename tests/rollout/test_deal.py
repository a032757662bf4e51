"""Requests go to the rank with the least to do, and a group's requests stay together."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from contraflow.rollout.deal import Dealer
from contraflow.types import Request


def request(prompt: int = 4, new: int = 6, group: str = "") -> Request:
    return Request(id="", prompt=np.zeros(prompt, np.int32), seed=0, max_new_tokens=new, group=group)


def test_each_goes_to_the_rank_with_the_fewest_tokens_and_the_first_of_equals() -> None:
    dealer = Dealer(3)
    assert [dealer.deal(request(new=new)) for new in (6, 20, 1, 1, 1)] == [0, 1, 2, 2, 0]


def test_a_group_stays_together_and_is_found_again_when_all_of_it_is_done() -> None:
    dealer = Dealer(2)
    homes = {group: dealer.deal(request(group=group)) for group in ("a", "b")}
    assert homes == {"a": 0, "b": 1}
    assert [dealer.deal(request(group="a", new=100)) for _ in range(3)] == [0, 0, 0]
    for _ in range(3):
        dealer.done(request(group="a", new=100), 0)
    dealer.done(request(group="b"), 1)
    assert dealer.deal(request(group="b")) == 1  # its past is there, though rank 1 has the same to do
    assert dealer.load == [10, 10]


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(-5, 5)), max_size=60), st.integers(1, 5))
def test_loads_return_to_nothing_and_no_rank_is_far_ahead(asked: list[tuple[int, int, int]], ranks: int) -> None:
    dealer, flying = Dealer(ranks), []
    for prompt, new, group in asked:
        asked_for = request(prompt, new, str(group) if group > 0 else "")
        before = list(dealer.load)
        rank = dealer.deal(asked_for)
        if not asked_for.group:
            assert before[rank] == min(before)
        flying.append((asked_for, rank))
    for asked_for, rank in flying:
        dealer.done(asked_for, rank)
    assert dealer.load == [0] * ranks
