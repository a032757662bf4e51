"""The reward parts a recipe can name."""

from collections.abc import Mapping

from contraflow.errors import ConfigError
from contraflow.named import find
from contraflow.rewards.base import Part
from contraflow.rewards.mix import Mix
from contraflow.rewards.rules import correct, partial, score, tool, well_formed

PARTS: dict[str, Part] = {
    "correct": correct,
    "format": well_formed,
    "partial": partial,
    "score": score,
    "tool": tool,
}


def make_mix(weights: Mapping[str, float]) -> Mix:
    """The weighted parts a recipe names: each one of `PARTS`, or the user's own `module:PART` or `file.py:PART`.

    `correct` is always measured; unless named it weighs nothing.
    Raises: ConfigError for an unknown part, one that is no function, a weight that is not finite, or all of them 0.
    """
    parts = {name: find(name, PARTS, what="reward part") for name in weights}
    for name, part in parts.items():
        if not callable(part):
            raise ConfigError(f"reward part {name!r} is a {type(part).__name__}; it has to be a function")
    bounded = all(name in PARTS for name in parts)
    return Mix({"correct": correct} | parts, {"correct": 0.0} | dict(weights), bounded=bounded)
