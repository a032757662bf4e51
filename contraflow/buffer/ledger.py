"""The durable record of what happened to each group: an append-only list of events in SQLite, and the lines of a run.

Takes events, commits them in batches. Payloads lie beside it (segments.py), synced before the rows that name them are
written here. Does not decide anything about a group's life. opening.py begins a line; accounts.py and audit.py read.

Guarantee: `commit` and `cut` return once everything appended so far survives a power loss (WAL, synchronous=FULL).
Between commits at most `BATCH` events wait in memory; a commit that fails keeps them, so the next one retries.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

import msgspec

from contraflow.buffer.segments import Place
from contraflow.errors import LedgerError, RunFolderError
from contraflow.types import Version

FILE = "ledger.sqlite"
SCHEMA = 3
BATCH = 256
TABLES = (
    # `shared`: the newest n such that version n of the history before is the same version of this one (opening.py).
    "CREATE TABLE lines(line INTEGER PRIMARY KEY, parent INTEGER, from_step INTEGER NOT NULL, shared INTEGER NOT NULL)",
    "CREATE TABLE cuts(line INTEGER NOT NULL, step INTEGER NOT NULL, PRIMARY KEY(line, step))",
    "CREATE TABLE events(id INTEGER PRIMARY KEY, line INTEGER NOT NULL, kind TEXT NOT NULL, group_id INTEGER NOT NULL,"
    " attempt INTEGER NOT NULL, step INTEGER, version_line INTEGER, version_n INTEGER, reason TEXT NOT NULL)",
    "CREATE TABLE payloads(group_id INTEGER NOT NULL, attempt INTEGER NOT NULL, line INTEGER NOT NULL,"
    " oldest INTEGER NOT NULL, newest INTEGER NOT NULL, segment TEXT NOT NULL, start INTEGER NOT NULL,"
    " length INTEGER NOT NULL, digest BLOB NOT NULL, PRIMARY KEY(group_id, attempt))",
    "CREATE TABLE rates(id INTEGER PRIMARY KEY, group_id INTEGER NOT NULL, attempt INTEGER NOT NULL,"
    " kind TEXT NOT NULL, rate REAL NOT NULL)",
)
INSERT = (
    "INSERT INTO events(line, kind, group_id, attempt, step, version_line, version_n, reason) VALUES (?,?,?,?,?,?,?,?)"
)
HANDED_BACK = "handed_back"  # reason of a `waiting` whose payload is what the next attempt goes on from
KEEP = "INSERT INTO payloads VALUES (?,?,?,?,?,?,?,?,?)"
AGAIN = (
    "INSERT INTO payloads SELECT group_id, ?, line, oldest, newest, segment, start, length, digest FROM payloads"
    " WHERE group_id = ? AND attempt = ?"
)
MEASURE = "INSERT INTO rates(group_id, attempt, kind, rate) VALUES (?,?,?,?)"


class Kind(StrEnum):
    """What happened to a group. The last event that is not `refused` is the group's state."""

    POSED = "posed"  # given a ticket: it runs
    STARTED = "started"  # its first token is about to be sampled, by `version`
    READY = "ready"  # its episodes arrived; `version` is that of the oldest trained token
    TAKEN = "taken"  # by `step`
    DUE = "due"  # taken by `step` on a line that ended before a cut: the same step of this line takes it again
    TRAINED = "trained"  # by `step`
    DROPPED = "dropped"  # for good, because of `reason`
    WAITING = "waiting"  # its attempt was given up because of `reason`; it is to be posed again
    REFUSED = "refused"  # somebody reported on an attempt that is not running; nothing changed


class Solved(msgspec.Struct, frozen=True, kw_only=True):
    """How often the task of a group was solved, and of what kind it was; outlives the payload."""

    kind: str
    rate: float


class Event(msgspec.Struct, frozen=True):
    """One line of a group's history."""

    kind: Kind
    group: int
    attempt: int
    step: int | None = None
    version: Version | None = None
    reason: str = ""  # counted by what stands before a colon
    newest: Version | None = None  # of its tokens, where `place` is given
    place: Place | None = None  # of its payload, whole or handed back, which is synced by then
    solved: Solved | None = None  # what was measured of it
    again: int | None = None  # the earlier attempt whose payload, where it is, is this one's too


class Ledger:
    """Writer of one line. Invariant: only the newest line of the file is ever written to; an older one is fenced off.

    Raises LedgerError where SQLite fails (full disk, not a database) or a newer line has taken over.
    """

    def __init__(self, db: sqlite3.Connection, path: Path, line: int) -> None:
        self._db = db
        self._path = path
        self._line = line
        self._pending: list[Event] = []

    def append(self, event: Event) -> None:
        """Note an event; it is durable after the next commit."""
        self._pending.append(event)

    def make_room(self) -> None:
        """Commit if a full batch waits. Called before a change, so that a failure leaves nothing half done."""
        if len(self._pending) >= BATCH:
            self.commit()

    def commit(self) -> None:
        """Make everything appended so far durable."""
        if self._pending:
            self._write(None)

    def cut(self, step: int) -> None:
        """A checkpoint that contains the steps below `step` is committed. Durable on return."""
        self._write(step)

    def forget(self, segments: set[str]) -> None:
        """The payloads of these files are not named any more: the files may go. Durable on return."""
        with self._fenced():
            self._db.executemany("DELETE FROM payloads WHERE segment = ?", [(name,) for name in sorted(segments)])

    def close(self) -> None:
        """Commit and close."""
        try:
            self.commit()
        finally:
            self._db.close()

    def _write(self, cut: int | None) -> None:
        with self._fenced():
            self._db.executemany(INSERT, (event_row(self._line, event) for event in self._pending))
            self._db.executemany(KEEP, (_payload_row(each) for each in self._pending if each.place is not None))
            self._db.executemany(AGAIN, again_rows(self._pending))
            self._db.executemany(MEASURE, (_rate_row(each) for each in self._pending if each.solved is not None))
            if cut is not None:
                self._db.execute("INSERT OR IGNORE INTO cuts VALUES (?, ?)", (self._line, cut))
        self._pending.clear()

    @contextmanager
    def _fenced(self) -> Iterator[None]:
        with transaction(self._db, self._path):
            (newest,) = self._db.execute("SELECT max(line) FROM lines").fetchone()
            if newest != self._line:
                raise LedgerError(f"ledger {self._path}: line {newest} has taken over from line {self._line}; stop")
            yield


@contextmanager
def reading(folder: Path) -> Iterator[sqlite3.Connection]:
    """The ledger in a buffer's folder as it stands now, for queries that change nothing.

    Raises RunFolderError when there is none, LedgerError when it cannot be read.
    """
    path = folder / FILE
    if not path.exists():
        raise RunFolderError(f"{path} does not exist: no run has begun in this folder")
    db = connect(path, f"{path.absolute().as_uri()}?mode=ro")
    try:
        with transaction(db, path, "BEGIN"):
            check_schema(db, path, create=False)
            yield db
    finally:
        db.close()


def connect(path: Path, uri: str) -> sqlite3.Connection:
    """A connection in autocommit mode, durable at each commit. Raises LedgerError."""
    try:
        # A worker may be made on one thread and run on another, never on two at once.
        db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as fault:
        raise LedgerError(f"ledger {path} cannot be opened: {fault}") from fault
    try:
        if not uri.endswith("mode=ro"):
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
    except sqlite3.Error as fault:
        db.close()
        raise LedgerError(f"ledger {path} cannot be opened: {fault}") from fault
    return db


@contextmanager
def transaction(db: sqlite3.Connection, path: Path, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
    """All of the body or nothing. SQLite's failures become LedgerError."""
    try:
        db.execute(begin)
        yield
        db.execute("COMMIT")
    except sqlite3.Error as fault:
        raise LedgerError(f"ledger {path}: {fault}; free space or repair the disk, then resume the run") from fault
    finally:
        if db.in_transaction:
            db.rollback()


def check_schema(db: sqlite3.Connection, path: Path, *, create: bool, run_id: int = 0) -> None:
    """Refuse a file of another layout; make the tables in an empty one if asked to, as those of run `run_id`."""
    (found,) = db.execute("PRAGMA user_version").fetchone()
    if found == 0 and create:
        for table in TABLES:
            db.execute(table)
        db.execute(f"PRAGMA user_version = {SCHEMA:d}")
        db.execute(f"PRAGMA application_id = {run_id:d}")
    elif found != SCHEMA:
        raise LedgerError(f"ledger {path} has layout {found}; this version of contraflow reads layout {SCHEMA}")


def surviving(db: sqlite3.Connection, line: int) -> list[tuple[int, int]]:
    """The history that led to `line`: pairs (line, end), whose steps below `end` belong to it; newest first."""
    path = []
    end = 2**62
    current: int | None = line
    while current is not None:
        path.append((current, end))
        parent, from_step = db.execute("SELECT parent, from_step FROM lines WHERE line = ?", (current,)).fetchone()
        end = min(end, from_step)
        current = parent
    return path


def on_path(path: list[tuple[int, int]]) -> str:
    """SQL that is true of events whose step lies on `path` (integers only, so nothing to escape)."""
    return "(" + " OR ".join(f"(line = {line:d} AND step < {end:d})" for line, end in path) + ")"


def event_row(line: int, event: Event) -> tuple[int, str, int, int, int | None, int | None, int | None, str]:
    version_line, version_n = (None, None) if event.version is None else (event.version.line, event.version.n)
    return line, event.kind, event.group, event.attempt, event.step, version_line, version_n, event.reason


def again_rows(events: Iterable[Event]) -> Iterator[tuple[int, int, int]]:
    """Of each event that takes over a payload: attempt, group and the attempt that it is of."""
    return ((each.attempt, each.group, each.again) for each in events if each.again is not None)


def _payload_row(event: Event) -> tuple[int, int, int, int, int, str, int, int, bytes]:
    place, oldest, newest = event.place, event.version, event.newest
    assert place is not None, "asked before"
    assert oldest is not None and newest is not None, "a payload has tokens"  # noqa: PT018
    return (
        event.group,
        event.attempt,
        oldest.line,
        oldest.n,
        newest.n,
        place.segment,
        place.start,
        place.length,
        place.digest,
    )


def _rate_row(event: Event) -> tuple[int, int, str, float]:
    assert event.solved is not None, "asked before"
    return event.group, event.attempt, event.solved.kind, event.solved.rate
