"""Accounts sum to the wall clock; a journal is read back whole."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contraflow.errors import RunFolderError
from contraflow.telemetry import Account, Journal, read_journal


class Hand:
    """A clock moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.sampled_from(["prefill", "decode", "idle"]), st.integers(0, 1000)), max_size=30))
def test_causes_sum_to_the_wall_clock(moves: list[tuple[str, int]]) -> None:
    clock = Hand()
    account = Account(clock)
    for cause, milliseconds in moves:
        account.switch(cause)
        clock.now += milliseconds / 1024
    assert sum(account.seconds().values()) == clock.now - 100.0


def test_a_charge_gives_back_what_ran_before_even_on_error() -> None:
    clock = Hand()
    account = Account(clock, "idle")
    try:
        with account.charge("work"):
            clock.now += 2
            assert account.cause == "work"
            raise ValueError
    except ValueError:
        pass
    assert account.cause == "idle"
    assert account.seconds() == {"idle": 0.0, "work": 2.0}


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path)
    journal.write({"step": 1})
    journal.write({"step": 2})
    journal.close()
    with path.open("a") as torn:
        torn.write('{"step": 3')
    assert read_journal(path) == [{"step": 1}, {"step": 2}]
    journal = Journal(path)  # a resume: what is written next must not be glued to the torn line
    journal.write({"step": 4})
    journal.close()
    assert read_journal(path) == [{"step": 1}, {"step": 2}, {"step": 4}]


def test_a_full_disk_is_a_typed_error() -> None:
    with pytest.raises(RunFolderError, match="free some space and resume"):
        Journal(Path("/dev/full")).write({"step": 1})
