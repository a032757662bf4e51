"""A call is typed: the method's arguments are checked where they are given, and its result has the method's type."""

import textwrap
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="typing is checked where the development tools are")
import mypy.api

SNIPPET = """
from typing import assert_type
from contraflow.runtime.base import Gang, Ref, Runtime

class Buffer:
    async def take(self, step: int, *, wait_s: float = 1.0) -> list[str]:
        return []

def make(host: object) -> Buffer:
    return Buffer()

class Other:
    async def other(self) -> int:
        return 1

async def use(runtime: Runtime) -> None:
    ref = await runtime.start("b", make)
    assert_type(ref, Ref[Buffer])
    assert_type(await ref.call(5, Buffer.take, 3, wait_s=2), list[str])
    gang = await runtime.start_gang("g", 2, make)
    assert_type(gang, Gang[Buffer])
    assert_type(await gang.call(5, Buffer.take, 3), list[list[str]])
    await ref.call(5, Buffer.take, "x")
    await ref.call(5, Buffer.take)
    await ref.call(5, Other.other)
"""


def test_a_type_checker_sees_arguments_and_results(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(textwrap.dedent(SNIPPET))
    report, _, _ = mypy.api.run(["--strict", "--no-incremental", "--follow-imports=silent", str(snippet)])
    lines = SNIPPET.splitlines()
    wrong = [lines.index(line) + 1 for line in lines if '"x")' in line or "take)" in line or "Other.other)" in line]
    reported = {int(line.split(":")[1]) for line in report.splitlines() if ": error:" in line}
    assert reported == set(wrong), report
