"""Which version is the newest and which each rollout worker serves, and waiting for that to change.

Takes manifests and proofs of service, gives answers and waits. Decides nothing: that is loop.py.
"""

import asyncio
from collections.abc import Callable

from contraflow.errors import DeadlineExceeded
from contraflow.types import Manifest, Version


class Versions:
    """Invariants: `newest` only grows; `served[name]` is a version that worker has proved. `changed` guards both."""

    def __init__(self, newest: Manifest, *, wait_s: float) -> None:
        """`wait_s`: the longest wait, unless one is given with it."""
        self.newest = newest
        self.served: dict[str, Version] = {}
        self.changed = asyncio.Condition()
        self._wait_s = wait_s

    def fresh(self, name: str) -> bool:
        """Whether that worker serves the newest version that anyone serves."""
        return name in self.served and self.served[name] == max(self.served.values())

    def behind(self, name: str) -> bool:
        """Whether there is a newer one than that worker serves."""
        return name not in self.served or self.served[name] < self.newest.version

    def newer(self, manifest: Manifest) -> bool:
        """Whether there is a newer one than this."""
        return self.newest.version > manifest.version

    async def note(
        self, *, newest: Manifest | None = None, served: tuple[str, Version] | None = None, gone: str = ""
    ) -> None:
        """Something changed: wake whoever waits. `gone`: a worker that serves nothing any more."""
        async with self.changed:
            self.served.pop(gone, None)
            if newest is not None:
                self.newest = newest
            if served is not None:
                self.served[served[0]] = served[1]
            self.changed.notify_all()

    async def until(self, ready: Callable[[], bool], owner: str, cause: str, wait_s: float | None = None) -> None:
        """Wait until `ready`, asked at each change. Raises DeadlineExceeded naming `owner` and `cause`."""
        wait_s = wait_s or self._wait_s
        try:
            async with asyncio.timeout(wait_s), self.changed:
                await self.changed.wait_for(ready)
        except TimeoutError:
            raise DeadlineExceeded(owner, cause, wait_s) from None
