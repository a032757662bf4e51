"""Calls that belong together: results in order, the first failure decides, a death explains an error."""

import asyncio
import time

import pytest

from contraflow.errors import TrainingError, WorkerDied
from contraflow.runtime.gang import together


async def give(value: int, after_s: float = 0.0) -> int:
    await asyncio.sleep(after_s)
    return value


async def fail(error: Exception, after_s: float = 0.0) -> int:
    await asyncio.sleep(after_s)
    raise error


def test_results_come_in_order_of_rank() -> None:
    assert asyncio.run(together([give(1, 0.02), give(2), give(3, 0.01)], 1)) == [1, 2, 3]


def test_the_first_error_is_raised_and_the_rest_cancelled_after_the_grace() -> None:
    async def scene() -> None:
        slow = asyncio.Event()

        async def wait() -> int:
            try:
                await asyncio.sleep(60)
            finally:
                slow.set()
            return 0

        begin = time.monotonic()
        with pytest.raises(TrainingError, match="first"):
            await together([wait(), fail(TrainingError("second"), 0.05), fail(TrainingError("first"))], 0.1)
        assert 0.09 < time.monotonic() - begin < 2
        assert slow.is_set()

    asyncio.run(scene())


def test_a_death_within_the_grace_is_raised_instead_of_the_errors_it_caused() -> None:
    async def scene() -> None:
        with pytest.raises(WorkerDied, match="rank-1"):
            await together([fail(TrainingError("connection closed")), fail(WorkerDied("rank-1", "SIGKILL"), 0.05)], 1)

    asyncio.run(scene())


def test_cancelling_the_whole_cancels_every_part() -> None:
    async def scene() -> None:
        ended: list[int] = []

        async def wait(i: int) -> int:
            try:
                return await give(i, 60)
            finally:
                ended.append(i)

        whole = asyncio.ensure_future(together([wait(0), wait(1)], 1))
        await asyncio.sleep(0.01)
        whole.cancel()
        with pytest.raises(asyncio.CancelledError):
            await whole
        assert ended == [0, 1]

    asyncio.run(scene())
