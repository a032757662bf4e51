"""What is outstanding stays within calls and bytes, in order of arrival, and nothing leaks by cancellation."""

import asyncio
from collections.abc import Awaitable, Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from contraflow.runtime.allowance import Allowance


def run(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 10))  # type: ignore[arg-type]


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=40),
    victims=st.sets(st.integers(0, 39)),
    calls=st.integers(1, 5),
)
def test_limits_hold_in_order_whoever_is_cancelled(sizes: list[int], victims: set[int], calls: int) -> None:
    async def scene() -> None:
        allowance = Allowance(calls=calls, nbytes=20)
        inside: list[int] = []
        entered: list[int] = []

        async def caller(i: int) -> None:
            await allowance.take(sizes[i])
            entered.append(i)
            inside.append(sizes[i])
            assert len(inside) <= calls
            assert sum(inside) <= 20 or len(inside) == 1
            try:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            finally:
                inside.remove(sizes[i])
                allowance.give(sizes[i])

        tasks = [asyncio.ensure_future(caller(i)) for i in range(len(sizes))]
        await asyncio.sleep(0)
        for victim in victims & set(range(len(sizes))):
            tasks[victim].cancel()
            await asyncio.sleep(0)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [o for o in outcomes if isinstance(o, BaseException) and not isinstance(o, asyncio.CancelledError)]
        assert entered == sorted(entered)
        for _ in range(calls):  # all of it is free again
            await allowance.take(0)

    run(scene)


def test_a_call_larger_than_everything_goes_alone() -> None:
    async def scene() -> None:
        allowance = Allowance(calls=9, nbytes=10)
        await allowance.take(100)
        second = asyncio.ensure_future(allowance.take(1))
        await asyncio.sleep(0)
        assert not second.done()
        allowance.give(100)
        await second

    run(scene)


def test_a_turn_that_comes_as_its_caller_is_cancelled_is_given_on() -> None:
    async def scene() -> None:
        allowance = Allowance(calls=1, nbytes=10)
        await allowance.take(1)
        second, third = (asyncio.ensure_future(allowance.take(1)) for _ in range(2))
        await asyncio.sleep(0)
        allowance.give(1)  # the second's turn
        second.cancel()
        await asyncio.wait([second])
        assert second.cancelled()
        await third

    run(scene)
