"""What survives: commits, crashes, resumes on straight and forked histories, full disks, files that are no ledger."""

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from contraflow.buffer.accounts import accounts
from contraflow.buffer.ledger import BATCH, FILE, Event, Kind, Ledger
from contraflow.errors import LedgerError, RunFolderError
from tests.buffer.ledgers import open_ledger


def events(
    ledger: Ledger, kind: Kind, *groups: int, step: int | None = None, reason: str = "", attempt: int = 1
) -> None:
    for group in groups:
        ledger.append(Event(kind, group, attempt, step, reason=reason))


def train(ledger: Ledger, step: int, *groups: int, attempt: int = 1) -> None:
    for kind in (Kind.POSED, Kind.READY):
        events(ledger, kind, *groups, attempt=attempt)
    for kind in (Kind.TAKEN, Kind.TRAINED):
        events(ledger, kind, *groups, step=step, attempt=attempt)


def test_a_resume_keeps_what_the_checkpoint_holds_and_poses_the_rest_again(tmp_path: Path) -> None:
    ledger, opening = open_ledger(tmp_path, resume_step=None)
    assert (opening.line, opening.step, opening.waiting, opening.fresh) == (0, 0, (), 0)
    train(ledger, 0, 0, 1)
    ledger.cut(1)
    train(ledger, 1, 2, 3)
    events(ledger, Kind.POSED, 4, 5, 6, 7)
    events(ledger, Kind.DROPPED, 5, reason="no_signal")
    events(ledger, Kind.READY, 6)
    events(ledger, Kind.WAITING, 7, reason="lost: worker rollout-0 died")
    ledger.close()
    ledger, opening = open_ledger(tmp_path, resume_step=1)
    assert (opening.line, opening.step, opening.fresh) == (1, 1, 8)
    assert opening.waiting == ((2, 1), (3, 1), (4, 1), (6, 1), (7, 1))
    ledger.close()
    seen = accounts(tmp_path)
    assert (seen.trained, seen.final, seen.waiting, seen.dropped, seen.superseded) == (2, 2, 5, {"no_signal": 1}, 2)
    assert seen.reposed == {"dead_line": 1, "no_payload": 3, "lost": 1}


def test_a_checkpoint_whose_cut_was_not_recorded_is_known_by_the_step_before_it(tmp_path: Path) -> None:
    ledger, _ = open_ledger(tmp_path, resume_step=None)
    events(ledger, Kind.POSED, 0, 1)
    events(ledger, Kind.TAKEN, 0, step=0)  # killed before `trained` was said, after the checkpoint was written
    ledger.close()
    ledger, opening = open_ledger(tmp_path, resume_step=1)
    assert opening.waiting == ((1, 1),)
    ledger.close()
    assert (accounts(tmp_path).trained, accounts(tmp_path).taken) == (1, 0)


def test_going_back_to_a_checkpoint_of_a_line_left_behind_restores_what_it_trained(tmp_path: Path) -> None:
    ledger, _ = open_ledger(tmp_path, resume_step=None)
    train(ledger, 0, 0)
    ledger.cut(1)
    train(ledger, 1, 1)
    ledger.cut(2)
    ledger.close()
    ledger, opening = open_ledger(tmp_path, resume_step=1)
    assert opening.waiting == ((1, 1),)
    events(ledger, Kind.POSED, 1, attempt=2)
    events(ledger, Kind.DROPPED, 1, reason="no_signal", attempt=2)
    train(ledger, 1, 2)
    ledger.close()
    ledger, opening = open_ledger(tmp_path, resume_step=2)  # the cut of line 0
    assert (opening.line, opening.waiting) == (2, ((2, 1),))
    ledger.close()
    seen = accounts(tmp_path)
    assert (seen.posed, seen.trained, seen.final, seen.waiting, seen.dropped) == (3, 2, 2, 1, {})
    ledger, opening = open_ledger(tmp_path, resume_step=1)
    assert opening.waiting == ((1, 2), (2, 1))
    ledger.close()


def test_a_line_that_made_no_step_can_be_resumed_where_it_began(tmp_path: Path) -> None:
    for resume_step in (None, 0, 0):
        ledger, opening = open_ledger(tmp_path, resume_step=resume_step)
        ledger.close()
    assert (opening.line, accounts(tmp_path).line) == (2, 2)


def test_resuming_at_zero_begins_a_run_where_none_was_recorded(tmp_path: Path) -> None:
    ledger, opening = open_ledger(tmp_path, resume_step=0)
    assert opening.line == 0
    ledger.close()


def test_a_new_run_does_not_start_in_the_folder_of_another(tmp_path: Path) -> None:
    open_ledger(tmp_path, resume_step=None)[0].close()
    with pytest.raises(RunFolderError, match="already holds a run"):
        open_ledger(tmp_path, resume_step=None)


@pytest.mark.parametrize("begun", [False, True])
def test_an_unknown_step_cannot_be_resumed_and_nothing_changes(tmp_path: Path, begun: bool) -> None:
    if begun:
        ledger, _ = open_ledger(tmp_path, resume_step=None)
        train(ledger, 0, 0)
        ledger.close()
    with pytest.raises(RunFolderError, match="the last step taken is 0" if begun else "does not exist"):
        open_ledger(tmp_path, resume_step=5)
    assert (tmp_path / FILE).exists() == begun
    if begun:
        assert accounts(tmp_path).line == 0


def test_a_line_that_was_taken_over_can_write_no_more(tmp_path: Path) -> None:
    old, _ = open_ledger(tmp_path, resume_step=None)
    new, _ = open_ledger(tmp_path, resume_step=0)
    events(old, Kind.POSED, 0)
    with pytest.raises(LedgerError, match="line 1 has taken over from line 0"):
        old.commit()
    with pytest.raises(LedgerError, match="taken over"):
        old.cut(0)
    new.close()
    assert accounts(tmp_path).posed == 0


def test_events_wait_for_a_commit_or_a_full_batch(tmp_path: Path) -> None:
    ledger, _ = open_ledger(tmp_path, resume_step=None)
    events(ledger, Kind.POSED, *range(BATCH - 1))
    ledger.make_room()
    assert accounts(tmp_path).posed == 0
    events(ledger, Kind.POSED, BATCH)
    ledger.make_room()
    assert accounts(tmp_path).posed == BATCH
    ledger.close()


KILLED = """
import os, signal, sys
from pathlib import Path
from contraflow.buffer.ledger import Event, Kind
from tests.buffer.ledgers import open_ledger
ledger, _ = open_ledger(Path(sys.argv[1]), resume_step=None)
for group in range(4):
    ledger.append(Event(Kind.POSED, group, 1))
for group in range(2):
    ledger.append(Event(Kind.TAKEN, group, 1, 0))
ledger.commit()
ledger.append(Event(Kind.POSED, 4, 1))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, env=dict(os.environ))
    assert ended.returncode == -signal.SIGKILL
    seen = accounts(tmp_path)
    assert (seen.posed, seen.taken, seen.running) == (4, 2, 2)
    ledger, opening = open_ledger(tmp_path, resume_step=1)
    assert (opening.waiting, opening.fresh) == (((2, 1), (3, 1)), 4)
    ledger.close()


def test_a_refused_report_on_a_group_that_a_crash_forgot_skips_no_index(tmp_path: Path) -> None:
    ledger, _ = open_ledger(tmp_path, resume_step=None)
    events(ledger, Kind.REFUSED, 7, reason="dead_line")  # posed on a line before, and lost with its uncommitted tail
    ledger.close()
    ledger, opening = open_ledger(tmp_path, resume_step=0)
    assert (opening.waiting, opening.fresh) == ((), 0)
    ledger.close()


def test_a_full_disk_is_a_typed_error_and_the_next_commit_retries(tmp_path: Path) -> None:
    ledger, _ = open_ledger(tmp_path, resume_step=None)
    (pages,) = ledger._db.execute("PRAGMA page_count").fetchone()
    ledger._db.execute(f"PRAGMA max_page_count = {pages}")  # SQLite then fails exactly as on a full disk
    events(ledger, Kind.POSED, *range(1000))
    with pytest.raises(LedgerError, match="full"):
        ledger.commit()
    assert accounts(tmp_path).posed == 0
    ledger._db.execute("PRAGMA max_page_count = 100000")
    ledger.commit()
    assert accounts(tmp_path).posed == 1000
    ledger.close()


def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"not a database, and longer than its header" * 100)
    with pytest.raises(LedgerError, match="file is not a database"):
        open_ledger(tmp_path, resume_step=0)


def test_a_ledger_of_another_layout_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("PRAGMA user_version = 9")
    db.close()
    with pytest.raises(LedgerError, match="layout 9"):
        open_ledger(tmp_path, resume_step=0)
    with pytest.raises(LedgerError, match="layout 9"):
        accounts(tmp_path)


def test_a_folder_that_cannot_be_made_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="cannot be made"):
        open_ledger(tmp_path / "file" / "buffer", resume_step=None)
