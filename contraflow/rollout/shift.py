"""How long a worker plays each group: until its deadline, or until the worker has to leave.

Takes begins and ends of groups and the order to leave; ends what is late by cancelling it. Does not know what becomes
of a group that was not finished: that is worker.py.
"""

import asyncio
from dataclasses import dataclass, field

import msgspec

from contraflow import config
from contraflow.errors import DeadlineExceeded
from contraflow.rollout.draft import Draft
from contraflow.rollout.handover import is_open
from contraflow.rollout.report import Drained, GroupSummary
from contraflow.types import Episode, Task

SETTLE_S = 60.0  # beyond the grace: for calls to the buffer, which bound themselves


@dataclass(frozen=True)
class Moves:
    """Which groups that are ended unfinished go on elsewhere from what is there of them."""

    drained: bool  # of a worker that leaves
    late: bool

    @classmethod
    def of(cls, rollout: config.Rollout) -> "Moves":
        return cls(rollout.continue_from > 0, rollout.continue_from > 0 and rollout.overdue == "continue")


@dataclass(eq=False)
class Shift:
    """One group. `limit` is entered by whoever plays it; once it is `settled`, nothing may end it any more."""

    leaving: bool
    can_move: Moves = Moves(drained=False, late=False)
    limit: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    began: bool = False
    drained: bool = False  # it is the order to leave that ends it, not its deadline
    settled: bool = False
    handed_back: bool = False
    task: Task | None = None
    places: list[tuple[Draft, asyncio.Future[Episode]]] = field(default_factory=list)  # of the episodes

    def start(self, deadline_s: float) -> bool:
        """It has its turn; False when none may begin any more."""
        if self.leaving:
            return False
        self.began = True
        self.limit.reschedule(asyncio.get_running_loop().time() + deadline_s)
        return True

    def settle(self) -> None:
        """All that may be cancelled is done."""
        self.settled = True
        if not self.limit.expired():
            self.limit.reschedule(None)

    def leave(self, grace_s: float) -> None:
        """End it after `grace_s`, or at once if it has not begun."""
        self.leaving = True
        if self.settled or self.limit.expired():
            return
        when = asyncio.get_running_loop().time() + (grace_s if self.began else 0.0)
        if (due := self.limit.when()) is None or when < due:
            self.drained = True
            self.limit.reschedule(when)

    def episode(self, place: int) -> Episode | None:
        """The episode of a place; None when it was not finished."""
        playing = self.places[place][1]
        if not playing.done() or playing.cancelled() or playing.exception() or is_open(playing.result()):
            return None
        return playing.result()

    @property
    def moves(self) -> bool:
        """Whether it is being ended so that somebody else goes on."""
        return self.limit.expired() and (self.can_move.drained if self.drained else self.can_move.late)

    def halt(self) -> dict[str, asyncio.Future[Episode]]:
        """None of its episodes is to ask anybody again; gives the requests under way, and the episodes they are of."""
        for draft, _ in self.places:
            draft.halt()
        return {draft.asked: playing for draft, playing in self.places if draft.asked and not playing.done()}

    def told(self, summary: GroupSummary) -> GroupSummary:
        """The summary, with what was taken over from an earlier attempt."""
        recalled = [draft.recalled for draft, _ in self.places if draft.recalled]
        return msgspec.structs.replace(summary, continued=len(recalled), saved=sum(recalled))

    def so_far(self, place: int) -> Episode:
        """The episode of a place as it is, finished or not."""
        return self.episode(place) or self.places[place][0].unfinished()


class Shifts:
    """All groups of a worker. Invariant: a shift is in here from `begin` to `end`."""

    def __init__(self, can_move: Moves) -> None:
        self._can_move = can_move
        self._leaving = self._halted = False
        self._open: set[Shift] = set()
        self._ended = asyncio.Event()

    def begin(self) -> Shift:
        """A group came; it may have to wait for its turn."""
        shift = Shift(self._leaving or self._halted, self._can_move)
        self._open.add(shift)
        return shift

    def end(self, shift: Shift) -> None:
        self._open.discard(shift)
        self._ended.set()

    async def leave(self, grace_s: float) -> Drained:
        """No group begins from now on; returns once all have ended. Raises DeadlineExceeded."""
        self._leaving = True
        return await self._end_all(grace_s)

    async def halt(self) -> Drained:
        """The same, at once, until `go_on`."""
        self._halted = True
        return await self._end_all(0.0)

    def go_on(self) -> None:
        """Groups begin again, unless it is time to leave."""
        self._halted = False

    async def _end_all(self, grace_s: float) -> Drained:
        held = list(self._open)
        for shift in held:
            shift.leave(grace_s)
        wait_s = grace_s + SETTLE_S
        try:
            async with asyncio.timeout(wait_s):
                while self._open:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            raise DeadlineExceeded("drain", f"{len(self._open)} groups to end", wait_s) from None
        handed_back = sum(shift.handed_back for shift in held)
        return Drained(len(held) - handed_back, handed_back)
