"""What the buffer adds to a cut comes back as it was, while its writer goes on."""

import sqlite3
from pathlib import Path

import pytest

from contraflow.buffer import riding
from contraflow.buffer.ledger import Event, Kind
from contraflow.buffer.riding import alight, position, ride
from contraflow.cuts import CutId, CutManifest, Part
from contraflow.errors import CheckpointError, RunFolderError
from tests.buffer.ledgers import open_ledger
from tests.cut_writer import space_in

HERE = CutId("line-0-step-1", "w")


def rows(folder: Path) -> list[tuple[object, ...]]:
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        return db.execute("SELECT * FROM events ORDER BY id").fetchall()


def test_the_record_and_its_payload_files_come_back_as_of_the_last_commit(tmp_path: Path) -> None:
    run, space = tmp_path / "run", space_in(tmp_path / "cuts")
    ledger, _ = open_ledger(run, resume_step=None, run_id=7)
    for group in range(3):
        ledger.append(Event(Kind.POSED, group, 0))
    ledger.commit()
    (run / "segments").mkdir(exist_ok=True)
    (run / "segments" / "one").write_bytes(b"payloads")
    assert position(run) == {"run": 7, "line": 0, "event": 3, "next_task": 3}
    wanted = rows(run)
    manifest = space.commit(HERE, ride(run, space, HERE), {})
    ledger.append(Event(Kind.POSED, 3, 0))
    ledger.close()
    alight(space, manifest, tmp_path / "back")
    assert rows(tmp_path / "back") == wanted
    assert (tmp_path / "back" / "segments" / "one").read_bytes() == b"payloads"
    with pytest.raises(RunFolderError, match="not written over another"):
        alight(space, manifest, tmp_path / "back")


def test_a_payload_file_that_goes_meanwhile_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> bytes:
        raise FileNotFoundError

    space = space_in(tmp_path)
    monkeypatch.setattr(riding, "riders", lambda _: [riding.Rider("segments/a", gone), riding.Rider("b", lambda: b"")])
    assert [part.name for part in ride(tmp_path, space, HERE)] == ["buffer/b"]


def test_a_part_that_would_leave_the_folder_is_refused(tmp_path: Path) -> None:
    space = space_in(tmp_path / "cuts")
    manifest = CutManifest(format=1, id=HERE, about={}, parts=(Part("buffer/../../out", 1, ""),))
    with pytest.raises(CheckpointError, match="names a file outside its folder"):
        alight(space, manifest, tmp_path / "back")
    assert not (tmp_path / "out").exists()
