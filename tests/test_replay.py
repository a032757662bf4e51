"""What was recorded, trained again from a cut, gives the cuts that followed bit for bit, or it is said why not."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from contraflow.buffer.ledger import FILE
from contraflow.errors import CheckpointError, LedgerError
from contraflow.replay import replay
from tests.test_loop import Ticks, recipe_of, run

KEEP = {"train": {"checkpoint_every": 2, "keep_checkpoints": 9}, "run": {"steps": 5, "eval_tasks": 0}}


def test_recorded_takes_give_every_later_cut_bit_for_bit(tiny_moe: Path, tmp_path: Path) -> None:
    run(recipe_of(tiny_moe, buffer={"keep_payloads": "all"}, **KEEP), tmp_path)
    told: list[str] = []
    assert replay(tmp_path, "line-0-step-2", clock=Ticks(), tell=told.append) == 2
    assert told[0] == "step 2: 4 groups trained again"
    assert told[1:] == [
        f"step {step}: weights and optimizer are those of cut line-0-step-{step + 1}, bit for bit" for step in (3, 4)
    ]


def test_another_recipe_is_found_out(tiny_moe: Path, tmp_path: Path) -> None:
    run(recipe_of(tiny_moe, buffer={"keep_payloads": "all"}, **KEEP), tmp_path)
    text = (tmp_path / "recipe.toml").read_text()
    (tmp_path / "recipe.toml").write_text(text.replace("clip_norm = 1.0", "clip_norm = 0.01"))
    with pytest.raises(CheckpointError, match="the replay differs from cut line-0-step-4"):
        replay(tmp_path, "line-0-step-2", clock=Ticks(), tell=lambda line: None)


def test_payloads_that_were_let_go_are_an_error_that_says_so(tiny_moe: Path, tmp_path: Path) -> None:
    run(recipe_of(tiny_moe, **KEEP), tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE)) as db, db:
        db.execute("DELETE FROM payloads")  # as a cut does once a file is full and all in it is trained
    with pytest.raises(LedgerError, match=r"was let go; run with buffer\.keep_payloads = 'all'"):
        replay(tmp_path, "line-0-step-2", clock=Ticks(), tell=lambda line: None)
    with pytest.raises(LedgerError, match="nothing is recorded after cut line-0-step-5"):
        replay(tmp_path, "line-0-step-5", clock=Ticks(), tell=lambda line: None)
    with pytest.raises(CheckpointError, match="line-0-step-3"):
        replay(tmp_path, "line-0-step-3", clock=Ticks(), tell=lambda line: None)
