"""What a new line keeps of the groups of the lines before it: trained again, still ready, or posed again.

Takes the ledger inside the opening's transaction; gives lists and the events that say what changed for whom.

Versions. What a restart undid it mostly does again: the recorded takes that followed the cut are trained again from
their payloads, in their order, and lead to the same versions. `lines.shared` says up to which n. Only versions beyond
it are of a dead line; the age of their tokens is the way from one version to the other through the fork.

Going back. With `Keep.until` nothing is done again: every group is what it was after that event, and what came later
is undone. An attempt whose number was used since gets the next free one, and takes the payload over.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

import msgspec

from contraflow.buffer.ledger import HANDED_BACK, Event, Kind, on_path, surviving
from contraflow.buffer.segments import Place
from contraflow.buffer.window import Window
from contraflow.types import Version

ALL = 2**62  # shared by a line with itself; an event later than any


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
    """By which rules payloads are kept; `damage` says what is wrong with one, nothing when it is whole. `until`: the
    event to go back to, which a cut was made after; None: nothing is undone that can be done again."""

    window: Window
    dead_line: Literal["train", "repose"]
    damage: Callable[[Place], str]
    until: int | None = None


@dataclass(frozen=True, kw_only=True)
class Found:
    """A group that had been ready, with its payload; `oldest` and `newest` count on the line that sampled it."""

    group: int
    attempt: int  # that it goes on as
    kind: Kind
    step: int | None  # that took it
    last: int  # id of its last event
    again: int | None  # the attempt that its payload is of, if more is known of the group, and undone
    line: int
    oldest: int
    newest: int
    place: Place


class _Life(NamedTuple):
    """A group as of the event to go back to, its newest otherwise; `final` is the newest, `most` the newest attempt."""

    group: int
    attempt: int
    trained: int | None  # by the step of the surviving history that took it
    kind: str  # empty: it was not posed yet
    reason: str
    step: int | None
    last: int
    most: int
    final: int
    line: int | None  # of its payload, as all that follows: None when there is none
    oldest: int
    newest: int
    segment: str
    start: int
    length: int
    digest: bytes

    @property
    def undone(self) -> bool:
        """Whether more became of it since."""
        return self.final != self.last


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
        for life in self._lives():
            kind, group, handed_back = life.kind, life.group, life.reason == HANDED_BACK
            if life.trained is not None:
                if kind != Kind.TRAINED or life.undone:
                    self.events.append(Event(Kind.TRAINED, group, life.most, life.trained, reason="in the checkpoint"))
            elif not kind or (kind == Kind.WAITING and life.undone and not handed_back):
                self._repose(group, life.most, "undone")
            elif kind == Kind.WAITING and not handed_back:
                self.waiting.append((group, life.attempt))
            elif kind in (Kind.POSED, Kind.STARTED):
                self._repose(group, life.most, "dead_line")
            elif kind != Kind.DROPPED:
                self._sort(life)
            elif life.undone:
                self.events.append(Event(Kind.DROPPED, group, life.most, reason=life.reason))

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
                continue
            self.waiting.append((each.group, each.attempt))
            self.left.append(kept)
            if each.again is not None:
                told = Event(Kind.WAITING, each.group, each.attempt, reason=HANDED_BACK, again=each.again)
                self.events.append(told)
        able = []
        for each in sorted(chain(self._ready, *self._taken.values()), key=lambda each: each.group):
            kept = self._kept(each)
            if self._is_dead(each, kept):
                self._repose(each.group, each.attempt, "dead_line")
            else:
                able.append((each, kept))
        every = [kept for _, kept in able]
        back = self._keep.until is not None  # to what the window had let be
        admitted = {kept.group for kept in every} if back else self._keep.window.admit(step, every)
        for each, kept in able:
            if each.group not in admitted:
                self._repose(each.group, each.attempt, "expired")
                continue
            self.ready.append(kept)
            if each.kind != Kind.READY or each.again is not None:
                oldest = Version(each.line, each.oldest)
                self.events.append(Event(Kind.READY, each.group, each.attempt, version=oldest, again=each.again))

    def _lives(self) -> Iterable[_Life]:
        until, path = ALL if self._keep.until is None else self._keep.until, on_path(surviving(self._db, self._line))
        rows = self._db.execute(
            "SELECT life.group_id, life.attempt, life.step, ifnull(events.kind, ''), events.reason, events.step,"
            " last, most, final, payloads.line, oldest, newest, segment, start, length, digest"
            " FROM (SELECT group_id, max(id) AS final, max(attempt) AS most,"
            " max(CASE WHEN id <= :until THEN id END) AS last,"
            " max(CASE WHEN id <= :until THEN attempt END) AS attempt,"
            f" max(CASE WHEN id <= :until AND kind = 'taken' AND {path} THEN step END) AS step"
            " FROM events WHERE kind != 'refused' GROUP BY group_id) AS life"
            " LEFT JOIN events ON events.id = life.last LEFT JOIN payloads"
            " ON payloads.group_id = life.group_id AND payloads.attempt = life.attempt ORDER BY life.group_id",
            {"until": until},
        )
        return (_Life(*row) for row in rows)

    def _sort(self, life: _Life) -> None:
        """A group that is to have a payload."""
        place = Place(life.segment, life.start, life.length, life.digest)
        damage = self._keep.damage(place) if life.line is not None else ""
        if life.line is None or damage:
            self._repose(life.group, life.most, f"damaged: {damage}" if damage else "no_payload")
            if life.step is not None:
                self._torn.add(life.step)
            return
        found = Found(
            group=life.group,
            attempt=life.most + 1 if life.undone else life.attempt,
            kind=Kind(life.kind),
            step=life.step,
            last=life.last,
            again=life.attempt if life.undone else None,
            line=life.line,
            oldest=life.oldest,
            newest=life.newest,
            place=place,
        )
        if found.kind == Kind.WAITING:
            self._handed_back.append(found)
        else:
            (self._ready if found.step is None else self._taken[found.step]).append(found)

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
