"""A gang's collective call, the same on every runtime: every rank at once, results by rank, one failure fails it."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from contraflow.errors import WorkerDied
from contraflow.runtime.base import Ref

W_co = TypeVar("W_co", covariant=True)
P = ParamSpec("P")
T = TypeVar("T")

GRACE_S = 1.0  # after a first failure: for the other ranks to end, and for a death behind it to become known


class RefGang(Generic[W_co]):
    """References to all ranks, in order of rank."""

    def __init__(self, refs: Sequence[Ref[W_co]]) -> None:
        self._refs = tuple(refs)

    @property
    def refs(self) -> Sequence[Ref[W_co]]:
        return self._refs

    async def call(
        self,
        deadline_s: float,
        method: Callable[Concatenate[W_co, P], Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        return await together([ref.call(deadline_s, method, *args, **kwargs) for ref in self._refs], GRACE_S)


async def together(calls: Sequence[Coroutine[Any, Any, T]], grace_s: float) -> list[T]:
    """Results of all, in order. After a first failure the others get `grace_s`, then they are cancelled.

    Raises the failure that came first; but a death among the others comes before an error, since it is its cause.
    """
    failures: list[Exception] = []

    async def run(call: Coroutine[Any, Any, T]) -> T:
        try:
            return await call
        except Exception as error:
            failures.append(error)
            raise

    tasks = [asyncio.ensure_future(run(call)) for call in calls]
    try:
        _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if failures and pending:
            await asyncio.wait(pending, timeout=grace_s)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if failures:
        raise min(failures, key=lambda failure: not isinstance(failure, WorkerDied))
    return [task.result() for task in tasks]
