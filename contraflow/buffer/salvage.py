"""What a new line keeps of the groups of the lines before it: trained again, still ready, or posed again.

Takes the ledger inside the opening's transaction; gives lists and the events that say what changed for whom.

Versions. What a restart undid it mostly does again: the recorded takes that followed the cut are trained again from
their payloads, in their order, and lead to the same versions. `lines.shared` says up to which n. Only versions beyond
it are of a dead line; the age of their tokens is the way from one version to the other through the fork.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import msgspec

from contraflow.buffer.ledger import HANDED_BACK, Event, Kind, on_path, surviving
from contraflow.buffer.segments import Place
from contraflow.buffer.window import Window
from contraflow.types import Version

ALL = 2**62  # shared by a line with itself


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A group whose payload outlived its line. `oldest` and `newest` count on the new line: see `same_age`."""

    group: int
    attempt: int
    oldest: int
    newest: int
    shared: int  # versions of its tokens up to this n are versions of the surviving history
    place: Place


@dataclass(frozen=True, kw_only=True)
class Keep:
    """By which rules payloads are kept; `damage` says what is wrong with one, nothing when it is whole."""

    window: Window
    dead_line: Literal["train", "repose"]
    damage: Callable[[Place], str]


@dataclass(frozen=True, kw_only=True)
class Found:
    """A group that had been ready, with its payload; `oldest` and `newest` count on the line that sampled it."""

    group: int
    attempt: int
    kind: Kind
    step: int
    last: int  # id of its last event
    line: int
    oldest: int
    newest: int
    place: Place


def same_age(n: int, shared: int) -> int:
    """The n of a surviving version that is as old as version n of a history left behind after `shared`.

    From version n the way to version m goes back to the fork and forth: (n - shared) + (m - shared) = m - this.
    """
    return n if n <= shared else 2 * shared - n


def shared_with(db: sqlite3.Connection, line: int, now: int) -> int:
    """The newest n such that version n of the history of `line` is the same of the history of line `now`."""
    (least,) = db.execute("SELECT min(shared) FROM lines WHERE line > ? AND line <= ?", (line, now)).fetchone()
    return ALL if least is None else int(least)


class Salvage:
    """Every group ever posed, put where it belongs on line `line`, which begins at `step`.

    Call `read`, then `pin` where the cut is of the newest history, then, once the line's `shared` is written,
    `keep_ready`. Invariant: `events` says what changed for whom.
    """

    def __init__(self, db: sqlite3.Connection, *, line: int, step: int, keep: Keep) -> None:
        self._db, self._line, self._step, self._keep = db, line, step, keep
        self.waiting: list[tuple[int, int]] = []
        self.ready: list[Kept] = []
        self.due: list[tuple[Kept, ...]] = []
        self.left: list[Kept] = []
        self.events: list[Event] = []
        self._taken: defaultdict[int, list[Found]] = defaultdict(list)  # by steps that the cut does not hold
        self._torn: set[int] = set()  # steps whose take lacks a payload
        self._ready: list[Found] = []
        self._handed_back: list[Found] = []

    def read(self) -> None:
        """Settle what is trained, dropped or unfinished; what had been ready waits for `pin` and `keep_ready`."""
        for group, attempt, trained, kind, reason, step, last, *payload in self._rows():
            if trained is not None:
                if kind != Kind.TRAINED:
                    self.events.append(Event(Kind.TRAINED, group, attempt, trained, reason="in the checkpoint"))
            elif kind == Kind.WAITING and reason == HANDED_BACK:
                self._take_back(group, attempt, Kind(kind), last, payload)
            elif kind == Kind.WAITING:
                self.waiting.append((group, attempt))
            elif kind in (Kind.POSED, Kind.STARTED):
                self._repose(group, attempt, "dead_line")
            elif kind != Kind.DROPPED:
                self._sort(group, attempt, Kind(kind), step, last, payload)

    def pin(self) -> int:
        """Takes whose payloads are all there are due again, up to the first that lacks one; gives the step after."""
        step = self._step
        while step in self._taken and step not in self._torn:
            found = sorted(self._taken.pop(step), key=lambda each: each.last)
            self.due.append(tuple(self._kept(each) for each in found))
            self.events += [Event(Kind.DUE, each.group, each.attempt, step) for each in found]
            step += 1
        return step

    def keep_ready(self, step: int) -> None:
        """What was ready, or taken by a step that is not done again, is ready for `step` and later ones, if it may.

        What was handed back may be gone on with, by the rules of the window when it is posed.
        """
        for each in self._handed_back:
            kept = self._kept(each)
            if self._is_dead(each, kept):
                self._repose(each.group, each.attempt, "dead_line")
            else:
                self.waiting.append((each.group, each.attempt))
                self.left.append(kept)
        able = []
        for each in sorted(chain(self._ready, *self._taken.values()), key=lambda each: each.group):
            kept = self._kept(each)
            if self._is_dead(each, kept):
                self._repose(each.group, each.attempt, "dead_line")
            else:
                able.append((each, kept))
        admitted = self._keep.window.admit(step, [kept for _, kept in able])
        for each, kept in able:
            if each.group not in admitted:
                self._repose(each.group, each.attempt, "expired")
                continue
            self.ready.append(kept)
            if each.kind != Kind.READY:
                oldest = Version(each.line, each.oldest)
                self.events.append(Event(Kind.READY, each.group, each.attempt, version=oldest))

    def _rows(self) -> Iterable[tuple[Any, ...]]:
        return self._db.execute(
            "SELECT life.group_id, life.attempt, life.step, events.kind, events.reason, events.step, events.id,"
            " payloads.line, oldest, newest, segment, start, length, digest"
            " FROM (SELECT group_id, max(id) AS last, max(attempt) AS attempt,"
            f" max(CASE WHEN kind = 'taken' AND {on_path(surviving(self._db, self._line))} THEN step END) AS step"
            " FROM events WHERE kind != 'refused' GROUP BY group_id) AS life"
            " JOIN events ON events.id = life.last LEFT JOIN payloads"
            " ON payloads.group_id = life.group_id AND payloads.attempt = life.attempt ORDER BY life.group_id"
        )

    def _sort(self, group: int, attempt: int, kind: Kind, step: int | None, last: int, payload: list[Any]) -> None:
        """`step` is None for groups that were ready and not taken."""
        found = self._found(group, attempt, kind, step, last, payload)
        if isinstance(found, Found):
            (self._ready if step is None else self._taken[step]).append(found)
            return
        self._repose(group, attempt, found)
        if step is not None:
            self._torn.add(step)

    def _take_back(self, group: int, attempt: int, kind: Kind, last: int, payload: list[Any]) -> None:
        found = self._found(group, attempt, kind, None, last, payload)
        if isinstance(found, Found):
            self._handed_back.append(found)
        else:
            self._repose(group, attempt, found)

    def _found(
        self, group: int, attempt: int, kind: Kind, step: int | None, last: int, payload: list[Any]
    ) -> Found | str:
        """The payload of an attempt, or why there is none."""
        line, oldest, newest, *where = payload
        if line is None:
            return "no_payload"
        place = Place(*where)
        if damage := self._keep.damage(place):
            return f"damaged: {damage}"
        return Found(
            group=group,
            attempt=attempt,
            kind=kind,
            step=-1 if step is None else step,
            last=last,
            line=line,
            oldest=oldest,
            newest=newest,
            place=place,
        )

    def _is_dead(self, found: Found, kept: Kept) -> bool:
        """Whether it holds tokens of undone versions that the run does not want, or that are older than any."""
        return (found.newest > kept.shared and self._keep.dead_line == "repose") or kept.oldest < 0

    def _repose(self, group: int, attempt: int, reason: str) -> None:
        self.waiting.append((group, attempt))
        self.events.append(Event(Kind.WAITING, group, attempt, reason=reason))

    def _kept(self, found: Found) -> Kept:
        shared = shared_with(self._db, found.line, self._line)
        ages = (same_age(found.oldest, shared), same_age(found.newest, shared))
        return Kept(
            group=found.group,
            attempt=found.attempt,
            oldest=min(ages),
            newest=max(ages),
            shared=shared,
            place=found.place,
        )
