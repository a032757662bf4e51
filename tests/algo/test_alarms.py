"""Alarms sound after enough steps in a row, and no sooner; the state machine is held to a plain recount."""

import math

from hypothesis import given
from hypothesis import strategies as st

from contraflow.algo.alarms import Bound, sound_alarms

FLOOR, CEILING = Bound("entropy", 0.5, True), Bound("kl", 0.5, False)


def sounds(values, *, bound=FLOOR, steps=3, stop=True):
    streaks, told = {}, []
    for value in values:
        measured = {} if value is None else {bound.name: value}
        alarms, streaks = sound_alarms([bound], measured, streaks, steps=steps, stop=stop)
        told.append(alarms[0].sound if alarms else "")
    return told


def test_it_warns_after_enough_steps_in_a_row_and_stops_after_as_many_more() -> None:
    assert sounds([0.1] * 6) == ["", "", "warn", "", "", "stop"]


def test_one_good_step_begins_the_row_anew() -> None:
    assert sounds([0.1, 0.1, 0.9, 0.1, 0.1, 0.1]) == ["", "", "", "", "", "warn"]


def test_a_warning_stands_until_enough_good_steps_in_a_row() -> None:
    values = [0.1] * 3 + [0.9, 0.1, 0.9, 0.9, 0.9] + [0.1] * 3
    assert sounds(values) == ["", "", "warn", "", "", "", "", "over", "", "", "warn"]


def test_a_warning_alone_never_stops_and_is_told_once() -> None:
    assert sounds([0.1] * 20, stop=False) == ["", "", "warn", *[""] * 17]


def test_what_was_not_measured_neither_counts_nor_breaks_a_row() -> None:
    assert sounds([0.1, None, 0.1, None, None, 0.1]) == ["", "", "", "", "", "warn"]


def test_the_bound_itself_is_within_and_no_number_is_beyond() -> None:
    assert sounds([0.5] * 4, steps=1) == [""] * 4
    assert sounds([0.5] * 4, steps=1, bound=CEILING) == [""] * 4
    assert sounds([math.nan, math.nan], steps=1) == ["warn", "stop"]
    assert sounds([math.nan, math.inf], steps=1, bound=CEILING) == ["warn", "stop"]


def test_numbers_do_not_mix() -> None:
    alarms, _ = sound_alarms([FLOOR, CEILING], {"entropy": 0.1, "kl": 0.1}, {}, steps=1, stop=True)
    assert [(alarm.bound.name, alarm.value, alarm.sound) for alarm in alarms] == [("entropy", 0.1, "warn")]


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 4))
def test_every_warning_and_stop_ends_a_row_of_bad_steps(bad: list[bool], steps: int) -> None:
    told = sounds([0.1 if one else 0.9 for one in bad], steps=steps)
    for place, sound in enumerate(told):
        last = bad[max(0, place - steps + 1) : place + 1]
        if sound:
            assert len(last) == steps
            assert all(last) if sound in ("warn", "stop") else not any(last)
    loud = [sound for sound in told if sound]
    assert "stop" not in loud or loud[loud.index("stop") - 1] in ("warn", "stop")
    rows = [place for place in range(len(bad)) if place + 1 >= steps and all(bad[place - steps + 1 : place + 1])]
    assert bool(rows) == ("warn" in loud)
    if rows:
        assert told[rows[0]] == "warn"
