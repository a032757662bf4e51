"""The alarms of a run: reads its bounds off the reports of steps, and words what sounds.

Takes the `[alarms]` section and one report a step, gives `Heard`s. Decides by `algo.alarms`; does not stop anything.
"""

from typing import NamedTuple

from contraflow import config
from contraflow.algo.alarms import Alarm, Bound, Sound, Streak, sound_alarms
from contraflow.train.report import StepReport

# What is measured, in words and where to look, by setting.
MEANING = {
    "entropy_min": "entropy of the policy, nats a token: it is becoming certain. Lower train.learning_rate, raise"
    " loss.clip_high or loss.entropy_weight",
    "clip_max": "share of tokens whose gradient a clip removed: updates move too far. Lower train.learning_rate,"
    " train.updates or buffer.max_age",
    "effective_min": "effective sample size over sample size: a few tokens count for all. Lower buffer.max_age, or look"
    " by contraflow inspect RUN --mismatch whether engine and trainer agree",
    "kl_max": "KL from the sampling to the trained policy, nats a token: samples are of another policy. Lower"
    " train.learning_rate or buffer.max_age, or look by contraflow inspect RUN"
    " --mismatch whether engine and trainer agree",
    "repetition_max": "share of repeated 4-grams in answers: the model runs in circles. Lower train.learning_rate, or"
    " begin again from an earlier cut with loss.kl_weight above 0",
    "length_growth_max": "mean length of answers over that of the first steps: answers grow without end. Set"
    " loss.overlong, or look at what the reward pays for",
}


class Heard(NamedTuple):
    """One alarm as a journal and people are told."""

    name: str  # the setting
    value: float
    limit: float
    sound: Sound
    text: str


class Alarms:
    """Invariant: the state is a function of the reports heard so far; a new start of a run begins with none."""

    def __init__(self, section: config.Alarms) -> None:
        limits = section.model_dump(exclude={"steps", "action"})
        self._bounds = [Bound(name, limit, name.endswith("_min")) for name, limit in limits.items() if limit > 0]
        self._section = section
        self._streaks: dict[str, Streak] = {}
        self._lengths: list[float] = []  # means of the first steps that trained any answer

    def hear(self, report: StepReport) -> list[Heard]:
        """The alarms that the report sounds. What the step did not measure is left out: nothing trained, no ratios."""
        section = self._section
        values = self._measured(report)
        alarms, self._streaks = sound_alarms(
            self._bounds, values, self._streaks, steps=section.steps, stop=section.action == "stop"
        )
        return [_heard(alarm, report.step, section.steps) for alarm in alarms]

    def _measured(self, report: StepReport) -> dict[str, float]:
        values: dict[str, float] = {}
        if report.updates:
            values |= {
                "entropy_min": report.entropy,
                "clip_max": report.clipped_low + report.clipped_high,
                "effective_min": report.ratio_effective,
                "kl_max": report.behaviour_kl,
            }
        if report.lengths:
            values["repetition_max"] = report.repetition
            mean = sum(report.lengths) / len(report.lengths)
            if len(self._lengths) < self._section.steps:
                self._lengths.append(mean)
            elif first := sum(self._lengths) / len(self._lengths):
                values["length_growth_max"] = mean / first
        return values


def _heard(alarm: Alarm, step: int, steps: int) -> Heard:
    name, limit, floor = alarm.bound
    meaning, _, advice = MEANING[name].partition(". ")
    value = f"{alarm.value:.4g}"
    if alarm.sound == "over":
        text = f"alarm over at step {step}: alarms.{name} = {limit:g}, {value} now"
    else:
        side, rows = "below" if floor else "above", "" if steps == 1 else f" for {steps} steps in a row"
        again = " again" if alarm.sound == "stop" else ""
        text = f"alarm at step {step}: {value} is {side} alarms.{name} = {limit:g}{rows}{again}; it is the {meaning}."
        text += f" {advice}"
    if alarm.sound == "stop":
        text += f"; or move alarms.{name}, or set alarms.action = 'warn', and resume"
    return Heard(name, alarm.value, limit, alarm.sound, text)
