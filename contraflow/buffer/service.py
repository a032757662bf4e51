"""The buffer as a worker: hands out tickets, takes groups in, lets the trainer have them, and keeps the record.

Takes calls from the loop, rollout workers and trainer ranks; gives what store.py decides, waiting where it has to.
Every wait wakes on a change and ends in DeadlineExceeded naming what was missing. What `put` of a group that is ready,
`take`, `trained` and `cut` answer is on disk before they answer; what else happened is at most one batch behind.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from contraflow import config
from contraflow.buffer.accounts import accounts
from contraflow.buffer.counts import Counts
from contraflow.buffer.ledger import Event
from contraflow.buffer.opening import open_ledger
from contraflow.buffer.retention import Retention
from contraflow.buffer.riding import position, ride
from contraflow.buffer.salvage import Keep, Kept, same_age
from contraflow.buffer.segments import Place, Segments, damage, read_group, remove, sweep
from contraflow.buffer.store import Store
from contraflow.buffer.window import Window
from contraflow.cuts import CutId, Part, open_cuts
from contraflow.errors import ContraflowError, DeadlineExceeded
from contraflow.runtime.base import Host
from contraflow.telemetry import Clock
from contraflow.types import Chosen, Episode, Group, Span, Take, Ticket, Version

SEGMENT_BYTES = 64 << 20  # a file of payloads is full beyond it; files go as a whole

T = TypeVar("T")


class Buffer:
    """One per run. All methods run on one event loop; every state change happens between awaits, so none is torn.

    Groups that arrive while others are being synced share the next sync and commit: none waits for more than two. With
    `threaded` the sync is in a thread of its own, and calls are answered meanwhile; without, it holds the loop.

    Raises, beside what the methods say: LedgerError when the record cannot be written (full disk) or a call
    contradicts it (a step out of order, a version that cannot exist).
    """

    def __init__(
        self,
        section: config.Buffer,
        folder: Path,
        resume_step: int | None,
        clock: Clock,
        *,
        threaded: bool,
        least_line: int = 0,
        run_id: int = 0,
        back_to: int | None = None,
    ) -> None:
        """`back_to`: the event that a resume undoes all after; None: it undoes nothing that it can do again."""
        keep = Keep(
            window=Window.of(section),
            dead_line=section.dead_line,
            damage=lambda place: damage(folder, place),
            until=back_to,
        )
        self._ledger, opening = open_ledger(
            folder, resume_step=resume_step, keep=keep, least_line=least_line, run_id=run_id
        )
        sweep(folder, opening.segments)
        kept = [*opening.ready, *opening.left, *(each for take in opening.due for each in take)]
        self._retention = Retention(opening.segments, kept, until_cut=back_to is not None)
        self._keeps_all = section.keep_payloads == "all"
        self._segments = Segments(folder, line=opening.line, segment_bytes=SEGMENT_BYTES, threaded=threaded)
        self._store = Store(section, opening, accounts(folder), self._record)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="segments") if threaded else None
        self._arrived: list[tuple[Group, Callable[[Group, Place], None], asyncio.Future[None]]] = []
        self._keeping: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._folder, self._clock = folder, clock
        self._leaving = threading.Event()

    async def line(self) -> int:
        """The line this buffer writes: the fencing number of everything the run publishes."""
        return self._store.line

    async def steps_due(self) -> int:
        """Steps that a restart does again, as they were recorded; until they are nearly done no ticket comes home."""
        return self._store.steps_due

    async def admit(self, wait_s: float) -> Ticket:
        """A ticket, waiting for a free one: the back-pressure. Groups posed again come first, then fresh ones."""
        self._ledger.make_room()
        return await self._until(self._store.pose, wait_s, owner="ask", cause=self._store.why_no_ticket)

    async def wanted(self, group: int, attempt: int, kind: str) -> bool:
        """Whether the curriculum wants a task of this kind sampled; a group that it does not want ends here."""
        self._ledger.make_room()
        return self._store.wanted(group, attempt, kind)

    async def started(self, group: int, attempt: int, version: Version) -> Group | None:
        """The first token is about to be sampled by `version`; gives what an earlier attempt has left to go on from.

        Raises EngineError for an engine that lags, PayloadError when what is left has been damaged.
        """
        self._ledger.make_room()
        left = self._store.start(group, attempt, version)
        return self._read(left) if isinstance(left, Kept) else left

    async def put(self, group: Group) -> None:
        """A group is complete; if it becomes ready, it and its payload survive what comes once this returns.

        One that is late is refused and counted, without an error.
        """
        self._ledger.make_room()
        if self._store.wants(group):
            await self._kept(group, self._store.put)
        else:
            self._store.put(group)

    async def hand_back(self, group: Group) -> None:
        """An attempt ends unfinished: its group is posed again, to go on from these episodes as far as they came.

        They survive what comes once this returns. One that is late is refused and counted, without an error.
        """
        self._ledger.make_room()
        if self._store.takes_back(group):
            await self._kept(group, self._store.hand_back)
        else:
            self._store.hand_back(group)

    async def lost(self, group: int, attempt: int, reason: str) -> None:
        """An attempt will not arrive (its worker died, its deadline passed): its group is posed again."""
        self._ledger.make_room()
        self._store.lose(group, attempt, reason)

    async def call_in(self) -> None:
        """No attempt that runs will arrive: all of them are posed again, with what was handed back of them before."""
        self._ledger.make_room()
        self._store.call_in()

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
        """Payloads of taken groups, in that order, any number of times until they are trained.

        Raises PayloadError when one that a restart found whole has been damaged since.
        """
        held = self._store.fetch(chosen)
        return [each if isinstance(each, Group) else self._read(each) for each in held]

    async def trained(self, step: int, version: Version) -> None:
        """`step` is trained and published `version`; provisional until a cut, and until then its payloads are kept."""
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
        self._retention.cut(step)
        if not self._keeps_all:
            self._let_go()

    async def ride(self, url: str, cut: CutId, deadline_s: float, threaded: bool) -> tuple[list[Part], dict[str, int]]:
        """Add the record, up to now, to a cut being written at `url`; its parts, and where it stands.

        `threaded`: groups go on meanwhile; without, a run repeats from its seed.
        Raises CheckpointError when the store does not take a part within `deadline_s`.
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
        if self._keeping is not None:
            await self._keeping
        if self._thread is not None:
            self._thread.shutdown()
        self._segments.close()
        self._ledger.close()

    async def _kept(self, group: Group, settle: Callable[[Group, Place], None]) -> None:
        """Have the payload written, and `settle` told where it lies."""
        kept = asyncio.get_running_loop().create_future()
        self._arrived.append((group, settle, kept))
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep_arrived())
        await kept

    async def _keep_arrived(self) -> None:
        try:
            await self._keep_all()
        finally:
            self._keeping = None

    async def _keep_all(self) -> None:
        while self._arrived:
            batch, self._arrived = self._arrived, []
            groups = [group for group, _, _ in batch]
            try:
                places = await self._beside(lambda: self._segments.write(groups))  # noqa: B023
                for (group, settle, _), place in zip(batch, places, strict=True):
                    settle(group, place)
                self._ledger.commit()
            except BaseException as fault:
                _answer([kept for *_, kept in batch], fault)
                if not isinstance(fault, ContraflowError):
                    raise
            else:
                _answer([kept for *_, kept in batch], None)

    async def _beside(self, work: Callable[[], T]) -> T:
        if self._thread is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _read(self, kept: Kept) -> Group:
        ticket = Ticket(group=kept.group, attempt=kept.attempt, line=self._store.line)
        return on_line(read_group(self._folder, kept.place), ticket, kept.shared)

    def _let_go(self) -> None:
        """Rows first: a file without rows is swept by the next opening, rows without a file would be a loss."""
        spent = self._retention.spent(self._segments.name)
        if spent:
            self._ledger.forget(spent)
            remove(self._folder, spent)
            self._retention.gone(spent)

    def _record(self, event: Event) -> None:
        self._ledger.append(event)
        self._retention.note(event)
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


def on_line(group: Group, ticket: Ticket, shared: int) -> Group:
    """A group of an earlier line as that of `ticket` sees it: versions renamed, and as old as `same_age` says."""

    def moved(span: Span) -> Span:
        return Span(Version(ticket.line, same_age(span.version.n, shared)), span.start, span.end)

    def told(episode: Episode) -> Episode:
        return msgspec.structs.replace(episode, spans=tuple(moved(span) for span in episode.spans))

    return msgspec.structs.replace(group, ticket=ticket, episodes=tuple(told(each) for each in group.episodes))


def make_buffer(
    host: Host,
    *,
    buffer: config.Buffer,
    folder: str,
    resume_step: int | None,
    threaded: bool = False,
    least_line: int = 0,
    run_id: int = 0,
    back_to: int | None = None,
) -> Buffer:
    """The buffer of a run whose ledger lives in `folder`; see `open_ledger` for what a resume does, and `Buffer`.

    Raises RunFolderError, LedgerError.
    """
    line = {"least_line": least_line, "run_id": run_id}
    return Buffer(buffer, Path(folder), resume_step, host.clock, threaded=threaded, back_to=back_to, **line)


def _answer(waiting: list[asyncio.Future[None]], fault: BaseException | None) -> None:
    for kept in waiting:
        if kept.done():  # its caller is gone
            continue
        if fault is None:
            kept.set_result(None)
        else:
            kept.set_exception(fault)
