"""`contraflow bench dispatch` times real processes and keeps the table."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from contraflow.cli import app
from contraflow.errors import ConfigError

SMALL = ["bench", "dispatch", "--ranks", "2", "--domain-ranks", "1", "--experts", "4", "--top-k", "2", "--dim", "16"]
QUICK = ["--expert-ffn", "8", "--train", "4", "--prefill", "", "--decode", "1", "--repeats", "1"]


def test_a_table_of_two_processes_is_shown_and_kept(tmp_path: Path) -> None:
    kept = tmp_path / "table.json"
    done = CliRunner().invoke(app, [*SMALL, *QUICK, "--out", str(kept)], catch_exceptions=False)
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert lines[0].split()[:3] == ["phase", "tokens", "choice"]
    assert [line.split()[:2] for line in lines[1:3]] == [["train", "4"], ["decode", "1"]]
    table = json.loads(kept.read_text(encoding="utf-8"))
    assert table["domains"] == [0, 1]
    assert all(entry["across"] > 0 for entry in table["entries"])


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        (["--decode", "1,x"], ConfigError, "token counts '1,x'"),
        (["--wire", "int4"], ConfigError, "wire = 'int4'"),
        (["--experts", "3"], ConfigError, "--experts 3 is not a multiple of --ranks 2"),
        (["--top-k", "5"], ConfigError, r"--top-k 5 is not in \[1, 4\]"),
        (["--ranks", "1"], ConfigError, "--ranks 1: at least 2"),
        (["--device", "cuda", "--ranks", "64", "--experts", "64"], ConfigError, "64 ranks need a GPU each"),
    ],
)
def test_what_cannot_be_measured_is_refused(more: list[str], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        CliRunner().invoke(app, [*SMALL, *QUICK, *more], catch_exceptions=False)
