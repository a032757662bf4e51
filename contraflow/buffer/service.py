"""The buffer as a worker: hands out tickets, takes groups in, lets the trainer have them, and keeps the record.

Takes calls from the loop, rollout workers and trainer ranks; gives what store.py decides, waiting where it has to.
Every wait wakes on a change and ends in DeadlineExceeded naming what was missing. What a take, `trained` and `cut`
answer is on disk before they answer; what else happened is at most one batch behind (see ledger.py).
"""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from contraflow import config
from contraflow.buffer.accounts import accounts
from contraflow.buffer.ledger import Event, open_ledger
from contraflow.buffer.riding import position, ride
from contraflow.buffer.store import Counts, Store
from contraflow.cuts import CutId, Part, open_cuts
from contraflow.errors import DeadlineExceeded
from contraflow.runtime.base import Host
from contraflow.telemetry import Clock
from contraflow.types import Chosen, Group, Take, Ticket, Version

T = TypeVar("T")


class Buffer:
    """One per run. All methods run on one event loop; every state change happens between awaits, so none is torn.

    Raises, beside what the methods say: LedgerError when the record cannot be written (full disk) or a call
    contradicts it (a step out of order, a version that cannot exist).
    """

    def __init__(self, section: config.Buffer, folder: Path, resume_step: int | None, clock: Clock) -> None:
        self._ledger, opening = open_ledger(folder, resume_step=resume_step)
        self._store = Store(section, opening, accounts(folder), self._record)
        self._changed = asyncio.Event()
        self._folder, self._clock = folder, clock
        self._leaving = threading.Event()

    async def line(self) -> int:
        """The line this buffer writes: the fencing number of everything the run publishes."""
        return self._store.line

    async def admit(self, wait_s: float) -> Ticket:
        """A ticket, waiting for a free one: the back-pressure. Groups posed again come first, then fresh ones."""
        self._ledger.make_room()
        return await self._until(self._store.pose, wait_s, owner="ask", cause=self._store.why_no_ticket)

    async def started(self, group: int, attempt: int, version: Version) -> None:
        """The first token is about to be sampled by `version`. Raises EngineError for an engine that lags."""
        self._ledger.make_room()
        self._store.start(group, attempt, version)

    async def put(self, group: Group) -> None:
        """A group is complete. One that is late is refused and counted, without an error."""
        self._ledger.make_room()
        self._store.put(group)

    async def lost(self, group: int, attempt: int, reason: str) -> None:
        """An attempt will not arrive (its worker died, its deadline passed): its group is posed again."""
        self._ledger.make_room()
        self._store.lose(group, attempt, reason)

    async def drop(self, group: int, attempt: int, reason: str) -> None:
        """An attempt will not arrive and shall not be made again: its group ends here."""
        self._ledger.make_room()
        self._store.drop(group, attempt, reason)

    async def take(self, step: int, wait_s: float) -> Take:
        """The P groups of `step`, waiting until the window lets them go; the same ones again until they are trained."""
        take = await self._until(lambda: self._store.choose(step), wait_s, owner="learn", cause=self._store.why_no_take)
        self._ledger.commit()
        return take

    async def fetch(self, chosen: tuple[Chosen, ...]) -> list[Group]:
        """Payloads of taken groups, in that order, any number of times until they are trained."""
        return self._store.fetch(chosen)

    async def trained(self, step: int, version: Version) -> None:
        """`step` is trained and published `version`; provisional until a cut. Its payloads are let go."""
        self._store.finish(step, version)
        self._ledger.commit()

    async def served(self, version: Version) -> None:
        """A live engine serves `version`: tickets of the steps that led to it come home."""
        self._store.serve(version)
        self._wake()

    async def cut(self, step: int) -> None:
        """A checkpoint that contains the steps below `step` is committed: their groups are trained for good."""
        self._store.check_cut(step)
        self._ledger.cut(step)

    async def ride(self, url: str, cut: CutId, deadline_s: float, threaded: bool) -> tuple[list[Part], dict[str, int]]:
        """Add the record, up to now, to a cut being written at `url`; its parts, and where it stands.

        `threaded`: groups go on meanwhile; without, a run repeats from its seed.
        Raises BlobError when the store does not take a part within `deadline_s`.
        """
        self._ledger.commit()
        stands = position(self._folder)
        space = open_cuts(url, clock=self._clock, pause=self._leaving.wait, deadline_s=deadline_s)
        if not threaded:
            return ride(self._folder, space, cut), stands
        return await asyncio.to_thread(ride, self._folder, space, cut), stands

    async def counts(self) -> Counts:
        """Where the groups are now."""
        return self._store.counts()

    async def close(self) -> None:
        """Write what is left and let the ledger go."""
        self._leaving.set()
        self._ledger.close()

    def _record(self, event: Event) -> None:
        self._ledger.append(event)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(
        self, attempt: Callable[[], T | None], wait_s: float, *, owner: str, cause: Callable[[], str]
    ) -> T:
        try:
            async with asyncio.timeout(wait_s):
                while (result := attempt()) is None:
                    await self._changed.wait()
        except TimeoutError:
            raise DeadlineExceeded(owner, cause(), wait_s) from None
        return result


def make_buffer(host: Host, *, buffer: config.Buffer, folder: str, resume_step: int | None) -> Buffer:
    """The buffer of a run whose ledger lives in `folder`; see `open_ledger` for what a resume does.

    Raises RunFolderError, LedgerError.
    """
    return Buffer(buffer, Path(folder), resume_step, host.clock)
