"""How long a worker plays each group: until its deadline, or until the worker has to leave.

Takes begins and ends of groups and the order to leave; ends what is late by cancelling it. Does not know what becomes
of a group that was not finished: that is worker.py.
"""

import asyncio
from dataclasses import dataclass, field

from contraflow.errors import DeadlineExceeded
from contraflow.rollout.report import Drained
from contraflow.types import Episode, Task

SETTLE_S = 60.0  # beyond the grace: for calls to the buffer, which bound themselves


@dataclass(eq=False)
class Shift:
    """One group. `limit` is entered by whoever plays it; once it is `settled`, nothing may end it any more."""

    leaving: bool
    limit: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    began: bool = False
    drained: bool = False  # it is the order to leave that ends it, not its deadline
    settled: bool = False
    handed_back: bool = False
    task: Task | None = None
    places: list[tuple[int, asyncio.Task[Episode]]] = field(default_factory=list)  # seed, and the episode played

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
        return playing.result() if playing.done() and not playing.cancelled() and not playing.exception() else None


class Shifts:
    """All groups of a worker. Invariant: a shift is in here from `begin` to `end`."""

    def __init__(self) -> None:
        self._leaving = False
        self._open: set[Shift] = set()
        self._ended = asyncio.Event()

    def begin(self) -> Shift:
        """A group came; it may have to wait for its turn."""
        shift = Shift(self._leaving)
        self._open.add(shift)
        return shift

    def end(self, shift: Shift) -> None:
        self._open.discard(shift)
        self._ended.set()

    async def leave(self, grace_s: float) -> Drained:
        """No group begins from now on; returns once all have ended. Raises DeadlineExceeded."""
        self._leaving = True
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
