"""Several named parts make one reward: their weighted sum. Broken parts are named, never averaged away."""

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import msgspec

from contraflow.errors import ConfigError, RewardError
from contraflow.rewards.base import Part, Transcript
from contraflow.types import Task


class Slow(msgspec.Struct, frozen=True):
    """What parts that run programs need: so many calls at once, so many seconds for one, and to be closed."""

    at_once: int
    deadline_s: float
    close: Callable[[], None]


class Mix:
    """Weighted parts. `bounded` promises that every part returns in microseconds, so it may run on an event loop.

    Invariant: `parts` and `weights` have the same names, and some weight is not zero.
    """

    def __init__(
        self,
        parts: Mapping[str, Part],
        weights: Mapping[str, float],
        *,
        bounded: bool,
        slow: Slow | None = None,
        correct: str = "correct",
    ) -> None:
        """`slow`: what parts that run programs ask of the caller. The score of part `correct` is told as such."""
        for name, weight in weights.items():
            if not math.isfinite(weight):
                raise ConfigError(f"reward.parts.{name} = {weight}: a weight is a finite number")
        if not any(weights.values()):
            raise ConfigError(f"reward.parts = {dict(weights)}: at least one weight has to differ from 0")
        self._parts = dict(parts)
        self._weights = dict(weights)
        self._correct = correct
        self.bounded = bounded
        self.slow = slow

    def score(self, task: Task, transcript: Transcript) -> tuple[float, dict[str, float]]:
        """The weighted sum, and every part by name.

        Raises: RewardError naming the part that raised, gave no number, or gave one that is not finite.
        """
        scores = {name: _call(name, part, task, transcript) for name, part in self._parts.items()}
        if self._correct in scores:
            scores["correct"] = scores[self._correct]
        total = sum(self._weights[name] * score for name, score in scores.items())
        if not math.isfinite(total):
            raise RewardError(f"the weighted sum of {scores} is {total}")
        return total, scores

    def close(self) -> None:
        """End what parts keep running. Only `score` is not allowed afterwards."""
        if self.slow is not None:
            self.slow.close()


def _call(name: str, part: Part, task: Task, transcript: Transcript) -> float:
    try:
        score: Any = part(task, transcript)
    except RewardError:
        raise
    except Exception as fault:
        raise RewardError(f"part {name!r} raised {type(fault).__name__}: {fault}") from fault
    if not isinstance(score, Real):  # numpy's and bool scalars are real numbers too
        raise RewardError(f"part {name!r} gave a {type(score).__name__}, not a number")
    number = float(score)
    if not math.isfinite(number):
        raise RewardError(f"part {name!r} gave {number}")
    return number
