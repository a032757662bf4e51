"""What is wrong with a record is said; a record that a run wrote has nothing wrong (test_crash.py)."""

from pathlib import Path

import pytest

from contraflow.buffer.audit import audit
from contraflow.buffer.ledger import FILE, Event, Kind, connect
from contraflow.errors import RunFolderError
from contraflow.view.inspect import prove
from tests.buffer.ledgers import open_ledger

LIFE = [Event(Kind.POSED, 0, 1), Event(Kind.TAKEN, 0, 1, 0), Event(Kind.TRAINED, 0, 1, 0)]


def write(folder: Path, *events: Event) -> None:
    ledger, _ = open_ledger(folder, resume_step=None)
    for event in events:
        ledger.append(event)
    ledger.close()


def test_nothing_is_wrong_with_a_plain_life(tmp_path: Path) -> None:
    write(tmp_path, *LIFE, Event(Kind.POSED, 1, 1), Event(Kind.DROPPED, 1, 1, reason="no_signal"))
    assert audit(tmp_path) == prove(tmp_path) == []


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([*LIFE, Event(Kind.TAKEN, 0, 1, 1)], "1 group taken more than once on the surviving history: 0"),
        ([*LIFE, Event(Kind.TRAINED, 0, 1, 1)], "trained by more than one step of the surviving history: 0"),
        ([LIFE[0], LIFE[2]], "trained by a step that did not take them on the surviving history: 0"),
        ([*LIFE, Event(Kind.WAITING, 0, 1, reason="lost")], "taken on the surviving history, and then something else"),
        ([Event(Kind.DROPPED, 0, 1, reason="x")], "never posed: 0"),
        ([LIFE[0], Event(Kind.DROPPED, 0, 1)], "dropped without a reason: 0"),
        ([LIFE[0], Event(Kind.READY, 0, 1)], "ready without a payload: 0"),
        ([LIFE[0], Event(Kind.POSED, 3, 1)], "2 tasks were skipped: 2 groups were posed, the last of them is 3"),
        ([LIFE[0], Event(Kind.TAKEN, 0, 1, 2)], "2 steps of the surviving history took no group; its last step is 2"),
    ],
)
def test_each_way_to_lose_or_repeat_a_group_is_found(tmp_path: Path, events: list[Event], says: str) -> None:
    write(tmp_path, *events)
    assert any(says in sentence for sentence in audit(tmp_path)), audit(tmp_path)


def test_an_event_behind_the_fence_is_found(tmp_path: Path) -> None:
    write(tmp_path, LIFE[0])
    ledger, _ = open_ledger(tmp_path, resume_step=0)
    ledger.close()
    db = connect(tmp_path / FILE, f"{(tmp_path / FILE).absolute().as_uri()}?mode=rw")
    db.execute("INSERT INTO events SELECT NULL, 0, kind, group_id, attempt, step, NULL, NULL, 'late' FROM events")
    db.close()
    assert any("events were written by a line after a newer one had begun" in sentence for sentence in audit(tmp_path))


def test_many_groups_are_not_all_named(tmp_path: Path) -> None:
    write(tmp_path, *(Event(Kind.DROPPED, group, 1, reason="x") for group in range(40)))
    assert audit(tmp_path)[0] == "40 groups never posed: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and more"


def test_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no run has begun"):
        audit(tmp_path)
