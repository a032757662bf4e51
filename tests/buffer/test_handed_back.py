"""What is there of a group that nobody finished lies in the buffer until it is gone on with, over restarts and cuts."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from contraflow.buffer.ledger import HANDED_BACK, Event, Kind
from contraflow.buffer.retention import Retention
from contraflow.buffer.segments import FOLDER, Place
from contraflow.buffer.service import Buffer
from contraflow.config import Buffer as Section
from contraflow.errors import LedgerError
from contraflow.types import Group, Ticket, Version
from tests.buffer.test_service import admit, new_buffer

MakeGroup = Callable[..., Group]
CUT_OFF = ("", "cut off")


async def handed_back(buffer: Buffer, make_group: MakeGroup, versions: tuple[int, ...] = (0,)) -> Group:
    """Group 0 (of the tickets there are) after a first attempt, and the buffer told so."""
    (ticket,) = await admit(buffer, 1)
    await buffer.started(ticket.group, ticket.attempt, Version(ticket.line, versions[0]))
    part = make_group(ticket, versions, errors=CUT_OFF)
    await buffer.hand_back(part)
    return part


def tokens(group: Group) -> list[list[int]]:
    return [episode.tokens.tolist() for episode in group.episodes]


def test_the_next_attempt_gets_it_once_and_counts_with_its_oldest_token(tmp_path: Path, make_group: MakeGroup) -> None:
    async def scenario() -> None:
        buffer = new_buffer(tmp_path, section=Section(groups_per_step=2, max_age=2))
        part = await handed_back(buffer, make_group)
        assert (await buffer.counts()).reposed == {"handed_back": 1}
        (ticket,) = await admit(buffer, 1)
        assert ticket == Ticket(group=0, attempt=2, line=0)
        left = await buffer.started(0, 2, Version(0, 0))
        assert left is part
        await buffer.lost(0, 2, "worker_died")  # what was gone on from is not gone on from twice
        await admit(buffer, 1)
        assert await buffer.started(0, 3, Version(0, 0)) is None
        await buffer.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("stop", [True, False])
def test_it_outlives_the_buffer_and_is_renamed_to_the_next_line(
    tmp_path: Path, make_group: MakeGroup, stop: bool
) -> None:
    async def scenario() -> None:
        before = new_buffer(tmp_path)
        part = await handed_back(before, make_group)
        if stop:
            await before.close()
        for line in (1, 2):  # a restart that comes to nothing takes nothing away
            buffer = new_buffer(tmp_path, resume_step=0)
            if line == 1:
                await buffer.close()
        (ticket,) = await admit(buffer, 1)
        assert ticket == Ticket(group=0, attempt=2, line=2)
        left = await buffer.started(0, 2, Version(2, 0))
        assert left is not None
        assert tokens(left) == tokens(part)
        assert {span.version for episode in left.episodes for span in episode.spans} == {Version(2, 0)}
        assert [episode.error for episode in left.episodes] == ["", "cut off"]
        await buffer.put(make_group(ticket, [0, 0]))
        assert (await buffer.counts()).ready == 1
        await buffer.close()

    asyncio.run(scenario())


def test_its_file_stays_over_cuts_until_the_next_attempt_has_started(tmp_path: Path, make_group: MakeGroup) -> None:
    async def scenario() -> None:
        buffer = new_buffer(tmp_path, section=Section(groups_per_step=2, max_age=3))
        tickets = await admit(buffer, 7)
        await buffer.hand_back(make_group(tickets[0], errors=CUT_OFF))
        await buffer.close()
        buffer = new_buffer(tmp_path, resume_step=0, section=Section(groups_per_step=2, max_age=3))
        (old,) = (path.name for path in (tmp_path / FOLDER).iterdir())
        first, *rest = await admit(buffer, 3)
        assert first.group == 0
        for ticket in rest:
            await buffer.put(make_group(ticket))
        await buffer.take(0, 1.0)
        await buffer.trained(0, Version(1, 1))
        await buffer.cut(1)
        assert (tmp_path / FOLDER / old).exists()
        assert await buffer.started(0, 2, Version(1, 0)) is not None
        await buffer.cut(1)
        assert not (tmp_path / FOLDER / old).exists()
        await buffer.close()

    asyncio.run(scenario())


def test_a_damaged_one_is_begun_anew_and_counted(tmp_path: Path, make_group: MakeGroup) -> None:
    async def scenario() -> None:
        buffer = new_buffer(tmp_path)
        await handed_back(buffer, make_group)
        await buffer.close()
        (path,) = (tmp_path / FOLDER).iterdir()
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        for _ in range(2):
            buffer = new_buffer(tmp_path, resume_step=0)
            assert (await buffer.counts()).reposed == {"handed_back": 1, "damaged": 1}
            await buffer.close()
        buffer = new_buffer(tmp_path, resume_step=0)
        await admit(buffer, 1)
        assert await buffer.started(0, 2, Version(3, 0)) is None
        await buffer.close()

    asyncio.run(scenario())


def test_what_could_not_be_trained_in_time_any_more_is_begun_anew(tmp_path: Path, make_group: MakeGroup) -> None:
    async def scenario() -> None:
        buffer = new_buffer(tmp_path, section=Section(groups_per_step=1, max_age=0))
        (ticket,) = await admit(buffer, 1)
        await buffer.hand_back(make_group(ticket, errors=CUT_OFF))
        buffer._store.step = 1  # as if a step had been taken meanwhile
        await admit(buffer, 1)
        assert await buffer.started(0, 2, Version(0, 0)) is None
        await buffer.close()

    asyncio.run(scenario())


def test_late_ones_are_refused_and_versions_that_cannot_be_yet_are_an_error(
    tmp_path: Path, make_group: MakeGroup
) -> None:
    async def scenario() -> None:
        buffer = new_buffer(tmp_path)
        (ticket,) = await admit(buffer, 1)
        with pytest.raises(LedgerError, match=r"holds tokens of 0\.1; 0\.0 is the newest"):
            await buffer.hand_back(make_group(ticket, [1], errors=CUT_OFF))
        await buffer.lost(0, 1, "drained")
        await buffer.hand_back(make_group(ticket, errors=CUT_OFF))
        await buffer.hand_back(make_group(Ticket(group=0, attempt=1, line=5), errors=CUT_OFF))
        counts = await buffer.counts()
        assert (counts.refused, counts.waiting, counts.running) == ({"late": 1, "dead_line": 1}, 1, 0)
        assert not list((tmp_path / FOLDER).glob("*"))
        await buffer.close()

    asyncio.run(scenario())


def test_retention_holds_it_from_its_hand_back_to_the_start_of_the_next_attempt() -> None:
    retention = Retention([], [])
    place = Place("line-0-000000", 0, 1, b"")
    retention.note(Event(Kind.WAITING, 3, 1, reason=HANDED_BACK, place=place))
    retention.note(Event(Kind.POSED, 3, 2))
    assert retention.spent("") == set()
    retention.note(Event(Kind.STARTED, 3, 2))
    assert retention.spent("") == {"line-0-000000"}
