"""The reward parts a recipe can name."""

import os
import time
from collections.abc import Callable, Mapping

from contraflow import config
from contraflow.errors import ConfigError
from contraflow.named import find
from contraflow.rewards.base import Part
from contraflow.rewards.code import CodePart
from contraflow.rewards.judge import open_judge
from contraflow.rewards.math import MathPart, open_math_sandbox
from contraflow.rewards.mix import Mix, Slow
from contraflow.rewards.model import MODEL, InPlace
from contraflow.rewards.rules import correct, even, even_once, partial, score, tool, well_formed
from contraflow.rewards.sandbox.pool import Sandbox

PARTS: dict[str, Part] = {
    "correct": correct,
    "even": even,
    "even_once": even_once,
    "format": well_formed,
    "partial": partial,
    "score": score,
    "tool": tool,
}


Opened = tuple[Part, Sandbox]


def _math(section: config.Sandbox) -> Opened:
    sandbox = open_math_sandbox(section)
    return MathPart(sandbox), sandbox


def _code(section: config.Sandbox) -> Opened:
    sandbox = Sandbox(section)
    return CodePart(sandbox, share=False), sandbox


def _code_share(section: config.Sandbox) -> Opened:
    sandbox = Sandbox(section)
    return CodePart(sandbox, share=True), sandbox


RUNNING: dict[str, Callable[[config.Sandbox], Opened]] = {"math": _math, "code": _code, "code_share": _code_share}
"""Parts that run programs: each has a sandbox of its own, which starts nothing before it is asked."""


def make_mix(
    weights: Mapping[str, float],
    *,
    judge: config.Judge | None = None,
    correct_part: str = "correct",
    sandbox: config.Sandbox | None = None,
    model: Part | None = None,
) -> Mix:
    """The weighted parts a recipe names: each one of `PARTS` or `RUNNING`, `judge`, or the user's own `module:PART` or
    `file.py:PART`.

    `judge` says whom the part of that name asks; its key is read from the environment here. `sandbox` says where parts
    run programs; `model` is the part of that name. `correct` is always measured, by the part that `correct_part` names;
    what is not in `weights` weighs nothing.
    Raises: ConfigError for an unknown part, one that is no function, a weight that is not finite, or all of them 0.
    """
    names = dict.fromkeys(["correct", *weights, correct_part])
    known: dict[str, Part] = dict(PARTS)
    if "judge" in names:
        known["judge"] = open_judge(judge or config.Judge(), os.environ, time.monotonic)
    if model is not None:
        known[MODEL] = model
    opened = {name: RUNNING[name](sandbox or config.Sandbox()) for name in names if name in RUNNING}
    known |= {name: part for name, (part, _) in opened.items()}
    closed = {name: RUNNING[name] for name in RUNNING if name not in opened}  # known, so that they can be hinted at
    parts: dict[str, Part] = {name: find(name, known | closed, what="reward part") for name in names}
    for name, part in parts.items():
        if not callable(part):
            raise ConfigError(f"reward part {name!r} is a {type(part).__name__}; it has to be a function")
    return Mix(
        parts,
        dict.fromkeys(parts, 0.0) | dict(weights),
        bounded=all(name in PARTS for name in parts),
        slow=_slow([held for _, held in opened.values()], (judge or config.Judge()).deadline_s * ("judge" in names)),
        correct=correct_part,
    )


def open_mix(section: config.Reward, *, model: Part | None = None) -> Mix:
    """The mix of a recipe's `[reward]`. The part `model` is computed in place unless one is given.

    Raises: ConfigError as `make_mix`; ModelError when the reward model's folder does not hold one.
    """
    if MODEL in section.parts and model is None:
        model = InPlace(section.model)
    judge, correct_part, sandbox = section.judge, section.correct, section.sandbox
    return make_mix(section.parts, judge=judge, correct_part=correct_part, sandbox=sandbox, model=model)


def _slow(sandboxes: list[Sandbox], judge_s: float) -> Slow | None:
    if not sandboxes:
        return None

    def close() -> None:
        for sandbox in sandboxes:
            sandbox.close()

    return Slow(
        at_once=min(sandbox.section.processes for sandbox in sandboxes),
        deadline_s=judge_s + sum(sandbox.most_s for sandbox in sandboxes),
        close=close,
    )
