"""Accounts are read from the record alone."""

from pathlib import Path

import pytest

from contraflow.buffer.accounts import accounts
from contraflow.buffer.ledger import FILE, Event, Kind
from contraflow.errors import LedgerError, RunFolderError
from tests.buffer.ledgers import open_ledger


def test_an_empty_run_has_empty_accounts(tmp_path: Path) -> None:
    ledger, _ = open_ledger(tmp_path, resume_step=None)
    seen = accounts(tmp_path)
    ledger.close()
    assert (seen.posed, seen.held, seen.trained, seen.cut, seen.dropped) == (0, 0, 0, 0, {})


def test_every_group_is_counted_once_by_its_last_event(tmp_path: Path) -> None:
    ledger, _ = open_ledger(tmp_path, resume_step=None)
    lives = {
        Kind.POSED: [Kind.POSED],
        Kind.STARTED: [Kind.POSED, Kind.STARTED],
        Kind.READY: [Kind.POSED, Kind.READY],
        Kind.TAKEN: [Kind.POSED, Kind.READY, Kind.TAKEN],
        Kind.TRAINED: [Kind.POSED, Kind.READY, Kind.TAKEN, Kind.TRAINED],
        Kind.DROPPED: [Kind.POSED, Kind.DROPPED],
        Kind.WAITING: [Kind.POSED, Kind.WAITING],
    }
    for group, life in enumerate(lives.values()):
        for kind in life:
            ledger.append(Event(kind, group, 1, 0, reason=f"{kind}: told at length"))
    ledger.append(Event(Kind.REFUSED, 4, 1, reason="late"))
    ledger.append(Event(Kind.REFUSED, 99, 1, reason="late"))
    ledger.cut(1)
    seen = accounts(tmp_path)  # while it is still open
    ledger.close()
    assert accounts(tmp_path) == seen
    assert (seen.posed, seen.running, seen.ready, seen.taken, seen.trained, seen.waiting) == (7, 2, 1, 1, 1, 1)
    assert (seen.reposed, seen.refused, seen.final, seen.cut) == ({"waiting": 1}, {"late": 2}, 1, 1)
    assert seen.posed == seen.trained + sum(seen.dropped.values()) + seen.held


def test_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no run has begun"):
        accounts(tmp_path)


def test_a_broken_ledger_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"\0" * 5000)
    with pytest.raises(LedgerError):
        accounts(tmp_path)
