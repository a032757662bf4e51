"""Exactly once, as queries on the record: whatever is wrong with a run's groups, in words.

Takes the buffer's folder, gives sentences; none when every group is in exactly one end state of the surviving history:
trained by one step, dropped with a reason, or held. Reads SQLite only and shares no code with what wrote it but the
file's layout and `surviving`. Does not read payloads, and changes nothing.
"""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

from contraflow.buffer.ledger import on_path, reading, surviving

SHOWN = 10  # groups named in a sentence


def audit(folder: Path) -> list[str]:
    """What is wrong. Raises RunFolderError when there is no ledger, LedgerError when it cannot be read."""
    with reading(folder) as db:
        return list(_findings(db))


def _findings(db: sqlite3.Connection) -> Iterator[str]:
    (line,) = db.execute("SELECT max(line) FROM lines").fetchone()
    here = on_path(surviving(db, line))
    last = (
        "(SELECT group_id, kind, step, attempt, reason, max(id) FROM events WHERE kind != 'refused' GROUP BY group_id)"
    )
    taken = f"(SELECT group_id, step FROM events WHERE kind = 'taken' AND {here})"
    for query, sentence in (
        (
            f"SELECT group_id FROM {taken} GROUP BY group_id HAVING count(*) > 1",
            "taken more than once on the surviving history",
        ),
        (
            f"SELECT group_id FROM events WHERE kind = 'trained' AND {here}"
            " GROUP BY group_id HAVING count(DISTINCT step) > 1",
            "trained by more than one step of the surviving history",
        ),
        (
            f"SELECT group_id FROM {last} WHERE kind = 'trained' AND (group_id, step) NOT IN {taken}",
            "said to be trained by a step that did not take them on the surviving history",
        ),
        (
            f"SELECT group_id FROM {last} WHERE kind NOT IN ('taken', 'trained') AND group_id IN"
            f" (SELECT group_id FROM {taken})",
            "taken on the surviving history, and then something else",
        ),
        (
            f"SELECT group_id FROM {last} WHERE group_id NOT IN (SELECT group_id FROM events WHERE kind = 'posed')",
            "never posed",
        ),
        (
            f"SELECT group_id FROM {last} WHERE kind = 'dropped' AND reason = ''",
            "dropped without a reason",
        ),
        (
            f"SELECT group_id FROM {last} WHERE kind IN ('ready', 'due') AND (group_id, attempt) NOT IN"
            " (SELECT group_id, attempt FROM payloads)",
            "ready without a payload",
        ),
    ):
        yield from _told(db, query, sentence)
    yield from _skipped(db)
    yield from _steps(db, here)
    yield from _fence(db)


def _told(db: sqlite3.Connection, query: str, sentence: str) -> Iterator[str]:
    groups = [group for (group,) in db.execute(f"{query} ORDER BY 1")]
    if groups:
        named = ", ".join(map(str, groups[:SHOWN])) + (" and more" if len(groups) > SHOWN else "")
        yield f"{len(groups)} {'group' if len(groups) == 1 else 'groups'} {sentence}: {named}"


def _skipped(db: sqlite3.Connection) -> Iterator[str]:
    """Tasks are posed in order, so an index that is missing below the largest was skipped."""
    count, most = db.execute(
        "SELECT count(DISTINCT group_id), max(group_id) FROM events WHERE kind = 'posed'"
    ).fetchone()
    if count and count != most + 1:
        yield f"{most + 1 - count} tasks were skipped: {count} groups were posed, the last of them is {most}"


def _steps(db: sqlite3.Connection, here: str) -> Iterator[str]:
    query = f"SELECT count(DISTINCT step), max(step) FROM events WHERE kind = 'taken' AND {here}"
    count, most = db.execute(query).fetchone()
    if count and count != most + 1:
        yield f"{most + 1 - count} steps of the surviving history took no group; its last step is {most}"


def _fence(db: sqlite3.Connection) -> Iterator[str]:
    query = (
        "SELECT count(*) FROM events WHERE EXISTS (SELECT 1 FROM"
        " (SELECT line, min(id) AS began FROM events GROUP BY line) AS later"
        " WHERE later.line > events.line AND later.began < events.id)"
    )
    (late,) = db.execute(query).fetchone()
    if late:
        yield f"{late} events were written by a line after a newer one had begun"
