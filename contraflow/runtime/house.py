"""One worker process, from the outside: start it, know its end, end it.

Takes the process that multiprocessing made, gives awaitable facts about it. Does not decide what an end means.
"""

import asyncio
import signal
from concurrent.futures import Executor
from multiprocessing.process import BaseProcess

from contraflow.errors import ChannelError, DeadlineExceeded, WorkerDied
from contraflow.runtime.base import Address, Ref
from contraflow.runtime.faults import from_fault
from contraflow.runtime.process import Control, socket_path, stack_path, status_path
from contraflow.runtime.status import GAVE_UP, read_status
from contraflow.runtime.watch import Patient, ask_for_stacks

EXIT_S = 2.0  # from a worker's last answer to its end; then SIGKILL
FORK_S = 30.0  # for the fork server to make a process
_LOST = 255  # what multiprocessing says when it cannot know


class House:
    """A worker process. Invariant: `ended` is done, with the exit code, exactly when the process is gone."""

    def __init__(
        self, address: Address, process: BaseProcess, hand: Executor, control: Ref[Control], *, number: int = 0
    ) -> None:
        """`number` tells it from others of its name.

        `hand` runs, one at a time, what multiprocessing does without locks: starting and reaping.
        """
        self.address, self.number = address, number
        self.control = control
        self.watched = False  # its end, if it came now, would be news
        self.death: WorkerDied | None = None  # what everybody was told of its end
        self.noticed = False  # that it was told to leave
        self.patient = Patient()
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._process, self._hand = process, hand
        self._starting: asyncio.Future[None] | None = None
        self._blame = ""

    @property
    def name(self) -> str:
        return self.address.worker

    async def open(self) -> None:
        """Start the process and wait until its factory is done. Raises what the factory raised, or ChannelError."""
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
        if self._starting:
            await asyncio.wait({self._starting}, timeout=FORK_S)
        for push in (None, self._process.kill)[0 if willing else 1 :]:
            if not self._exists and not self.ended.done():
                self.ended.set_result(0)
            if push and not self.ended.done():
                push()
            if (await asyncio.wait({self.ended}, timeout=EXIT_S))[0]:
                return

    def kill(self, reason: str = "") -> None:
        """`reason`, if there is one, is what will be said of its end."""
        if self._exists and not self.ended.done():
            self._blame = self._blame or reason
            self._process.kill()

    def ask_for_stacks(self) -> str:
        """See `watch.ask_for_stacks`."""
        if not self._exists or self.ended.done() or self._process.pid is None:
            return "its process is gone"
        return ask_for_stacks(self._process.pid)

    def epitaph(self, code: int) -> str:
        """How the process ended and what it was doing then, such as `SIGKILL; was running step`."""
        if self._blame:
            return self._blame
        status = read_status(status_path(self.address))
        how = _signal_name(-code) if code < 0 else f"exit code {code}"
        if code == _LOST:
            how += ", or the fork server died"
        if status and status.running.startswith(GAVE_UP):
            return f"it {status.running}"
        return f"{how}; was running {status.running}" if status and status.running else f"{how}; was idle"

    def clean(self) -> None:
        """Remove the files of a process that is gone."""
        for path in (status_path(self.address), stack_path(self.address), socket_path(self.address)):
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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
