"""Where every group of a run is, read from its ledger: while the run lives, after it ended, or after it was killed.

Takes the buffer's folder, gives `Accounts`. Writes nothing. A live run's ledger may be one batch of events behind.
"""

import sqlite3
from pathlib import Path

import msgspec

from contraflow.buffer.ledger import on_path, reading, surviving


class Accounts(msgspec.Struct, frozen=True, kw_only=True):
    """Groups by where they are, over the whole history that survives.

    posed = trained + dropped + held, where held = waiting + running + ready + due + taken; `due` are to be trained
    again, by the steps that took them before a restart. `final` of the trained are in a committed checkpoint.
    `dropped` ended for good, by reason. `reposed` counts attempts given up, by reason, and `refused` reports on
    attempts that were not running. `superseded` counts trainings undone by a resume.
    """

    line: int
    cut: int  # newest step whose checkpoint is committed; 0 when none
    posed: int
    waiting: int
    running: int
    ready: int
    taken: int
    trained: int
    final: int
    dropped: dict[str, int]
    reposed: dict[str, int]
    refused: dict[str, int]
    superseded: int
    due: int = 0

    @property
    def held(self) -> int:
        return self.waiting + self.running + self.ready + self.due + self.taken


def accounts(folder: Path) -> Accounts:
    """The accounts of the run whose buffer lives in `folder`.

    Raises RunFolderError when there is no ledger, LedgerError when it cannot be read.
    """
    with reading(folder) as db:
        return tally(db)


def tally(db: sqlite3.Connection) -> Accounts:
    """Count inside the caller's transaction."""
    (line,) = db.execute("SELECT max(line) FROM lines").fetchone()
    path = surviving(db, line)
    (cut,) = db.execute(f"SELECT coalesce(max(step), 0) FROM cuts WHERE {_cuts_on(path)}").fetchone()
    states: dict[str, int] = {}
    dropped: dict[str, int] = {}
    final = posed = 0
    # SQLite takes the other columns of a max() from the row that holds the maximum: each group's last event.
    for kind, step, reason, _ in db.execute(
        "SELECT kind, step, reason, max(id) FROM events WHERE kind != 'refused' GROUP BY group_id"
    ):
        posed += 1
        states[kind] = states.get(kind, 0) + 1
        if kind == "dropped":
            dropped[reason] = dropped.get(reason, 0) + 1
        if kind == "trained" and step < cut:
            final += 1
    # "lost: worker rollout-1 died" counts as "lost".
    cause = "substr(reason, 1, instr(reason || ':', ':') - 1)"
    by_reason = f"SELECT {cause}, count(*) FROM events WHERE kind = ? GROUP BY 1 ORDER BY 1"
    (superseded,) = db.execute(f"SELECT count(*) FROM events WHERE kind = 'taken' AND NOT {on_path(path)}").fetchone()
    return Accounts(
        line=line,
        cut=cut,
        posed=posed,
        waiting=states.get("waiting", 0),
        running=states.get("posed", 0) + states.get("started", 0),
        ready=states.get("ready", 0),
        taken=states.get("taken", 0),
        trained=states.get("trained", 0),
        final=final,
        dropped=dropped,
        reposed=dict(db.execute(by_reason, ("waiting",))),
        refused=dict(db.execute(by_reason, ("refused",))),
        superseded=superseded,
        due=states.get("due", 0),
    )


def _cuts_on(path: list[tuple[int, int]]) -> str:
    """SQL that is true of cuts on `path`: a line may be left exactly at its last surviving cut."""
    return on_path([(line, end + 1) for line, end in path])
