"""Mathematical answers, judged by math-verify (extra `contraflow[math]`): equal as mathematics, not as text.

Takes a task's reference and what was said. The package parses with sympy, which can hang and can evaluate text, so it
runs in the sandbox: a fork of a warm process for each answer, ended at its limits.
"""

import importlib.util
import json
from pathlib import Path

from contraflow import config
from contraflow.errors import ConfigError, RewardError
from contraflow.rewards.base import Transcript
from contraflow.rewards.code import Case, passes
from contraflow.rewards.sandbox.pool import Program, Sandbox
from contraflow.rewards.sandbox.values import tokens_of
from contraflow.types import StopReason, Task

_PACKAGES = ("math_verify", "latex2sympy2_extended", "antlr4", "sympy", "mpmath")
_WARM = """
from math_verify import parse, verify
verify(parse(r"$\\frac{1}{2}+x^2$"), parse(r"\\boxed{[0,1)}"))
"""
_PROGRAM = r"""
import json, logging, sys
from math_verify import parse, verify
logging.disable()
reference, answer = json.load(sys.stdin)
def read(text):
    return parse(text, parsing_timeout=None)
def readings(text):
    if any(sign in text for sign in ("$", r"\boxed", r"\(", r"\[")):
        return [text]
    return [text, r"\boxed{" + text + "}"]
def verdict():
    gold = read(readings(reference)[-1])
    if not gold:
        return None
    return any(verify(gold, read(text), timeout_seconds=None) for text in readings(answer))
"""
_NONE, _TRUE = (tuple(tokens_of(value)) for value in (None, True))


class MathPart:
    """1 when the answer equals the reference; 0 when it does not, was cut off, can't be read or breaks its limits."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def __call__(self, task: Task, transcript: Transcript) -> float:
        """Raises: RewardError when the reference can't be read as mathematics, or the sandbox can't be had or broke."""
        if transcript.stop is not StopReason.STOP:
            return 0.0
        stdin = json.dumps([task.reference, transcript.answer])
        ran = self._sandbox.run(Program(_PROGRAM, stdin, call="verdict()"))
        if passes(Case(call="verdict()", tokens=_NONE), ran):
            raise RewardError(f"part 'math' cannot read the reference {task.reference!r} of task {task.key!r}")
        return float(passes(Case(call="verdict()", tokens=_TRUE), ran))


def open_math_sandbox(section: config.Sandbox) -> Sandbox:
    """A sandbox that knows math-verify. Raises: ConfigError when the package is not installed."""
    folders = []
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ConfigError(f"reward part 'math' needs the package {name!r}: pip install 'contraflow[math]'")
        folders.append(str(Path(spec.origin).resolve().parents[1]))
    return Sandbox(section, warm=_WARM, packages=tuple(dict.fromkeys(folders)))
