"""Where the groups of a live buffer are, as numbers. Takes nothing, gives what store.py counts; views show it."""

import msgspec

from contraflow.types import Version


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Where the groups are now. Held is waiting + running + ready + due + taken; posed = trained + dropped + held.

    `waiting` were posed, given up and have no ticket yet. `trained` includes what no checkpoint holds yet. `dropped`
    ended for good, by reason; `reposed` counts attempts given up, `refused` reports on attempts that were not running.
    `oldest_age` is that of the oldest group running or ready, were it trained by the next step.
    """

    line: int
    step: int  # the next to be taken
    served: Version
    posed: int
    waiting: int
    running: int
    ready: int
    taken: int
    trained: int
    dropped: dict[str, int]
    reposed: dict[str, int]
    refused: dict[str, int]
    tickets_free: int
    tickets_busy: int
    oldest_age: int
    solve_rates: dict[str, float] = {}  # by kind of task, where there is a curriculum
    due: int = 0  # to be trained again, by the steps that took them before a restart

    @property
    def held(self) -> int:
        return self.waiting + self.running + self.ready + self.due + self.taken
