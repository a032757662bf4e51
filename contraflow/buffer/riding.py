"""What the buffer adds to a cut, so that a run goes on where its folder is lost: its record, as files.

Takes the buffer's folder; gives parts of a cut, and puts them back into an empty folder. Does not know what a step is,
or make a cut visible.
"""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from contraflow.buffer.ledger import FILE, connect, reading
from contraflow.buffer.segments import FOLDER as SEGMENTS
from contraflow.cuts import EARLIER, CutId, CutManifest, CutSpace, Part
from contraflow.errors import BlobError, CheckpointError, LedgerError, RunFolderError

RIDERS = "buffer"  # the folder of their parts in a cut


class Rider(NamedTuple):
    """One file that goes along: its path below the buffer's folder, and how to get its bytes."""

    name: str
    read: Callable[[], bytes]


def riders(folder: Path) -> Iterator[Rider]:
    """The ledger, as of its last commit, and files of payloads as far as they are written."""
    yield Rider(FILE, lambda: ledger_copy(folder / FILE))
    for segment in sorted(path for path in (folder / SEGMENTS).glob("*") if path.is_file()):
        yield Rider(f"{SEGMENTS}/{segment.name}", segment.read_bytes)


def ride(folder: Path, space: CutSpace, cut: CutId) -> list[Part]:
    """Write all of it as parts of `cut`, one file in memory at a time. Raises CheckpointError, LedgerError."""
    parts = []
    try:
        for rider in riders(folder):
            try:
                data = rider.read()
            except FileNotFoundError:  # all of its groups were settled meanwhile, and the file went
                continue
            parts.append(space.put(cut, f"{RIDERS}/{rider.name}", data))
        return parts
    except BlobError as fault:
        raise CheckpointError(f"cut {cut.name} in {space.url} could not be written: {fault}; {EARLIER}") from fault


def alight(space: CutSpace, manifest: CutManifest, folder: Path) -> None:
    """Put a cut's record back into `folder`, which must not hold one. Raises RunFolderError, CutTorn, BlobError."""
    if (folder / FILE).exists():
        raise RunFolderError(f"{folder / FILE} exists: a record is not written over another; choose an empty folder")
    for part in sorted(manifest.below(RIDERS), key=lambda part: part.name == f"{RIDERS}/{FILE}"):
        target = folder / part.name.removeprefix(f"{RIDERS}/")
        if not target.resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(f"cut {manifest.id.name} names a file outside its folder: {part.name!r}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(space.read(manifest, part))


def ledger_copy(path: Path) -> bytes:
    """The ledger as one consistent file, while its writer goes on."""
    uri = f"{path.absolute().as_uri()}?mode=ro"
    with closing(connect(path, uri)) as db, closing(sqlite3.connect(":memory:")) as copy:
        try:
            db.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")
            return copy.serialize()
        except sqlite3.Error as fault:
            raise LedgerError(f"ledger {path} could not be copied into a cut: {fault}") from fault


def position(folder: Path) -> dict[str, int]:
    """Where the record stands: whose it is, its line, its last event, and the index of the next task never posed."""
    with reading(folder) as db:
        (run,) = db.execute("PRAGMA application_id").fetchone()
        (line,) = db.execute("SELECT max(line) FROM lines").fetchone()
        (event, group) = db.execute("SELECT max(id), max(group_id) FROM events").fetchone()
    return {
        "run": run,
        "line": -1 if line is None else line,
        "event": event or 0,
        "next_task": 0 if group is None else group + 1,
    }
