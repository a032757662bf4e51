"""Beginning a line: a run's first, or the next one after a stop or a crash; what of the history before it survives.

Takes the ledger, the step of the cut that is resumed and a `Keep`; gives a `Ledger` and an `Opening`. In one
transaction: either the new line is there, and says of each group where it is, or nothing has changed.
"""

import sqlite3
from pathlib import Path

import msgspec

from contraflow.buffer.ledger import (
    AGAIN,
    FILE,
    INSERT,
    Ledger,
    Solved,
    again_rows,
    check_schema,
    connect,
    event_row,
    transaction,
)
from contraflow.buffer.salvage import ALL, Keep, Kept, Salvage, shared_with
from contraflow.errors import LedgerError, RunFolderError

UNMEASURED = (  # what was measured of attempts that had not come to their end by an event
    "DELETE FROM rates WHERE (group_id, attempt) NOT IN"
    " (SELECT group_id, attempt FROM events WHERE kind IN ('ready', 'dropped') AND id <= ?)"
)


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """Where a line begins: its number, the step it is at, and what became of the groups of the lines before.

    `waiting` are to be posed again (with the last attempt made), `due` to be trained again by the steps from `step` on,
    `ready` wait for the steps after these. `left` is what there is of groups of `waiting` to go on from. `fresh` is the
    first index never posed, `segments` the files that rows name. `solved` is what was measured of groups, in
    order, whatever became of them.
    """

    line: int
    step: int
    waiting: tuple[tuple[int, int], ...] = ()
    fresh: int = 0
    ready: tuple[Kept, ...] = ()
    due: tuple[tuple[Kept, ...], ...] = ()
    left: tuple[Kept, ...] = ()
    segments: frozenset[str] = frozenset()
    solved: tuple[Solved, ...] = ()


def open_ledger(
    folder: Path, *, resume_step: int | None, keep: Keep, least_line: int = 0, run_id: int = 0
) -> tuple[Ledger, Opening]:
    """Open `folder`'s ledger on a new line: the next one, or `least_line` if others were begun elsewhere meanwhile.

    `resume_step` None begins a run and refuses a folder that holds one. Otherwise the line goes on from the checkpoint
    of that step: groups taken by steps below it on the surviving history are trained, groups dropped for good stay
    dropped; with their payloads, groups of later takes are trained again by the same steps, and ready ones stay ready.
    Every other group ever posed is to be posed again; what was is superseded, not deleted. With `keep.until` all is as
    of that event, later measurements are forgotten. A ledger that is made here keeps `run_id`, of 31 bits, for good.

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
            check_schema(db, path, create=True, run_id=run_id)
            opening = _open_line(db, path, resume_step, keep, least_line)
    except BaseException:
        db.close()
        raise
    return Ledger(db, path, opening.line), opening


def _open_line(db: sqlite3.Connection, path: Path, resume_step: int | None, keep: Keep, least: int) -> Opening:
    (newest,) = db.execute("SELECT max(line) FROM lines").fetchone()
    if newest is None:
        if resume_step:
            raise RunFolderError(f"{path} holds no run, so step {resume_step} cannot be resumed; start a new run")
        db.execute("INSERT INTO lines VALUES (?, NULL, 0, 0)", (least,))
        return Opening(line=least, step=0)
    if resume_step is None:
        raise RunFolderError(f"{path} already holds a run (line {newest}); resume it, or choose another folder")
    line, parent = max(newest + 1, least), _parent(db, path, resume_step)
    shared = shared_with(db, parent, newest)
    straight = resume_step <= shared  # the cut is of the newest history, not of one that was left earlier
    db.execute("INSERT INTO lines VALUES (?, ?, ?, ?)", (line, parent, resume_step, ALL if straight else shared))
    salvage = Salvage(db, line=line, step=resume_step, keep=keep)
    salvage.read()
    again = salvage.pin() if straight else resume_step
    if straight:
        db.execute("UPDATE lines SET shared = ? WHERE line = ?", (again, line))
    salvage.keep_ready(again)
    db.executemany(INSERT, (event_row(line, event) for event in salvage.events))
    db.executemany(AGAIN, again_rows(salvage.events))
    if keep.until is not None:
        db.execute(UNMEASURED, (keep.until,))
    (last,) = db.execute("SELECT max(group_id) FROM events WHERE kind = 'posed'").fetchone()
    return Opening(
        line=line,
        step=resume_step,
        waiting=tuple(sorted(salvage.waiting)),
        fresh=0 if last is None else last + 1,
        ready=tuple(salvage.ready),
        due=tuple(salvage.due),
        left=tuple(salvage.left),
        segments=frozenset(name for (name,) in db.execute("SELECT DISTINCT segment FROM payloads")),
        solved=tuple(
            Solved(kind=kind, rate=rate) for kind, rate in db.execute("SELECT kind, rate FROM rates ORDER BY id")
        ),
    )


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
