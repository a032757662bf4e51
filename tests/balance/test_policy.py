"""What the policy advises: each rule by a hand-made look, then laws for any sequence of looks."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contraflow.balance.policy import BARRED, PATIENCE, Bounds, Measured, Memory, Setting, steer

BOUNDS = Bounds(groups_per_step=8, tickets=24, concurrency=(1, 32), workers=(1, 4))
SETTING = Setting(concurrency=8, workers=2, tickets=24)
CAPPED = Measured(finished=2.0, waits=0.5, busy=0.3, playing=16.0, free=6, serving=2)


def advised(now: Measured, setting: Setting = SETTING, memory: Memory | None = None) -> tuple[Setting, str]:
    advice = steer(now, setting, BOUNDS, memory or Memory())
    return advice.setting, advice.reason


@pytest.mark.parametrize(
    ("now", "changed", "because"),
    [
        (CAPPED, {"concurrency": 12}, "all 16 places are taken"),
        (replace(CAPPED, busy=0.95), {"workers": 3}, "engines compute 95%"),
        (replace(CAPPED, waits=0.05), {}, "in balance"),
        (replace(CAPPED, playing=9.0), {}, "held back by what a step costs"),
        (replace(CAPPED, free=0), {"workers": 3}, "no ticket is free"),
        (replace(CAPPED, preempted=3), {"concurrency": 6}, "3 sequences preempted"),
        (replace(CAPPED, kv_held=0.99), {"concurrency": 6}, "99% held"),
    ],
)
def test_one_look_moves_the_lever_that_binds(now: Measured, changed: dict[str, int], because: str) -> None:
    setting, reason = advised(now)
    assert setting == replace(SETTING, **changed)
    assert because in reason


def test_tickets_that_were_held_back_are_given_before_anything_else() -> None:
    setting, reason = advised(replace(CAPPED, free=0), replace(SETTING, tickets=12))
    assert setting.tickets == 20
    assert "no ticket is free" in reason


def test_a_raise_that_brought_nothing_is_taken_back_and_let_be_for_a_while() -> None:
    raised = steer(CAPPED, SETTING, BOUNDS, Memory())
    settled = steer(CAPPED, raised.setting, BOUNDS, raised.memory)
    assert settled.setting == raised.setting
    back = steer(CAPPED, settled.setting, BOUNDS, settled.memory)
    assert back.setting == SETTING
    assert "concurrency back to 8: with 12" in back.reason
    setting, memory, kept = back.setting, back.memory, 0
    while setting == SETTING and kept < 3 * BARRED:
        advice = steer(CAPPED, setting, BOUNDS, memory)
        setting, memory, kept = advice.setting, advice.memory, kept + 1
    assert (setting.concurrency, kept) == (12, BARRED)


def test_a_raise_that_paid_stays() -> None:
    raised = steer(CAPPED, SETTING, BOUNDS, Memory())
    settled = steer(CAPPED, raised.setting, BOUNDS, raised.memory)
    better = replace(CAPPED, finished=2.6, playing=24.0)
    assert steer(better, settled.setting, BOUNDS, settled.memory).setting.concurrency == 18


def test_a_worker_leaves_only_after_it_was_not_needed_for_a_while() -> None:
    idle = replace(CAPPED, waits=0.0, busy=0.2)
    memory, settings_seen = Memory(), []
    for _ in range(PATIENCE):
        advice = steer(idle, SETTING, BOUNDS, memory)
        memory = advice.memory
        settings_seen.append(advice.setting.workers)
    assert settings_seen == [2] * (PATIENCE - 1) + [1]
    busy_between = [idle, replace(idle, busy=0.6), idle, idle]
    memory = Memory()
    for now in busy_between:
        advice = steer(now, SETTING, BOUNDS, memory)
        memory = advice.memory
        assert advice.setting == SETTING


looks = st.builds(
    Measured,
    finished=st.floats(0, 100),
    waits=st.floats(0, 1),
    busy=st.floats(0, 1),
    playing=st.floats(0, 200),
    free=st.integers(0, 24),
    kv_held=st.floats(0, 1),
    preempted=st.integers(0, 5),
    serving=st.integers(0, 4),
)
anything = st.builds(Setting, concurrency=st.integers(0, 99), workers=st.integers(0, 9), tickets=st.integers(0, 99))


@settings(max_examples=200, deadline=None)
@given(start=anything, seen=st.lists(looks, min_size=1, max_size=30))
def test_whatever_is_measured_the_setting_stays_within_bounds_and_says_why(
    start: Setting, seen: list[Measured]
) -> None:
    setting, memory, changed_before = start, Memory(), False
    for now in seen:
        advice = steer(now, setting, BOUNDS, memory)
        assert advice.setting == BOUNDS.within(advice.setting)
        assert BOUNDS.groups_per_step <= advice.setting.tickets <= BOUNDS.tickets
        assert advice.reason
        changed = advice.setting != setting
        assert not (changed and changed_before), "a change had no time to take effect"
        moved = sum(getattr(advice.setting, each) != getattr(setting, each) for each in vars(setting))
        assert moved <= 1 or "within bounds" in advice.reason
        setting, memory, changed_before = advice.setting, advice.memory, changed


@settings(max_examples=50, deadline=None)
@given(noise=st.lists(st.floats(0.97, 1.03), min_size=60, max_size=60))
def test_noise_about_a_balanced_run_moves_nothing(noise: list[float]) -> None:
    setting, memory = SETTING, Memory()
    for factor in noise:
        now = Measured(finished=2 * factor, waits=0.05 * factor, busy=0.8 * factor, playing=12, free=3, serving=2)
        advice = steer(now, setting, BOUNDS, memory)
        setting, memory = advice.setting, advice.memory
        assert setting == SETTING
