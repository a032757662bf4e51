"""Kinds that teach nothing are left out before they are sampled, and every group stays accounted for."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contraflow import config
from contraflow.algo.curriculum import draw
from contraflow.buffer.accounts import accounts
from contraflow.buffer.curriculum import Curriculum
from contraflow.buffer.ledger import Solved
from contraflow.buffer.service import Buffer, make_buffer
from contraflow.errors import ConfigError
from contraflow.runtime.inline import InlineRuntime
from contraflow.types import Group, Version

MakeGroup = Callable[..., Group]
SECTION = config.Curriculum(by="kind", keep=0.1, look=8, least=4)
TAIL = {"groups_per_step": 8, "max_age": 1, "curriculum": SECTION.model_dump()}


def of_kind(group: Group, kind: str) -> Group:
    return msgspec.structs.replace(group, task=msgspec.structs.replace(group.task, facts={"kind": kind}))


async def opened(runtime: InlineRuntime, folder: Path, resume_step: int | None):  # type: ignore[no-untyped-def]
    section = config.Buffer.model_validate(TAIL)
    return await runtime.start("buffer", make_buffer, buffer=section, folder=str(folder), resume_step=resume_step)


async def play(buffer, make_group: MakeGroup, kinds: list[str]) -> list[bool]:  # type: ignore[no-untyped-def]
    """One group of each kind: hard ones are never solved, easy ones always, fair ones by half. Was it sampled?"""
    rewards = {"hard": (0.0, 0.0), "easy": (1.0, 1.0), "fair": (0.0, 1.0)}
    sampled = []
    for kind in kinds:
        ticket = await buffer.call(5.0, Buffer.admit, 5.0)
        wanted = await buffer.call(5.0, Buffer.wanted, ticket.group, ticket.attempt, kind)
        sampled.append(wanted)
        if wanted:
            version = Version(ticket.line, 0)
            await buffer.call(5.0, Buffer.started, ticket.group, ticket.attempt, version)
            group = of_kind(make_group(ticket, rewards=rewards[kind]), kind)
            await buffer.call(5.0, Buffer.put, group)
    return sampled


def test_hopeless_and_solved_kinds_are_dropped_as_curriculum_and_their_tickets_come_home(
    make_group: MakeGroup, tmp_path: Path
) -> None:
    async def main() -> None:
        runtime = InlineRuntime()
        buffer = await opened(runtime, tmp_path, None)
        kinds = ["hard", "easy"] * 40 + ["fair"] * 6
        sampled = await play(buffer, make_group, kinds)
        expected = [True] * 8 + [draw(0, group) < 0.1 for group in range(8, 80)] + [True] * 6
        assert sampled == expected
        counts = await buffer.call(5.0, Buffer.counts)
        assert counts.solve_rates == {"easy": 1.0, "fair": 0.5, "hard": 0.0}
        assert counts.tickets_busy == counts.ready == 6
        await runtime.close()
        seen = accounts(tmp_path)
        assert seen.dropped == {"curriculum": sampled.count(False), "no_signal": sampled.count(True) - 6}
        assert seen.posed == 86 == seen.trained + sum(seen.dropped.values()) + seen.held

    asyncio.run(main())


def test_a_restart_decides_the_rest_as_a_run_that_was_never_ended(make_group: MakeGroup, tmp_path: Path) -> None:
    kinds = ["hard", "easy", "hard"] * 20

    async def main() -> None:
        runtime = InlineRuntime()
        whole = await play(await opened(runtime, tmp_path / "whole", None), make_group, kinds)
        await runtime.close()
        runtime = InlineRuntime()
        first = await play(await opened(runtime, tmp_path / "cut", None), make_group, kinds[:30])
        await runtime.close()
        runtime = InlineRuntime()
        second = await play(await opened(runtime, tmp_path / "cut", 0), make_group, kinds[30:])
        await runtime.close()
        assert first + second == whole
        assert False in second[:15]  # not measured anew

    asyncio.run(main())


def test_a_stale_attempt_is_refused_and_not_sampled(make_group: MakeGroup, tmp_path: Path) -> None:
    async def main() -> None:
        runtime = InlineRuntime()
        buffer = await opened(runtime, tmp_path, None)
        ticket = await buffer.call(5.0, Buffer.admit, 5.0)
        await buffer.call(5.0, Buffer.lost, ticket.group, 1, "worker_died")
        assert not await buffer.call(5.0, Buffer.wanted, ticket.group, 1, "fair")
        counts = await buffer.call(5.0, Buffer.counts)
        assert (counts.refused, counts.waiting, counts.dropped) == ({"late": 1}, 1, {})
        await runtime.close()

    asyncio.run(main())


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.25, 0.5, 1.0])), max_size=60), st.data())
def test_what_is_decided_is_a_function_of_the_rates_in_order_and_kinds_do_not_mix(
    told: list[tuple[str, float]], data: st.DataObject
) -> None:
    solved = [Solved(kind=kind, rate=rate) for kind, rate in told]
    one = Curriculum(SECTION, solved)
    others = data.draw(st.permutations("abc"))
    by_kind = [each for kind in others for each in solved if each.kind == kind]
    two = Curriculum(SECTION, by_kind)
    assert one.rates() == two.rates()
    assert [one.wants(g, k) for g in range(40) for k in "abcd"] == [two.wants(g, k) for g in range(40) for k in "abcd"]
    assert all(one.wants(group, "d") for group in range(40))


@pytest.mark.parametrize("wrong", [{"low": 0.9, "high": 0.1}, {"least": 65}, {"keep": 0.0}])
def test_a_curriculum_that_cannot_work_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        config.check_recipe({"buffer": {"curriculum": wrong}})


def test_a_kill_loses_no_group_and_the_unwritten_is_measured_again(make_group: MakeGroup, tmp_path: Path) -> None:
    async def main() -> None:
        killed = InlineRuntime()
        buffer = await opened(killed, tmp_path, None)
        await play(buffer, make_group, ["fair"] * 4 + ["hard"] * 30)  # never closed: the last batch stays unwritten
        runtime = InlineRuntime()
        again = await opened(runtime, tmp_path, 0)
        counts = await again.call(5.0, Buffer.counts)
        assert (counts.solve_rates, counts.ready, counts.dropped) == ({"fair": 0.5}, 4, {})
        await play(again, make_group, ["hard"] * 30)
        await runtime.close()
        seen = accounts(tmp_path)
        assert (seen.ready, seen.posed) == (4, 34) == (4, sum(seen.dropped.values()) + seen.held)
        assert seen.dropped["curriculum"] > 15

    asyncio.run(main())
