"""Programs judged by what they do: run in the sandbox on a task's cases, compared with what is expected outside of it.

Takes `facts["tests"]`, a JSON list of cases: `{"stdin": ..., "stdout": ...}` or `{"assert": "assert f(2) == 4"}`.
What is expected never enters the sandbox, and what comes out of it is compared as text, never evaluated.
"""

import ast
import re
from collections.abc import Iterator

import msgspec

from contraflow.errors import RewardError
from contraflow.rewards.base import Transcript
from contraflow.rewards.sandbox.pool import Program, Ran, Sandbox
from contraflow.rewards.sandbox.values import NUMBER, number_of, tokens_of
from contraflow.types import StopReason, Task

_BLOCK = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL | re.IGNORECASE)
_FORMS = (
    "assert EXPRESSION == LITERAL, assert EXPRESSION is None (True, False), assert EXPRESSION, assert not EXPRESSION"
)
_CONSTANTS = (None, True, False)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the program and what it has to give: `expected` on its output, or `tokens` as the value of `call`."""

    stdin: str = ""
    expected: str = ""
    call: str = ""
    tokens: tuple[str, ...] = ()
    tolerance: float = 0.0  # largest difference of two numbers that still counts as equal


class _Stated(msgspec.Struct, forbid_unknown_fields=True):
    """A case as a task writes it."""

    stdin: str = ""
    stdout: str | None = None
    check: str | None = msgspec.field(default=None, name="assert")
    tolerance: float = 0.0


class CodePart:
    """1 when the program passes every case, else 0; or, with `share`, the share of cases it passes.

    An answer that was cut off earns 0. A program that raises, hangs, uses too much or is not Python fails the case.
    Never raises because of a program.
    """

    def __init__(self, sandbox: Sandbox, *, share: bool) -> None:
        self._sandbox, self._share = sandbox, share

    def __call__(self, task: Task, transcript: Transcript) -> float:
        """Raises: RewardError when the task's cases can't be read, or the sandbox can't be had or broke."""
        cases, source = read_cases(task), program_of(transcript.answer)
        if transcript.stop is not StopReason.STOP:
            return 0.0
        passed = 0
        for right in self._verdicts(source, cases):
            if not right and not self._share:
                return 0.0
            passed += right
        return passed / len(cases)

    def _verdicts(self, source: str, cases: tuple[Case, ...]) -> Iterator[bool]:
        left_s = self._sandbox.section.total_s
        for case in cases:
            if left_s <= 0:
                return
            ran = self._sandbox.run(Program(source, case.stdin, case.call), wall_s=left_s)
            left_s -= ran.wall_s
            yield passes(case, ran)


def program_of(answer: str) -> str:
    """The last fenced block of an answer that is Python or says no language; the whole answer when it has none."""
    blocks = _BLOCK.findall(answer)
    return blocks[-1] if blocks else answer


def passes(case: Case, ran: Ran) -> bool:
    """Whether a run gave what the case expects. Lines of output are compared without white space at their ends."""
    if ran.end != "done":
        return False
    if not case.call:
        return _lines(ran.stdout.decode("utf-8", errors="replace")) == _lines(case.expected)
    try:
        tokens = msgspec.json.decode(ran.result, type=tuple[str, ...])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    if not case.tolerance:
        return tokens == case.tokens
    pairs = zip(tokens, case.tokens, strict=False)
    return len(tokens) == len(case.tokens) and all(_close(one, other, case.tolerance) for one, other in pairs)


def read_cases(task: Task) -> tuple[Case, ...]:
    """The cases of a task, at least one. Raises: RewardError naming the case and what is allowed."""
    text = task.facts.get("tests")
    if text is None:
        raise RewardError(f"parts 'code' and 'code_share' need facts['tests'], which task {task.key!r} lacks")
    try:
        stated = msgspec.json.decode(text, type=list[_Stated])
    except msgspec.MsgspecError as fault:
        raise RewardError(f"facts['tests'] of task {task.key!r}: {fault}") from fault
    if not stated:
        raise RewardError(f"facts['tests'] of task {task.key!r} is empty: a program that is not tested earns nothing")
    return tuple(_read_case(case, f"case {place} of task {task.key!r}") for place, case in enumerate(stated))


def _read_case(stated: _Stated, what: str) -> Case:
    if (stated.stdout is None) == (stated.check is None):
        raise RewardError(f"{what}: say either 'stdout' (and 'stdin') or 'assert'")
    if stated.stdout is not None:
        return Case(stdin=stated.stdin, expected=stated.stdout)
    try:
        call, expected = _split(str(stated.check))
        tokens = tuple(tokens_of(expected))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as fault:
        raise RewardError(f"{what}: {stated.check!r} is none of {_FORMS}: {fault}") from fault
    return Case(stdin=stated.stdin, call=call, tokens=tokens, tolerance=stated.tolerance)


def _split(check: str) -> tuple[str, object]:
    """An assertion as what to evaluate inside and the literal to compare it with outside."""
    body = ast.parse(check.strip()).body
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        raise ValueError("it is not one assert statement")
    test = body[0].test
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return ast.unparse(test.operand), False
    if not isinstance(test, ast.Compare):
        return ast.unparse(test), True
    if len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq | ast.Is):
        raise ValueError("comparisons other than == would have to be believed to the program")
    value = ast.literal_eval(test.comparators[0])
    if isinstance(test.ops[0], ast.Is) and not any(value is one for one in _CONSTANTS):
        raise ValueError("`is` compares with None, True and False only")
    return ast.unparse(test.left), value


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _close(token: str, expected: str, tolerance: float) -> bool:
    if not (token.startswith(NUMBER) and expected.startswith(NUMBER)):
        return token == expected
    try:
        return abs(number_of(token) - number_of(expected)) <= tolerance
    except (ValueError, OverflowError):
        return False
