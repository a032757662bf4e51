"""The durable record of what happened to each group: an append-only list of events in SQLite, and the lines of a run.

Takes events, commits them in batches; opening it for a resume opens a new line and says which groups to pose again.
Does not hold payloads or decide anything about a group's life. `accounts.py` reads it.

Guarantee: `commit` and `cut` return once everything appended so far survives a power loss (WAL, synchronous=FULL).
Between commits at most `BATCH` events wait in memory; a commit that fails keeps them, so the next one retries.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

import msgspec

from contraflow.errors import LedgerError, RunFolderError
from contraflow.types import Version

FILE = "ledger.sqlite"
SCHEMA = 1
BATCH = 256
TABLES = (
    "CREATE TABLE lines(line INTEGER PRIMARY KEY, parent INTEGER, from_step INTEGER NOT NULL)",
    "CREATE TABLE cuts(line INTEGER NOT NULL, step INTEGER NOT NULL, PRIMARY KEY(line, step))",
    "CREATE TABLE events(id INTEGER PRIMARY KEY, line INTEGER NOT NULL, kind TEXT NOT NULL, group_id INTEGER NOT NULL,"
    " attempt INTEGER NOT NULL, step INTEGER, version_line INTEGER, version_n INTEGER, reason TEXT NOT NULL)",
)
INSERT = (
    "INSERT INTO events(line, kind, group_id, attempt, step, version_line, version_n, reason) VALUES (?,?,?,?,?,?,?,?)"
)


class Kind(StrEnum):
    """What happened to a group. The last event that is not `refused` is the group's state."""

    POSED = "posed"  # given a ticket: it runs
    STARTED = "started"  # its first token is about to be sampled, by `version`
    READY = "ready"  # its episodes arrived; `version` is that of the oldest trained token
    TAKEN = "taken"  # by `step`
    TRAINED = "trained"  # by `step`
    DROPPED = "dropped"  # for good, because of `reason`
    WAITING = "waiting"  # its attempt was given up because of `reason`; it is to be posed again
    REFUSED = "refused"  # somebody reported on an attempt that is not running; nothing changed


class Event(msgspec.Struct, frozen=True):
    """One line of a group's history."""

    kind: Kind
    group: int
    attempt: int
    step: int | None = None
    version: Version | None = None
    reason: str = ""  # counted by what stands before a colon


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """Where a line begins: its number, the step it is at, the groups to pose again (with the last attempt made), and
    the first index never posed."""

    line: int
    step: int
    waiting: tuple[tuple[int, int], ...] = ()
    fresh: int = 0


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

    def close(self) -> None:
        """Commit and close."""
        try:
            self.commit()
        finally:
            self._db.close()

    def _write(self, cut: int | None) -> None:
        with transaction(self._db, self._path):
            (newest,) = self._db.execute("SELECT max(line) FROM lines").fetchone()
            if newest != self._line:
                raise LedgerError(f"ledger {self._path}: line {newest} has taken over from line {self._line}; stop")
            self._db.executemany(INSERT, (_row(self._line, event) for event in self._pending))
            if cut is not None:
                self._db.execute("INSERT OR IGNORE INTO cuts VALUES (?, ?)", (self._line, cut))
        self._pending.clear()


def open_ledger(folder: Path, *, resume_step: int | None) -> tuple[Ledger, Opening]:
    """Open `folder`'s ledger on a new line.

    `resume_step` None begins a run and refuses a folder that holds one. Otherwise the line goes on from the checkpoint
    of that step: groups taken by steps below it on the surviving history are trained, groups dropped for good stay
    dropped, and every other group ever posed is to be posed again; what later steps did is superseded, not deleted.

    Raises RunFolderError (a run is there, or none to resume, or the step is unknown), LedgerError.
    """
    path = folder / FILE
    if resume_step and not path.exists():
        raise RunFolderError(f"{path} does not exist, so step {resume_step} cannot be resumed; start a new run")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise LedgerError(f"folder {folder} for the ledger cannot be made: {fault}") from fault
    db = connect(path, f"{path.absolute().as_uri()}?mode=rwc")
    try:
        with transaction(db, path):
            check_schema(db, path, create=True)
            opening = _open_line(db, path, resume_step)
    except BaseException:
        db.close()
        raise
    return Ledger(db, path, opening.line), opening


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


def check_schema(db: sqlite3.Connection, path: Path, *, create: bool) -> None:
    """Refuse a file of another layout; make the tables in an empty one if asked to."""
    (found,) = db.execute("PRAGMA user_version").fetchone()
    if found == 0 and create:
        for table in TABLES:
            db.execute(table)
        db.execute(f"PRAGMA user_version = {SCHEMA}")
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


def _open_line(db: sqlite3.Connection, path: Path, resume_step: int | None) -> Opening:
    (newest,) = db.execute("SELECT max(line) FROM lines").fetchone()
    if newest is None:
        if resume_step:
            raise RunFolderError(f"{path} holds no run, so step {resume_step} cannot be resumed; start a new run")
        db.execute("INSERT INTO lines VALUES (0, NULL, 0)")
        return Opening(line=0, step=0)
    if resume_step is None:
        raise RunFolderError(f"{path} already holds a run (line {newest}); resume it, or choose another folder")
    line = newest + 1
    db.execute("INSERT INTO lines VALUES (?, ?, ?)", (line, _parent(db, path, resume_step), resume_step))
    waiting, changes = _sort_out(db, line)
    db.executemany(INSERT, (_row(line, event) for event in changes))
    (last,) = db.execute("SELECT max(group_id) FROM events WHERE kind = 'posed'").fetchone()
    return Opening(line=line, step=resume_step, waiting=tuple(waiting), fresh=0 if last is None else last + 1)


def _parent(db: sqlite3.Connection, path: Path, step: int) -> int:
    """The line whose checkpoint of `step` is resumed: the newest that cut there; failing that (killed between the
    checkpoint and its record) the newest that took step - 1, or began at `step`."""
    for query in (
        "SELECT max(line) FROM cuts WHERE step = :step",
        "SELECT max(line) FROM events WHERE kind = 'taken' AND step = :step - 1",
        "SELECT max(line) FROM lines WHERE from_step = :step",
    ):
        (line,) = db.execute(query, {"step": step}).fetchone()
        if line is not None:
            return int(line)
    (last,) = db.execute("SELECT max(step) FROM events WHERE kind = 'taken'").fetchone()
    known = "no step was taken" if last is None else f"the last step taken is {last}"
    raise RunFolderError(f"{path} knows of no checkpoint of step {step}: {known}")


def _sort_out(db: sqlite3.Connection, line: int) -> tuple[list[tuple[int, int]], list[Event]]:
    """Which groups a new line poses again, and the events that say what changed for whom."""
    rows = db.execute(
        "SELECT life.group_id, life.attempt, life.step, events.kind FROM (SELECT group_id, max(id) AS last,"
        f" max(attempt) AS attempt, max(CASE WHEN kind = 'taken' AND {on_path(surviving(db, line))} THEN step END)"
        " AS step FROM events WHERE kind != 'refused' GROUP BY group_id) AS life"
        " JOIN events ON events.id = life.last ORDER BY life.group_id"
    )
    waiting, changes = [], []
    for group, attempt, step, kind in rows:
        if step is not None:
            if kind != Kind.TRAINED:
                changes.append(Event(Kind.TRAINED, group, attempt, step, reason="in the checkpoint"))
        elif kind != Kind.DROPPED:
            waiting.append((group, attempt))
            if kind != Kind.WAITING:
                changes.append(Event(Kind.WAITING, group, attempt, reason="dead_line"))
    return waiting, changes


def _row(line: int, event: Event) -> tuple[int, str, int, int, int | None, int | None, int | None, str]:
    version_line, version_n = (None, None) if event.version is None else (event.version.line, event.version.n)
    return line, event.kind, event.group, event.attempt, event.step, version_line, version_n, event.reason
