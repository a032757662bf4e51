"""One worker's process, from the outside: start it, know its end, end it.

`House` is what is the same whoever starts the process; `ProcessHouse` is one that multiprocessing made. Gives awaitable
facts about it. Does not decide what an end means.
"""

import asyncio
import signal
from abc import ABC, abstractmethod
from concurrent.futures import Executor
from multiprocessing.process import BaseProcess
from pathlib import Path

from contraflow.errors import ChannelError, DeadlineExceeded, WorkerDied
from contraflow.runtime.base import Address, Ref
from contraflow.runtime.faults import from_fault
from contraflow.runtime.process import Control, stack_path, status_path
from contraflow.runtime.status import GAVE_UP, Status, read_status
from contraflow.runtime.watch import Patient, ask_for_stacks

EXIT_S = 2.0  # from a worker's last answer to its end; then SIGKILL
FORK_S = 30.0  # for the fork server to make a process
_LOST = 255  # what multiprocessing says when it cannot know


class House(ABC):
    """A worker's process. Invariant: `ended` is done, with a code that is 0 if it went in order, when it is gone."""

    def __init__(self, name: str, *, number: int) -> None:
        """`number` tells it from others of its name."""
        self.address, self.number = Address(name, ""), number  # the endpoint comes with the process
        self.watched = False  # its end, if it came now, would be news
        self.death: WorkerDied | None = None  # what everybody was told of its end
        self.noticed = False  # that it was told to leave
        self.patient = Patient()
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._blame = ""

    @property
    def name(self) -> str:
        return self.address.worker

    @property
    @abstractmethod
    def control(self) -> Ref[Control]:
        """The process, as the runtime calls it; known once it was opened."""

    @abstractmethod
    async def open(self) -> None:
        """Start the process and wait until its factory is done. Raises what the factory raised, or ChannelError."""

    @abstractmethod
    def kill(self, reason: str = "") -> None:
        """End the process, if there is one. `reason`, if there is one, is what will be said of its end."""

    @abstractmethod
    async def settle(self) -> bool:
        """Wait, in bounds, for a start under way; whether there is, or was, a process."""

    @abstractmethod
    def epitaph(self, code: int) -> str:
        """How the process ended and what it was doing then, such as `SIGKILL; was running step`."""

    async def stop(self, stop_s: float) -> None:
        """Run the worker's `close()`, then see the process out. Raises what `close()` raised, or DeadlineExceeded."""
        willing = True
        try:
            await self.control.call(stop_s, Control.stop)
        except WorkerDied as death:
            await asyncio.wait({self.ended})
            if death.worker != self.name or self.ended.result():
                raise  # otherwise it ended as asked, before its answer went out
        except BaseException as error:
            willing = not isinstance(error, DeadlineExceeded | asyncio.CancelledError)
            raise
        finally:
            await self.leave(willing)

    async def leave(self, willing: bool) -> None:
        """Wait for the process to end; push it when it is not willing or takes too long."""
        for push in (None, self.kill)[0 if willing else 1 :]:
            if not await self.settle() and not self.ended.done():
                self.ended.set_result(0)
            if push and not self.ended.done():
                push()
            if (await asyncio.wait({self.ended}, timeout=EXIT_S))[0]:
                return


class ProcessHouse(House):
    """A process that multiprocessing makes. `ended` has its exit code."""

    def __init__(
        self, address: Address, process: BaseProcess, hand: Executor, control: Ref[Control], *, number: int = 0
    ) -> None:
        """`hand` runs, one at a time, what multiprocessing does without locks: starting and reaping."""
        super().__init__(address.worker, number=number)
        self.address, self._control = address, control
        self._process, self._hand = process, hand
        self._starting: asyncio.Future[None] | None = None

    @property
    def files(self) -> str:
        """The worker's socket, beside which its other files are."""
        return self.address.endpoint.removeprefix("ipc://")

    @property
    def control(self) -> Ref[Control]:
        return self._control

    async def settle(self) -> bool:
        """See `House.settle`."""
        if self._starting:
            await asyncio.wait({self._starting}, timeout=FORK_S)
        return self._exists

    async def open(self) -> None:
        """See `House.open`."""
        if self.ended.done():
            raise ChannelError(f"worker {self.name!r} was stopped before it began")
        loop = asyncio.get_running_loop()
        self._starting = loop.run_in_executor(self._hand, self._process.start)
        try:
            await asyncio.shield(self._starting)
        except (EOFError, OSError) as error:
            raise ChannelError(
                f"no process for {self.name!r}: the fork server failed ({error!r}); try again"
            ) from error
        finally:
            # Also when cancelled: a process that exists must be known. A fork server that hangs makes none.
            await asyncio.wait({self._starting}, timeout=FORK_S)
            if self._exists:
                loop.add_reader(self._process.sentinel, self._on_sentinel)
        fault = await self.control.call(float("inf"), Control.ready)
        if fault:
            raise from_fault(fault)

    def kill(self, reason: str = "") -> None:
        """See `House.kill`."""
        if self._exists and not self.ended.done():
            self._blame = self._blame or reason
            self._process.kill()

    def ask_for_stacks(self) -> str:
        """See `watch.ask_for_stacks`."""
        if not self._exists or self.ended.done() or self._process.pid is None:
            return "its process is gone"
        return ask_for_stacks(self._process.pid)

    def epitaph(self, code: int) -> str:
        """See `House.epitaph`."""
        how = _signal_name(-code) if code < 0 else f"exit code {code}"
        if code == _LOST:
            how += ", or the fork server died"
        return self._blame or describe_end(how, read_status(status_path(self.files)))

    def clean(self) -> None:
        """Remove the files of a process that is gone."""
        for path in (status_path(self.files), stack_path(self.files), Path(self.files)):
            path.unlink(missing_ok=True)

    @property
    def _exists(self) -> bool:
        return self._starting is not None and self._starting.done() and self._starting.exception() is None

    def _on_sentinel(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._process.sentinel)
        reaping = loop.run_in_executor(self._hand, lambda: self._process.exitcode)
        reaping.add_done_callback(self._on_reaped)

    def _on_reaped(self, reaping: asyncio.Future[int | None]) -> None:
        # Closing lets go of what the process takes for a sign of life of its runtime. If it was the fork server that
        # ended, the process itself is still there, and will now leave.
        self._process.close()
        self.ended.set_result(reaping.result() or 0)


def describe_end(how: str, last: Status | None) -> str:
    """How a process ended and what it did last, as far as its status page tells."""
    if last and last.running.startswith(GAVE_UP):
        return f"it {last.running}"
    return f"{how}; was running {last.running}" if last and last.running else f"{how}; was idle"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
