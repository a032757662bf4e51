"""Settings of the curriculum: which tasks are left out before they are sampled."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from contraflow.config.base import Count, Section


class Curriculum(Section):
    """Kinds of tasks that are hardly ever or nearly always solved are left out, but for a share."""

    by: str = ""  # the fact of a task that names its kind, such as "kind"; empty: every task is sampled
    low: float = 0.1  # mean solve rate (the part `correct`, else the reward) below which a kind is left out
    high: float = 0.9  # and above which
    keep: Annotated[float, Field(gt=0, le=1)] = 0.1  # share of such a kind that is sampled all the same, and measured
    look: Count = 64  # the last so many groups of a kind are its solve rate
    least: Count = 8  # measured groups before a kind can be left out
    seed: int = 0  # of the draws that choose the share

    @model_validator(mode="after")
    def _can_be(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low = {self.low} is above high = {self.high}: every kind would be left out")
        if self.least > self.look:
            raise ValueError(f"least = {self.least} is above look = {self.look}: no kind would ever be left out")
        return self
