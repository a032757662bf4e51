"""Calls to a store that fails now and then: tried again, with pauses that double, until a deadline.

Takes a call; gives what it gives, or its last failure. Does not know what is called.
"""

from collections.abc import Callable
from typing import TypeVar

from contraflow.errors import BlobError, BlobExists, BlobMissing

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # between attempts, doubling
T = TypeVar("T")


class Patience:
    """Tries a store's calls again, with pauses that double, until `deadline_s` after the first attempt.

    `pause(seconds)` waits; when it gives true, it is time to leave, and no further attempt is made.
    """

    def __init__(self, deadline_s: float, clock: Callable[[], float], pause: Callable[[float], bool]) -> None:
        self._deadline_s = deadline_s
        self._clock = clock
        self._pause = pause

    def keep_on(self, work: Callable[[], T]) -> T:
        """What `work` gives. Raises BlobMissing and BlobExists at once, other BlobErrors when the time is over."""
        began, pause_s, tries = self._clock(), FIRST_PAUSE_S, 0
        while True:
            tries += 1
            try:
                return work()
            except (BlobMissing, BlobExists):
                raise
            except BlobError as fault:
                spent = self._clock() - began
                if spent + pause_s > self._deadline_s or self._pause(pause_s):
                    raise BlobError(f"{fault} (given up after {tries} tries in {spent:.1f} s)") from fault
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
