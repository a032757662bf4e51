"""Alarms of a run: bounds of what a step tells, and what happens beyond them."""

from typing import Annotated, Literal

from pydantic import Field

from contraflow.config.base import Count, Section, Share

Bounded = Annotated[float, Field(ge=0)]


class Alarms(Section):
    """Bounds that tell of a run going wrong; 0 is off. See docs/mismatch.md for what to do when one sounds."""

    entropy_min: Bounded = 0.0  # nats a trained token
    clip_max: Share = 0.0  # share of trained tokens whose gradient a clip removed
    effective_min: Share = 0.0  # effective sample size of the ratios new to behaviour policy, over sample size
    kl_max: Bounded = 0.0  # k3 estimate of KL(behaviour, new), nats a trained token
    repetition_max: Share = 0.0  # share of an answer's 4-grams that it has had before, mean over answers
    length_growth_max: Bounded = 0.0  # mean length of answers, over that of the first `steps` steps of this start
    steps: Count = 3  # in a row beyond a bound before a warning, as many more before a stop; within, before all is well
    action: Literal["warn", "stop"] = "warn"  # stop: after a warning, save a cut and end the run
