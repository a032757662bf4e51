"""The worker: who waits wakes when it should, and says what for when it does not; what it answers is on disk."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contraflow.buffer.accounts import accounts
from contraflow.buffer.service import Buffer, make_buffer
from contraflow.config import Buffer as Section
from contraflow.errors import DeadlineExceeded, LedgerError, RunFolderError
from contraflow.types import Group, Ticket, Version

MakeGroup = Callable[..., Group]
SECTION = Section(groups_per_step=2, max_age=1)


class Host:
    """The place of a worker that needs nothing of it."""

    name = "buffer"
    clock = staticmethod(lambda: 0.0)

    def connect(self, address: object) -> Any:
        raise NotImplementedError


def new_buffer(folder: Path, resume_step: int | None = None, section: Section = SECTION) -> Buffer:
    return make_buffer(Host(), buffer=section, folder=str(folder), resume_step=resume_step)


async def admit(buffer: Buffer, count: int) -> list[Ticket]:
    return [await buffer.admit(0.0) for _ in range(count)]


async def one_step(buffer: Buffer, make_group: MakeGroup, step: int) -> list[int]:
    for ticket in await admit(buffer, 2):
        await buffer.put(make_group(ticket, [step]))
    take = await buffer.take(step, 1.0)
    line = await buffer.line()
    await buffer.trained(step, Version(line, step + 1))
    await buffer.served(Version(line, step + 1))
    return [chosen.group for chosen in take.groups]


async def again(buffer: Buffer, step: int) -> list[int]:
    """A step that a restart does again: nothing has to be sampled."""
    take = await buffer.take(step, 0.0)
    assert [group.ticket.group for group in await buffer.fetch(take.groups)] == [each.group for each in take.groups]
    line = await buffer.line()
    await buffer.trained(step, Version(line, step + 1))
    await buffer.served(Version(line, step + 1))
    return [chosen.group for chosen in take.groups]


def test_admit_waits_until_a_ticket_comes_home(tmp_path: Path, make_group: MakeGroup) -> None:
    async def scenario() -> None:
        buffer = new_buffer(tmp_path)
        tickets = await admit(buffer, 4)
        waiters = [asyncio.create_task(buffer.admit(5.0)) for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(waiter.done() for waiter in waiters)
        await buffer.put(make_group(tickets[0], rewards=(1.0, 1.0)))  # no signal
        await asyncio.sleep(0)
        await buffer.lost(tickets[1].group, 1, "deadline")
        assert sorted([(t.group, t.attempt) for t in await asyncio.gather(*waiters)]) == [(1, 2), (4, 1)]
        await buffer.close()

    asyncio.run(scenario())


def test_admit_wakes_when_the_version_that_used_the_tickets_is_served(tmp_path: Path, make_group: MakeGroup) -> None:
    async def scenario() -> None:
        buffer = new_buffer(tmp_path, section=Section(groups_per_step=1, max_age=0))
        await buffer.put(make_group((await admit(buffer, 1))[0]))
        await buffer.take(0, 0.0)
        await buffer.trained(0, Version(0, 1))
        waiting = asyncio.create_task(buffer.admit(5.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        await buffer.served(Version(0, 1))
        assert (await asyncio.wait_for(waiting, 1.0)).group == 1
        await buffer.close()

    asyncio.run(scenario())


def test_take_waits_until_the_groups_it_misses_are_ready(tmp_path: Path, make_group: MakeGroup) -> None:
    async def scenario() -> None:
        buffer = new_buffer(tmp_path)
        first, second = await admit(buffer, 2)
        taking = asyncio.create_task(buffer.take(0, 5.0))
        await asyncio.sleep(0)
        await buffer.started(first.group, 1, Version(0, 0))
        await buffer.put(make_group(first))
        await asyncio.sleep(0)
        assert not taking.done()
        await buffer.put(make_group(second))
        take = await taking
        assert [chosen.group for chosen in take.groups] == [0, 1]
        assert await buffer.take(0, 0.0) == take
        assert [group.ticket for group in await buffer.fetch(take.groups)] == [first, second]
        await buffer.close()

    asyncio.run(scenario())


def test_a_wait_that_runs_out_names_its_owner_and_what_was_missing(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = new_buffer(tmp_path)
        await admit(buffer, 4)
        with pytest.raises(DeadlineExceeded) as asked:
            await buffer.admit(0.01)
        assert (asked.value.owner, asked.value.seconds) == ("ask", 0.01)
        assert asked.value.cause.startswith("a free ticket: 4 in all, 4 with running groups")
        with pytest.raises(DeadlineExceeded) as taken:
            await buffer.take(0, 0.01)
        assert taken.value.owner == "learn"
        assert taken.value.cause.startswith("2 more groups for step 0 (running: 0, 1, 2, 3;")
        await buffer.close()

    asyncio.run(scenario())


def test_a_waiter_that_is_cancelled_takes_nothing_with_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = new_buffer(tmp_path)
        await admit(buffer, 4)
        waiting = asyncio.create_task(buffer.admit(5.0))
        await asyncio.sleep(0)
        waiting.cancel()
        await buffer.lost(0, 1, "deadline")
        await asyncio.gather(waiting, return_exceptions=True)
        assert (await buffer.counts()).tickets_free == 1
        await buffer.close()

    asyncio.run(scenario())


def test_a_take_is_on_disk_before_it_is_answered_and_so_are_trained_and_cut(
    tmp_path: Path, make_group: MakeGroup
) -> None:
    async def scenario() -> None:
        buffer = new_buffer(tmp_path)
        for ticket in await admit(buffer, 2):
            await buffer.put(make_group(ticket))
        await buffer.take(0, 0.0)
        assert accounts(tmp_path).taken == 2
        await buffer.trained(0, Version(0, 1))
        assert (accounts(tmp_path).trained, accounts(tmp_path).final) == (2, 0)
        await buffer.cut(1)
        assert accounts(tmp_path).final == 2
        await buffer.close()

    asyncio.run(scenario())


def test_a_resumed_run_trains_every_group_exactly_once(tmp_path: Path, make_group: MakeGroup) -> None:
    async def scenario() -> None:
        buffer = new_buffer(tmp_path)
        trained = [await one_step(buffer, make_group, step) for step in (0, 1)]
        await buffer.cut(2)
        await one_step(buffer, make_group, 2)
        await admit(buffer, 3)
        await buffer.close()
        buffer = new_buffer(tmp_path, resume_step=2)
        counts = await buffer.counts()
        assert (await buffer.line(), counts.waiting, counts.due, await buffer.steps_due()) == (1, 3, 2, 1)
        trained += [await again(buffer, 2)]
        trained += [await one_step(buffer, make_group, step) for step in (3, 4)]
        await buffer.close()
        assert [group for step in trained for group in step] == list(range(10))
        seen = accounts(tmp_path)
        assert (seen.posed, seen.trained, seen.held, seen.superseded) == (10, 10, 0, 2)

    asyncio.run(scenario())


def test_a_folder_with_a_run_is_not_begun_anew(tmp_path: Path) -> None:
    asyncio.run(new_buffer(tmp_path).close())
    with pytest.raises(RunFolderError):
        new_buffer(tmp_path)


def test_a_take_that_could_not_be_written_is_not_answered_and_can_be_asked_again(
    tmp_path: Path, make_group: MakeGroup
) -> None:
    async def scenario() -> None:
        section = Section(groups_per_step=100, max_age=0)
        buffer = new_buffer(tmp_path, section=section)
        db = buffer._ledger._db
        (pages,) = db.execute("PRAGMA page_count").fetchone()
        for ticket in await admit(buffer, 100):
            await buffer.put(make_group(ticket))
        db.execute(f"PRAGMA max_page_count = {pages}")  # SQLite then fails exactly as on a full disk
        with pytest.raises(LedgerError, match="full"):
            await buffer.take(0, 1.0)
        db.execute("PRAGMA max_page_count = 100000")
        assert len((await buffer.take(0, 1.0)).groups) == 100
        assert accounts(tmp_path).taken == 100
        await buffer.close()

    asyncio.run(scenario())
