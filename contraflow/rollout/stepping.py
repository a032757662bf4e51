"""Who runs an engine's steps: a thread of its own, or the caller's event loop.

Both run commands only between steps and hand outcomes to asyncio futures, one wake-up of the loop per step and not one
per completion. Neither polls: with nothing to do they wait to be told. Knows nothing of what a step does.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

import torch

from contraflow.errors import DeadlineExceeded, EngineError
from contraflow.parallel.devices import same_gpu
from contraflow.rollout.core import Outcome

T = TypeVar("T")
Command = Callable[[], None]


class Work(Protocol):
    """What is stepped. Waiters in its outcomes are asyncio futures."""

    @property
    def busy(self) -> bool: ...

    @property
    def patience_s(self) -> float | None:
        """How long it may be left without a step before `beat` is due; None: for ever."""
        ...

    def step(self) -> None: ...

    def beat(self) -> None: ...

    def fail(self, error: EngineError) -> None: ...

    def take_outcomes(self) -> list[Outcome]: ...


class Stepper(Protocol):
    """Runs `Work` step by step; its methods are called from one event loop."""

    def post(self, command: Command) -> None:
        """Run `command` before the next step. It must not raise."""
        ...

    async def ask(self, command: Callable[[], T]) -> T:
        """Run `command` before the next step and give what it returns or raises. Cancelling waits for it first."""
        ...

    async def close(self) -> None:
        """Fail what is in flight and stop."""
        ...


class ThreadStepper:
    """Steps on a thread of its own, so that slow Python in the loop (environments, rewards) delays no token for long.

    Invariant: only that thread touches `work` between start and close; the loop sees it through futures.
    """

    def __init__(self, work: Work, *, close_deadline_s: float = 30.0) -> None:
        self._work = work
        self._deadline_s = close_deadline_s
        self._outbox: list[Command] = []  # of this turn of the loop
        self._inbox: SimpleQueue[list[Command] | None] = SimpleQueue()
        self._answers: list[Outcome] = []
        # Each thread has its own OpenMP setting and current GPU; the engine's must be those of whoever made it.
        self._thread = threading.Thread(
            target=self._run, args=(torch.get_num_threads(), same_gpu()), name="contraflow-engine", daemon=True
        )
        self._thread.start()

    def post(self, command: Command) -> None:
        """See `Stepper`. Commands of one turn of the loop arrive together: a group's requests start in one step."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._send)
        self._outbox.append(command)

    async def ask(self, command: Callable[[], T]) -> T:
        """See `Stepper`."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.post(lambda: self._answers.append((answer, _outcome(command))))
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            await asyncio.wait([answer])
            raise

    async def close(self) -> None:
        """See `Stepper`. Raises DeadlineExceeded if a step does not end."""
        self._send()
        self._inbox.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join, self._deadline_s)
        if self._thread.is_alive():
            raise DeadlineExceeded("engine close", "its step to end", self._deadline_s)

    def _send(self) -> None:
        self._inbox.put(self._outbox)
        self._outbox = []

    def _run(self, threads: int, enter_gpu: Callable[[], None]) -> None:
        torch.set_num_threads(threads)
        enter_gpu()
        while self._obey():
            _step(self._work)
            self._deliver()
        self._work.fail(EngineError("the engine was closed"))
        self._deliver()

    def _obey(self) -> bool:
        """Run all commands there are, waiting for one if there is no step to do; False once it is time to stop."""
        while not (self._work.busy and self._inbox.empty()):
            try:
                commands = self._inbox.get(timeout=self._work.patience_s)
            except Empty:
                self._work.beat()
                continue
            if commands is None:
                return False
            for command in commands:
                command()
            if self._answers:
                self._deliver()
        return True

    def _deliver(self) -> None:
        outcomes = self._work.take_outcomes() + self._answers
        self._answers = []
        by_loop: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
        for outcome in outcomes:
            by_loop.setdefault(outcome[0].get_loop(), []).append(outcome)  # type: ignore[attr-defined]
        for loop, theirs in by_loop.items():
            with suppress(RuntimeError):  # a loop that was closed has nobody left who waits
                loop.call_soon_threadsafe(_resolve, theirs)


class InlineStepper:
    """Steps inside the caller's loop, one step per turn of it: the same calls in the same order give the same run.

    Invariant: the stepping task is waiting for `_wake` exactly when there is nothing to do.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self._wake: asyncio.Future[None] | None = None

    def post(self, command: Command) -> None:
        """See `Stepper`."""
        command()
        _resolve(self._work.take_outcomes())
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="contraflow-engine")
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def ask(self, command: Callable[[], T]) -> T:
        """See `Stepper`."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.post(lambda: _resolve([(answer, _outcome(command))]))
        return answer.result()

    async def close(self) -> None:
        """See `Stepper`."""
        self._work.fail(EngineError("the engine was closed"))
        _resolve(self._work.take_outcomes())
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _run(self) -> None:
        while True:
            while not self._work.busy:
                self._wake = asyncio.get_running_loop().create_future()
                await self._wake
            _step(self._work)
            _resolve(self._work.take_outcomes())
            await asyncio.sleep(0)


def _step(work: Work) -> None:
    try:
        work.step()
    except Exception as fault:  # noqa: BLE001 - whatever the model raised, those who wait must hear of it
        work.fail(EngineError(f"a step of the engine failed: {type(fault).__name__}: {fault}"))


def _outcome(command: Callable[[], Any]) -> Any:
    try:
        return command()
    except Exception as fault:  # noqa: BLE001 - carried to the one who asked, and raised there
        return fault


def _resolve(outcomes: list[Outcome]) -> None:
    for waiter, value in outcomes:
        future: asyncio.Future[Any] = waiter  # type: ignore[assignment]
        if future.done():  # cancelled meanwhile
            continue
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)
