"""Alarms: when a number of a training step has been beyond its bound for long enough to say so, or to end a run.

Takes bounds and a step's numbers, gives the alarms that sound and what is to be remembered until the next step. Pure;
does not measure anything, and does not act.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Sound = Literal["warn", "stop", "over"]


class Bound(NamedTuple):
    """A number has to stay at or above `limit` (`floor`), or at or below it."""

    name: str
    limit: float
    floor: bool


class Streak(NamedTuple):
    """What is remembered of one number. Invariant: one of `beyond` and `within` is 0."""

    beyond: int = 0  # steps in a row, since the last sound
    within: int = 0
    warned: bool = False


class Alarm(NamedTuple):
    """One number that sounds an alarm in one step: `warn` first, then `stop`; `over` once it is back."""

    bound: Bound
    value: float
    sound: Sound


def sound_alarms(
    bounds: Sequence[Bound], values: Mapping[str, float], before: Mapping[str, Streak], *, steps: int, stop: bool
) -> tuple[list[Alarm], dict[str, Streak]]:
    """The alarms of a step, and what the next step is to be judged with.

    `steps` steps in a row beyond a bound warn, as many more stop (if `stop`), as many in a row within it end a warning.
    A number that `values` does not have was not measured: it neither counts nor breaks a row. One that is not a number
    is beyond every bound.
    """
    alarms, after = list[Alarm](), dict(before)
    for bound in bounds:
        if bound.name in values:
            value = values[bound.name]
            after[bound.name], sound = _judge(bound, value, before.get(bound.name, Streak()), steps, stop)
            alarms += [Alarm(bound, value, sound)] if sound else []
    return alarms, after


def _judge(bound: Bound, value: float, was: Streak, steps: int, stop: bool) -> tuple[Streak, Sound | None]:
    inside = value >= bound.limit if bound.floor else value <= bound.limit
    if inside:
        within = was.within + 1
        return (Streak(), "over") if was.warned and within >= steps else (Streak(0, within, was.warned), None)
    beyond = was.beyond + 1
    if beyond < steps or (was.warned and not stop):
        return Streak(beyond, 0, was.warned), None
    return Streak(0, 0, True), "stop" if was.warned else "warn"
