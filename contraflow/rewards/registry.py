"""The reward parts a recipe can name."""

import os
import time
from collections.abc import Mapping

from contraflow.config import Judge
from contraflow.errors import ConfigError
from contraflow.named import find
from contraflow.rewards.base import Part
from contraflow.rewards.judge import open_judge
from contraflow.rewards.mix import Mix
from contraflow.rewards.rules import correct, partial, score, tool, well_formed

PARTS: dict[str, Part] = {
    "correct": correct,
    "format": well_formed,
    "partial": partial,
    "score": score,
    "tool": tool,
}


def make_mix(weights: Mapping[str, float], *, judge: Judge | None = None) -> Mix:
    """The weighted parts a recipe names: each one of `PARTS`, `judge`, or the user's own `module:PART` or
    `file.py:PART`.

    `judge` says whom the part of that name asks; its key is read from the environment here. `correct` is always
    measured; unless named it weighs nothing.
    Raises: ConfigError for an unknown part, one that is no function, a weight that is not finite, or all of them 0.
    """
    known = dict(PARTS)
    if "judge" in weights:
        known["judge"] = open_judge(judge or Judge(), os.environ, time.monotonic)
    parts = {name: find(name, known, what="reward part") for name in weights}
    for name, part in parts.items():
        if not callable(part):
            raise ConfigError(f"reward part {name!r} is a {type(part).__name__}; it has to be a function")
    bounded = all(name in PARTS for name in parts)
    return Mix({"correct": correct} | parts, {"correct": 0.0} | dict(weights), bounded=bounded)
