"""The window as a pure decision, and the rule against every small case."""

from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from contraflow.buffer.window import Window
from contraflow.config import Buffer

Policy = Literal["hold", "mask", "repose"]


@dataclass(frozen=True)
class Group:
    group: int
    oldest: int
    newest: int


def groups(*oldest: int, first: int = 0) -> list[Group]:
    return [Group(first + i, n, n) for i, n in enumerate(oldest)]


def window(policy: Policy = "hold", groups_per_step: int = 2, max_age: int = 1) -> Window:
    return Window(policy=policy, groups_per_step=groups_per_step, max_age=max_age)


def test_a_window_is_what_the_recipe_says() -> None:
    section = Buffer(groups_per_step=3, max_age=4, expiry="mask")
    assert Window.of(section) == Window(policy="mask", groups_per_step=3, max_age=4)


@pytest.mark.parametrize("policy", ["hold", "mask", "repose"])
def test_nothing_leaves_until_a_whole_step_is_ready(policy: Policy) -> None:
    decision = window(policy).decide(0, groups(0), groups(0, 0, first=1))
    assert (decision.chosen, decision.missing, decision.among, decision.up_to) == ((), 1, (1, 2), None)


@pytest.mark.parametrize("policy", ["hold", "mask", "repose"])
def test_the_oldest_leave_first_and_the_lower_index_breaks_a_tie(policy: Policy) -> None:
    ready = [Group(7, 2, 2), Group(9, 1, 1), Group(3, 2, 2)]
    assert window(policy).decide(2, ready, []).chosen == (9, 3)


def test_hold_waits_for_the_running_group_that_a_later_step_could_not_train() -> None:
    ready, running = [Group(2, 0, 0), Group(4, 1, 1), Group(5, 1, 1)], [Group(3, 0, 0)]
    decision = window("hold").decide(1, ready, running)
    assert (decision.chosen, decision.missing, decision.among, decision.up_to) == ((), 1, (3,), 0)
    assert window("mask").decide(1, ready, running).chosen == (2, 4)
    assert window("repose").decide(1, ready, running).chosen == (2, 4)


def test_hold_waits_also_for_groups_that_only_together_are_too_many_for_the_steps_to_come() -> None:
    running = groups(1, 1, 1, first=10)  # due at step 3; after step 1 only steps 2 and 3 are left
    decision = window("hold", groups_per_step=1, max_age=2).decide(1, groups(2), running)
    assert (decision.missing, decision.among, decision.up_to) == (1, (10, 11, 12), 1)
    assert window("hold", groups_per_step=1, max_age=2).decide(1, groups(2), running[:2]).chosen == (0,)


def test_mask_gives_up_a_group_only_when_all_its_tokens_are_too_old() -> None:
    ready = [Group(0, 0, 0), Group(1, 0, 3), Group(2, 3, 3)]
    decision = window("mask").decide(4, ready, groups(0, first=5))
    assert (decision.expired, decision.chosen) == ((0,), (1, 2))
    assert window("mask").floor(4) == 3


def test_repose_gives_up_ready_and_running_groups_past_their_deadline() -> None:
    ready = [Group(0, 0, 3), Group(1, 3, 3), Group(2, 4, 4)]
    decision = window("repose").decide(4, ready, groups(2, 3, first=5))
    assert (decision.expired, decision.chosen) == ((0, 5), (1, 2))
    short = window("repose").decide(4, ready[:2], groups(2, 3, first=5))
    assert (short.expired, short.chosen, short.missing, short.among) == ((0, 5), (), 1, (6,))


def test_the_floor_is_never_below_the_first_version() -> None:
    assert window(max_age=3).floor(2) == 0


def schedulable(held: list[Group], step: int, per_step: int, max_age: int) -> bool:
    """By brute force over what each step trains: can all groups be trained by their deadlines?"""
    if not held:
        return True
    if any(each.oldest + max_age < step for each in held):
        return False
    size = min(per_step, len(held))
    return any(
        schedulable([each for each in held if each not in picked], step + 1, per_step, max_age)
        for picked in combinations(held, size)
    )


small = st.tuples(st.lists(st.integers(0, 3), max_size=6), st.integers(0, 4), st.integers(1, 3), st.integers(0, 3))


@given(small)
def test_feasible_says_whether_some_order_of_steps_trains_every_group_in_time(
    case: tuple[list[int], int, int, int],
) -> None:
    oldest, step, per_step, max_age = case
    held = groups(*oldest)
    expected = schedulable(held, step, per_step, max_age)
    assert window(groups_per_step=per_step, max_age=max_age).feasible(step, held) == expected


@given(small, st.lists(st.integers(0, 3), max_size=6))
def test_hold_waits_only_when_no_choice_of_ready_groups_would_do_and_for_groups_that_help(
    case: tuple[list[int], int, int, int], more: list[int]
) -> None:
    oldest, step, per_step, max_age = case
    rule = window(groups_per_step=per_step, max_age=max_age)
    ready, running = groups(*oldest), groups(*more, first=len(oldest))
    assume(rule.feasible(step, ready + running) and len(ready) >= per_step)
    decision = rule.decide(step, ready, running)
    good = [
        picked
        for picked in combinations(ready, per_step)
        if rule.feasible(step + 1, [each for each in ready + running if each not in picked])
    ]
    assert bool(decision.chosen) == bool(good)
    if decision.chosen:
        assert {each.group for each in ready if each.group in decision.chosen} in [{e.group for e in p} for p in good]
    else:
        assert len(decision.among) >= decision.missing > 0
        assert set(decision.among) <= {each.group for each in running}
    assert rule.decide(step, ready + running, []).chosen  # so waiting for running groups is always enough


@given(st.data())
def test_a_restart_keeps_as_many_groups_as_any_choice_could_and_what_it_keeps_is_feasible(data: st.DataObject) -> None:
    eta, per_step, step = (data.draw(st.integers(low, high)) for low, high in ((0, 3), (1, 2), (0, 5)))
    rule = window("hold", per_step, eta)
    ages = data.draw(st.lists(st.integers(step - eta - 2, step), max_size=7))
    held = [Group(group, oldest, oldest) for group, oldest in enumerate(ages)]
    kept = rule.admit(step, held)
    assert rule.feasible(step, [each for each in held if each.group in kept])
    sizes = [
        count for count in range(len(held) + 1) for choice in combinations(held, count) if rule.feasible(step, choice)
    ]
    assert len(kept) == max(sizes)
