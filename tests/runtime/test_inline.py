"""What only the inline runtime promises: the same order every time, and faults on demand."""

import asyncio
from typing import Any

import pytest

from contraflow.errors import DeadlineExceeded, WorkerDied
from contraflow.runtime.base import Address, Host
from contraflow.runtime.drill import Drill, make_drill
from contraflow.runtime.inline import InlineRuntime


class Ticker:
    """Calls another worker from a task of its own."""

    def __init__(self, host: Host, log: list[str], peer: Address | None) -> None:
        self.name, self.log, self.host, self.peer = host.name, log, host, peer
        self.task = asyncio.ensure_future(self.run()) if peer else None

    async def run(self) -> None:
        assert self.peer
        while True:
            await self.host.connect(self.peer).call(5, Ticker.tick, self.name)

    async def tick(self, who: str) -> int:
        self.log.append(who)
        await asyncio.sleep(0)
        return len(self.log)


def test_the_same_scene_runs_in_the_same_order() -> None:
    async def scene() -> list[str]:
        log: list[str] = []
        runtime = InlineRuntime()

        def make(host: Host, peer: Address | None = None) -> Ticker:
            return Ticker(host, log, peer)

        centre = await runtime.start("centre", make)
        for name in "abc":
            await runtime.start(name, make, peer=centre.address)
        for i in range(50):
            await centre.call(5, Ticker.tick, str(i))
        await runtime.close()
        return log

    first = asyncio.run(scene())
    assert first == asyncio.run(scene())
    assert set(first) >= {"a", "b", "c", "49"}


def test_a_dead_worker_s_leftover_tasks_reach_nobody() -> None:
    async def scene() -> None:
        log: list[str] = []
        runtime = InlineRuntime()
        tickers: list[Ticker] = []

        def make(host: Host, peer: Address | None = None) -> Ticker:
            tickers.append(Ticker(host, log, peer))
            return tickers[-1]

        centre = await runtime.start("centre", make)
        await runtime.start("a", make, peer=centre.address)
        await asyncio.sleep(0.01)
        assert log
        runtime.kill("a")
        before = len(log)
        task = tickers[1].task
        assert task
        with pytest.raises(WorkerDied, match="'a' died: killed"):
            await asyncio.wait_for(task, 5)
        assert len(log) == before

    asyncio.run(scene())


def test_arguments_of_a_factory_are_copied_as_for_another_process() -> None:
    async def scene() -> None:
        runtime = InlineRuntime()
        options = {"digits": [1, 2]}
        seen: list[Any] = []

        def make(host: Host, options: Any) -> object:
            options["digits"].append(3)
            seen.append(options)
            return object()

        await runtime.start("w", make, options=options)
        assert options == {"digits": [1, 2]}
        assert seen == [{"digits": [1, 2, 3]}]

    asyncio.run(scene())


def test_workers_see_the_clock_that_was_given() -> None:
    async def scene() -> None:
        ref = await InlineRuntime(lambda: 42.0).start("drill", make_drill)
        assert await ref.call(5, Drill.clock) == 42.0

    asyncio.run(scene())


def test_a_close_that_takes_too_long_is_given_up_and_said() -> None:
    async def scene() -> None:
        runtime = InlineRuntime(stop_s=0.05)
        ref = await runtime.start("drill", make_drill, closing_s=30)
        with pytest.raises(DeadlineExceeded) as caught:
            await runtime.stop("drill")
        assert caught.value.cause == "drill.close"
        with pytest.raises(WorkerDied):
            await ref.call(5, Drill.add, 1)

    asyncio.run(scene())
