"""Calls code that is not ours (environments, rewards) so that it can cost one episode and never the run.

Takes a function and a deadline; gives its result, or the typed error of the caller's choice when it raises or does not
answer. Plain functions run in daemon threads, coroutines on the event loop. A thread cannot be stopped: one whose call
ran out of time is left to itself and counted. Code that holds the interpreter lock for good stops the process with it.
"""

import asyncio
import inspect
import queue
import threading
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from contraflow.errors import ContraflowError

_MAX_TEXT = 500  # characters of a foreign error that are kept


class Foreign:
    """Runs foreign calls for one event loop.

    Invariants: at most `threads` calls that may still answer run in threads at a time; `lost` is the number of threads
    whose call was given up and has not returned; once it reaches `max_lost`, calls fail at once, without a thread.
    """

    def __init__(self, deadline_s: float, *, threads: int = 32, max_lost: int = 64) -> None:
        self._deadline_s = deadline_s
        self._max_lost = max_lost
        self._slots = asyncio.Semaphore(threads)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = 0
        self.lost = 0

    async def call(
        self, function: Callable[..., Any], *args: Any, what: str, fail: type[ContraflowError], quick: bool
    ) -> Any:
        """The result of `function(*args)`, awaited if it is awaitable. `quick` calls run here, on the event loop.

        Raises: `fail`, naming `what`, when it raises or has not answered `deadline_s` after it began.
        """
        if quick or inspect.iscoroutinefunction(function):
            result = _run(function, args)
        else:
            result = await self._in_thread(function, args, what=what, fail=fail)
        if inspect.isawaitable(result.value):
            result = await self._awaited(result.value, what=what, fail=fail)
        if result.error is not None:
            if isinstance(result.error, fail):
                raise result.error
            raise fail(f"{what} raised {_describe(result.error)}")
        return result.value

    def close(self) -> None:
        """Let idle threads end. Lost ones end with the process."""
        for _ in range(self._idle):
            self._jobs.put(None)
        self._idle = 0

    async def _in_thread(
        self, function: Callable[..., Any], args: tuple[Any, ...], *, what: str, fail: type[ContraflowError]
    ) -> "_Result":
        async with self._slots:  # bounded: whoever holds a slot gives it back at its deadline
            if self.lost >= self._max_lost:
                raise fail(f"{what} was not called: {self.lost} earlier calls of env or rewards never returned")
            job = _Job(function, args, asyncio.get_running_loop(), self._returned)
            self._submit(job)
            try:
                await asyncio.wait([job.answer], timeout=self._deadline_s)
            finally:
                if not job.answer.done():
                    job.lost = True
                    self.lost += 1
            if job.lost:
                raise fail(f"{what} did not answer within {self._deadline_s:g} s")
            return job.answer.result()

    async def _awaited(self, awaitable: Awaitable[Any], *, what: str, fail: type[ContraflowError]) -> "_Result":
        task = asyncio.ensure_future(_await(awaitable))
        try:
            await asyncio.wait([task], timeout=self._deadline_s)
        finally:
            task.cancel()  # nothing happens to one that is done; one that refuses to end is left to itself
        if not task.done():
            raise fail(f"{what} did not answer within {self._deadline_s:g} s")
        return task.result()

    def _submit(self, job: "_Job") -> None:
        if self._idle:
            self._idle -= 1
        else:
            threading.Thread(target=_serve, args=(self._jobs,), name="foreign", daemon=True).start()
        self._jobs.put(job)

    def _returned(self, job: "_Job", result: "_Result") -> None:
        """On the event loop, after a thread has run a job and is free again."""
        self._idle += 1
        if job.lost:
            self.lost -= 1
        elif not job.answer.done():
            job.answer.set_result(result)


class _Result:
    """What a call gave: `value`, or the `error` it raised. Kept as data, since a future refuses some exceptions."""

    __slots__ = ("error", "value")

    def __init__(self, value: Any, error: BaseException | None) -> None:
        self.value = value
        self.error = error


class _Job:
    """A call on its way through a thread. `lost` is set on the loop when nobody waits for the answer any more."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        returned: "Callable[[_Job, _Result], None]",
    ) -> None:
        self.function = function
        self.args = args
        self.answer: asyncio.Future[_Result] = loop.create_future()
        self.lost = False
        self._loop = loop
        self._returned = returned

    def run(self) -> None:
        result = _run(self.function, self.args)
        try:
            self._loop.call_soon_threadsafe(self._returned, self, result)
        except RuntimeError:  # the loop has closed: a lost call came back after the worker's end
            return


def _serve(jobs: "queue.SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # or its arguments would live until the next one


def _run(function: Callable[..., Any], args: tuple[Any, ...]) -> _Result:
    try:
        return _Result(function(*args), None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever foreign code raises becomes data, SystemExit too
        return _Result(None, error)


async def _await(awaitable: Awaitable[Any]) -> _Result:
    try:
        return _Result(await awaitable, None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a SystemExit left in a task would stop the event loop
        return _Result(None, error)


def _describe(error: BaseException) -> str:
    """`ValueError: text`, also for exceptions that cannot even print themselves."""
    return traceback.format_exception_only(error)[-1].strip()[:_MAX_TEXT]
