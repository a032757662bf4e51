"""Back to a cut: whatever came after it is undone, and every group is what it was, with the same payload, any number of
times."""

import asyncio
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contraflow.buffer.accounts import accounts
from contraflow.buffer.audit import audit
from contraflow.buffer.ledger import HANDED_BACK, Event, Kind, reading
from contraflow.buffer.retention import Retention
from contraflow.buffer.riding import position
from contraflow.buffer.salvage import Kept
from contraflow.buffer.segments import Place
from contraflow.buffer.service import Buffer
from contraflow.config import Buffer as Section
from contraflow.types import Group, Ticket, Version

MakeGroup = Callable[..., Group]
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
SOON = 30  # groups whose order is compared


class Driver:
    """Loop, engine and trainer of one buffer, told by numbers what to do."""

    def __init__(self, folder: Path, section: Section, make_group: MakeGroup) -> None:
        self.folder, self.section, self.make_group = folder, section, make_group
        self.running: dict[int, Ticket] = {}
        self.left: dict[int, Group] = {}
        self.event, self.at = 0, 0
        self.open(None)
        self.cut_as: Any = self.state()

    def open(self, resume_step: int | None) -> None:
        self.buffer = Buffer(self.section, self.folder, resume_step, lambda: 0.0, threaded=False, back_to=self.event)
        self.store = self.buffer._store
        self.step, self.running, self.left = self.store.step, {}, {}
        self.served = self.step

    async def do(self, what: int, which: int) -> None:
        steps = [self.admit, self.admit, self.start, self.put, self.put, self.hand_back, self.lose, self.whole_step]
        await [*steps, self.cut][what](which)

    async def admit(self, _which: int) -> None:
        if self.store.tickets.free > 0:
            ticket = await self.buffer.admit(0.0)
            self.running[ticket.group] = ticket

    async def start(self, which: int) -> Ticket | None:
        live = [group for group in sorted(self.running) if group in self.store._running]
        if not live:
            return None
        ticket = self.running[live[which % len(live)]]
        left = await self.buffer.started(ticket.group, ticket.attempt, Version(ticket.line, self.served))
        if left is not None:
            self.left[ticket.group] = left
        return ticket

    def more(self, ticket: Ticket, **rest: Any) -> Group:
        left = self.left.pop(ticket.group, None)
        told = [] if left is None else [span.version.n for span in left.episodes[0].spans]
        group = self.make_group(ticket, [*told, self.served], **rest)
        return msgspec.structs.replace(group, task=msgspec.structs.replace(group.task, facts={"kind": "sum"}))

    async def put(self, which: int) -> None:
        if ticket := await self.start(which):
            del self.running[ticket.group]
            rewards = (0.0, 0.0) if ticket.group % 7 == 3 else (0.0, 1.0)
            await self.buffer.put(self.more(ticket, rewards=rewards))

    async def hand_back(self, which: int) -> None:
        if ticket := await self.start(which):
            del self.running[ticket.group]
            await self.buffer.hand_back(self.more(ticket, errors=("", "cut off")))

    async def lose(self, which: int) -> None:
        if ticket := await self.start(which):
            del self.running[ticket.group]
            await self.buffer.lost(ticket.group, ticket.attempt, "worker_died")

    async def whole_step(self, _which: int) -> None:
        if self.store.choose(self.step) is None:
            return
        await self.buffer.take(self.step, 0.0)
        self.step += 1
        line = await self.buffer.line()
        await self.buffer.trained(self.step - 1, Version(line, self.step))
        await self.buffer.served(Version(line, self.step))
        self.served = self.step

    async def cut(self, _which: int) -> None:
        await self.buffer.call_in()
        self.running, self.left = {}, {}
        self.buffer._ledger.commit()
        self.event, self.at, self.cut_as = position(self.folder)["event"], self.step, self.state()
        await self.buffer.cut(self.step)

    def crash(self) -> None:
        before = self.buffer
        self.open(self.at)
        before._segments.close()
        before._ledger._db.close()

    def state(self) -> Any:
        """All that decides what comes next, but for numbers of attempts and lines."""
        store = self.store
        soon = [group for group, _ in sorted(store._waiting)] + list(range(store._fresh, store._fresh + SOON))
        return {
            "step": store.step,
            "soon": soon[:SOON],
            "ready": {group: self.seen(entry) for group, entry in store._ready.items()},
            "left": {group: self.seen(entry) for group, entry in store._left.items()},
            "free": store.tickets.free,
            "trained": store.counts().trained,
            "dropped": store.counts().dropped,
        }

    def seen(self, entry: Any) -> Any:
        payload = self.buffer._read(entry.payload) if isinstance(entry.payload, Kept) else entry.payload
        episodes = [
            (e.tokens.tolist(), [(s.version.n, s.start, s.end) for s in e.spans], e.stop) for e in payload.episodes
        ]
        assert {s.version.line for e in payload.episodes for s in e.spans} == {self.store.line}
        return entry.oldest, entry.newest, episodes


@pytest.mark.parametrize("expiry", ["hold", "mask", "repose"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lives=st.lists(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 9)), max_size=40), min_size=1, max_size=4))
def test_every_group_is_what_it_was_at_the_cut(
    make_group: MakeGroup, expiry: str, lives: list[list[tuple[int, int]]]
) -> None:
    section = Section.model_validate({"groups_per_step": 2, "max_age": 2, "expiry": expiry})

    async def scenario(folder: Path) -> None:
        driver = Driver(folder, section, make_group)
        for _ in range(6):
            await driver.admit(0)
        for life in lives:
            for what, which in life:
                await driver.do(what, which)
            for _ in range(2):  # the second start finds what the first one wrote
                driver.crash()
                assert driver.state() == driver.cut_as
        driver.buffer._ledger.commit()
        written, counts = accounts(folder), await driver.buffer.counts()
        assert (written.waiting, written.ready, written.trained) == (counts.waiting, counts.ready, counts.trained)
        assert audit(folder) == []
        await driver.buffer.close()

    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        asyncio.run(scenario(Path(folder)))


def test_what_is_called_in_before_it_started_keeps_what_it_was_to_go_on_from(
    tmp_path: Path, make_group: MakeGroup
) -> None:
    async def scenario() -> None:
        driver = Driver(tmp_path, Section(groups_per_step=2, max_age=2), make_group)
        await driver.admit(0)
        await driver.hand_back(0)
        await driver.cut(0)
        for _ in range(2):  # posed again, and never begun
            await driver.admit(0)
            await driver.cut(0)
            assert driver.cut_as["left"].keys() == {0}
        driver.crash()
        assert driver.state() == driver.cut_as
        await driver.buffer.close()

    asyncio.run(scenario())


def test_what_was_measured_after_the_cut_is_forgotten(tmp_path: Path, make_group: MakeGroup) -> None:
    section = Section.model_validate({"groups_per_step": 2, "max_age": 2, "curriculum": {"by": "kind"}})

    async def scenario() -> list[tuple[str, float]]:
        driver = Driver(tmp_path, section, make_group)
        for put in (False, True, True):
            for _ in range(2):
                await driver.admit(0)
            await driver.put(0)
            if not put:
                await driver.cut(0)
        driver.crash()
        await driver.buffer.close()
        with reading(tmp_path) as db:
            return db.execute("SELECT kind, rate FROM rates ORDER BY id").fetchall()

    assert len(asyncio.run(scenario())) == 1


def test_files_of_what_a_cut_held_stay_until_the_next_one() -> None:
    place = [Place(f"line-0-00000{n}", 0, 1, b"") for n in range(3)]
    retention = Retention([], [], until_cut=True)
    retention.note(Event(Kind.WAITING, 3, 1, reason=HANDED_BACK, place=place[0]))
    retention.cut(1)
    retention.note(Event(Kind.STARTED, 3, 2))
    retention.note(Event(Kind.READY, 3, 2, place=place[1]))
    retention.note(Event(Kind.READY, 4, 1, place=place[2]))
    retention.note(Event(Kind.TRAINED, 4, 1, step=1))
    assert retention.spent("") == set()
    retention.cut(2)
    assert retention.spent("") == {place[0].segment, place[2].segment}
    retention.note(Event(Kind.STARTED, 3, 3))
    retention.note(Event(Kind.WAITING, 3, 3, reason=HANDED_BACK, again=2))
    retention.cut(3)
    assert place[1].segment not in retention.spent("")


def test_a_group_that_is_about_to_expire_is_still_ready_after_the_cut(tmp_path: Path, make_group: MakeGroup) -> None:
    """It expires when the next step is chosen, as it would have: not before, which would pose it ahead of others."""

    async def scenario() -> None:
        section = Section.model_validate({"groups_per_step": 1, "max_age": 1, "expiry": "repose"})
        driver = Driver(tmp_path, section, make_group)
        slow, quick = [await driver.buffer.admit(0.0) for _ in range(2)]
        for ticket in (slow, quick):
            await driver.buffer.started(ticket.group, ticket.attempt, Version(0, 0))
        await driver.buffer.put(make_group(quick))
        await driver.whole_step(0)
        await driver.admit(0)
        await driver.put(0)
        await driver.whole_step(0)
        await driver.buffer.put(make_group(slow))
        await driver.cut(0)
        driver.crash()
        assert driver.state() == driver.cut_as
        assert driver.cut_as["ready"].keys() == {slow.group}
        await driver.buffer.close()

    asyncio.run(scenario())
