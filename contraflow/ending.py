"""How coroutines end: cancelled, overtaken by a stop, or by a failure of which the first is told."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def end(tasks: Iterable[asyncio.Task[None]], wait_s: float) -> None:
    """Cancel tasks, and give them `wait_s` to end."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    if ending:
        await asyncio.wait(ending, timeout=wait_s)


async def unless_set(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` gives; None, and the work cancelled, once `stop` is set."""
    working, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return None if stop.is_set() else working.result()
    finally:
        working.cancel()
        stopped.cancel()


def first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that started the others: task groups nest, and cancel siblings in the order they were struck."""
    failure = failures.exceptions[0]
    return first(failure) if isinstance(failure, BaseExceptionGroup) else failure
