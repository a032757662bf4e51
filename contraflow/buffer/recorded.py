"""The takes of a run as they were recorded, with their payloads: what a replay trains on, and samples again.

Takes the buffer's folder; gives takes in order and their groups: by a `fetch` like the buffer's as training sees them,
by `as_sampled` with the versions that sampled them. Only reads.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from contraflow.buffer.ledger import on_path, reading, surviving
from contraflow.buffer.salvage import shared_with
from contraflow.buffer.segments import Place, read_group
from contraflow.buffer.service import on_line
from contraflow.errors import LedgerError
from contraflow.runtime.base import Host
from contraflow.types import Chosen, Group, Span, Take, Ticket, Version


class Recorded:
    """The surviving history of a run. Invariant: `_places` holds a payload for every group of `_takes`."""

    def __init__(self, folder: Path, *, line: int, first_step: int, max_age: int) -> None:
        """Takes from `first_step` on, after a cut of `line`. Raises RunFolderError, LedgerError."""
        self._folder = folder
        self._takes: list[Take] = []
        self._places: dict[tuple[int, int], tuple[Place, int]] = {}  # and the line it was sampled on
        self._shared: dict[int, int] = {}  # newest version of each line that the surviving history has too
        with reading(folder) as db:
            (self.line,) = db.execute("SELECT max(line) FROM lines").fetchone()
            self._shared = {each: shared_with(db, each, self.line) for each in range(self.line + 1)}
            if self._shared[line] < first_step:
                raise LedgerError(f"the cut of step {first_step} on line {line} is not of the surviving history")
            rows = db.execute(
                "SELECT step, group_id, attempt, payloads.line, segment, start, length, digest FROM events LEFT JOIN"
                " payloads USING (group_id, attempt) WHERE kind = 'taken'"
                f" AND {on_path(surviving(db, self.line)).replace('line =', 'events.line =')}"
                " AND step >= ? ORDER BY step, id",
                (first_step,),
            )
            steps: dict[int, list[Chosen]] = {}
            for step, group, attempt, sampled, *where in rows:
                if sampled is None:
                    raise LedgerError(
                        f"group {group} of step {step} cannot be trained again: its payload was let go; run with"
                        " buffer.keep_payloads = 'all', or replay from a later cut"
                    )
                self._places[group, attempt] = (Place(*where), sampled)
                floor = Version(self.line, max(step - max_age, 0))
                steps.setdefault(step, []).append(Chosen(group, attempt, floor))
        self._takes = [Take(step=step, groups=tuple(chosen)) for step, chosen in steps.items()]

    async def takes(self) -> list[Take]:
        """In order."""
        return self._takes

    async def fetch(self, chosen: tuple[Chosen, ...]) -> list[Group]:
        """Payloads of recorded groups, in that order. Raises PayloadError when one was damaged."""
        return [on_line(group, group.ticket, self._shared[sampled]) for group, sampled in self._read(chosen)]

    async def as_sampled(self, chosen: tuple[Chosen, ...]) -> list[Group]:
        """The same, with every version that the surviving history has too named as of the newest line.

        Versions of other lines are those that nobody can train again. Raises PayloadError.
        """
        return [self._named(group) for group, _ in self._read(chosen)]

    def _read(self, chosen: tuple[Chosen, ...]) -> Iterator[tuple[Group, int]]:
        for each in chosen:
            place, sampled = self._places[each.group, each.attempt]
            ticket = Ticket(group=each.group, attempt=each.attempt, line=self.line)
            yield msgspec.structs.replace(read_group(self._folder, place), ticket=ticket), sampled

    def _named(self, group: Group) -> Group:
        def named(span: Span) -> Span:
            line, n = span.version.line, span.version.n
            return Span(Version(self.line if n <= self._shared[line] else line, n), span.start, span.end)

        replace = msgspec.structs.replace
        episodes = (replace(episode, spans=tuple(map(named, episode.spans))) for episode in group.episodes)
        return replace(group, episodes=tuple(episodes))


def make_recorded(host: Host, *, folder: str, line: int, first_step: int, max_age: int) -> Recorded:
    """The recorded takes as a worker."""
    return Recorded(Path(folder), line=line, first_step=first_step, max_age=max_age)
