"""How much one caller may have outstanding at one worker: the channel's back-pressure.

Takes a number of calls and of bytes; callers beyond either wait their turn, first come first served.
"""

import asyncio
from collections import deque


class Allowance:
    """Invariant: outstanding calls <= `calls`, and outstanding bytes <= `nbytes` or there is one call only.

    One loop only; a waiter that is cancelled gives its place away.
    """

    def __init__(self, *, calls: int, nbytes: int) -> None:
        self._calls, self._nbytes = calls, nbytes
        self._used_calls = self._used_bytes = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> None:
        """Wait until a call of `size` bytes may go out."""
        if not self._queue and self._fits(size):
            self._use(size)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._grant()  # whoever stood behind it may fit
            else:
                self.give(size)  # its turn came in the same moment
            raise

    def give(self, size: int) -> None:
        """A call of `size` bytes was answered."""
        self._used_calls -= 1
        self._used_bytes -= size
        self._grant()

    def _fits(self, size: int) -> bool:
        return self._used_calls < self._calls and (not self._used_calls or self._used_bytes + size <= self._nbytes)

    def _use(self, size: int) -> None:
        self._used_calls += 1
        self._used_bytes += size

    def _grant(self) -> None:
        while self._queue:
            size, turn = self._queue[0]
            if not turn.cancelled():
                if not self._fits(size):
                    return
                self._use(size)
                turn.set_result(None)
            self._queue.popleft()
