"""docs/faults.md promises nothing that no test shows: every row of its tables names tests that exist."""

import ast
import re
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LINES = (ROOT / "docs/faults.md").read_text(encoding="utf-8").splitlines()
ROWS = [line for line, below in pairwise(LINES) if line.startswith("| ") and not below.startswith("|---")]


def test_every_row_names_tests_that_exist() -> None:
    assert len(ROWS) > 24
    for row in ROWS:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row.split("|")[-2])
        assert named, row
        for file, name in named:
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert name in names, f"{file} has no {name}"
