"""A service answers every call once and knows what is running."""

import asyncio

from contraflow.runtime.faults import Fault
from contraflow.runtime.service import Service
from contraflow.runtime.wire import decode, encode


class Worker:
    async def wait(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return 1


def test_running_counts_methods_and_every_change_is_told() -> None:
    async def scene() -> None:
        told: list[str] = []
        service = Service("w", Worker(), told.append)
        calls = [asyncio.ensure_future(service.answer("wait", encode({"seconds": 0.01}))) for _ in range(2)]
        await asyncio.sleep(0)
        assert service.running == "wait x2"
        for ok, frames in await asyncio.gather(*calls):
            assert ok
            assert decode(frames, int) == 1
        assert told == ["wait", "wait x2", "wait", ""]

    asyncio.run(scene())


def test_a_cancelled_call_is_answered_with_a_fault() -> None:
    async def scene() -> None:
        service = Service("w", Worker())
        call = asyncio.ensure_future(service.answer("wait", encode({"seconds": 60.0})))
        await asyncio.sleep(0)
        call.cancel()
        ok, frames = await call
        assert not ok
        assert decode(frames, Fault).type == "CancelledError"
        assert service.running == ""

    asyncio.run(scene())


def test_closing_a_worker_without_close_does_nothing() -> None:
    asyncio.run(Service("w", Worker()).close())
