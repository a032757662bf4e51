"""A process that plays all episodes of one worker: started with the first, asked and heard by lines of JSON.

Takes sessions at the desk; tells the process which to play, and the session how it ended. A process that dies ends the
sessions that sit with it; one that does not answer a ping is killed; the next episode starts another. What the process
says is in envs/verifiers_play.py.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from contraflow.errors import TaskError
from contraflow.rollout.desk import Ended, Session
from contraflow.rollout.program import keep_last

_START_S = 120.0  # for the process to import its libraries and to read its tasks
_LEAVE_S = 2.0  # for a process whose input ended to end, too
_LAST_WORDS = 400  # characters of its standard error that an error repeats


class Player:
    """Invariants: at most one process runs; whoever sits here hears of the end of the episode, or of the process."""

    def __init__(self, command: tuple[str, ...], hello: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        """`hello`: what the process is told first, with the endpoint as `url`."""
        self._command, self._hello, self._environ = command, dict(hello), environ
        self._sessions: dict[str, Session] = {}
        self._starting: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self._answered = asyncio.Event()  # set by a pong, and by the end of the process

    @asynccontextmanager
    async def seat(self, session: Session, *, url: str) -> AsyncIterator[None]:
        """Let the process play `session`, until it is left. Raises: TaskError when no process can be started."""
        if self._starting is None or (self._starting.done() and not self._is_up()):
            self._starting = asyncio.create_task(self._start(url))
            self._starting.add_done_callback(_looked_at)
        await asyncio.shield(self._starting)  # an episode that is given up leaves the start to others
        self._sessions[session.key] = session
        self._tell({"play": session.key, "facts": session.task.facts})
        try:
            yield
        finally:
            del self._sessions[session.key]
            self._tell({"drop": session.key})

    async def check(self, deadline_s: float) -> None:
        """An episode is late: is it that episode, or the process? One that does not answer a ping by then is killed."""
        if not self._is_up():
            return
        self._answered.clear()
        self._tell({"ping": 1})
        try:
            async with asyncio.timeout(deadline_s):
                await self._answered.wait()
        except TimeoutError:
            self._kill()

    async def close(self) -> None:
        """End the process, and whatever it started."""
        if self._starting is not None:
            self._starting.cancel()
        if self._listening is None:
            return
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        await asyncio.wait([self._listening], timeout=_LEAVE_S)
        self._kill()
        await asyncio.wait([self._listening], timeout=_LEAVE_S)  # what cannot be killed is left to the kernel
        self._listening.cancel()

    def _is_up(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def _start(self, url: str) -> None:
        if self._listening is not None:  # the one before: its end is told to none but those who sat with it
            await asyncio.wait([self._listening], timeout=2 * _LEAVE_S)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=dict(self._environ),
                start_new_session=True,
            )
        except OSError as fault:
            raise TaskError(f"the player {self._command[0]!r} does not start: {fault}") from None
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._listening = asyncio.create_task(self._listen(self._process, ready))
        self._tell({**self._hello, "url": url})
        try:
            async with asyncio.timeout(_START_S):
                await ready
        except TimeoutError:
            self._kill()
            raise TaskError(f"the player was not ready within {_START_S:g} s of its start") from None

    async def _listen(self, process: asyncio.subprocess.Process, ready: "asyncio.Future[None]") -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        words = bytearray()
        reading = asyncio.create_task(keep_last(process.stderr, words))
        while line := await process.stdout.readline():
            self._heard(msgspec.json.decode(line), ready)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _LEAVE_S)
        if process.returncode is None:  # it is mute, and of no use any more
            self._kill()
        await asyncio.wait([reading], timeout=_LEAVE_S)  # a child of its own may hold its standard error open
        reading.cancel()
        said = bytes(words).decode(errors="replace").strip()[-_LAST_WORDS:]
        fault = f"the player ended with exit code {process.returncode}" + (f": {said}" if said else "")
        for session in self._sessions.values():
            session.end(Ended(None, fault), "its player ended")
        self._answered.set()
        if not ready.done():
            ready.set_exception(TaskError(fault))

    def _heard(self, line: Any, ready: "asyncio.Future[None]") -> None:
        match line:
            case {"ready": _}:
                if not ready.done():  # whoever waited may have been cancelled
                    ready.set_result(None)
            case {"pong": _}:
                self._answered.set()
            case {"key": str(key), "reward": int() | float() as reward}:
                self._end(key, Ended(float(reward)))
            case {"key": str(key), "fault": str(fault)}:
                self._end(key, Ended(None, fault))

    def _end(self, key: str, ended: Ended) -> None:
        if session := self._sessions.get(key):
            session.end(ended, "its player is done")

    def _tell(self, line: dict[str, Any]) -> None:
        """A process that is gone need not be told."""
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(msgspec.json.encode(line) + b"\n")

    def _kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process = None


def _looked_at(start: "asyncio.Task[None]") -> None:
    """Whoever waited may have gone: then nobody else looks at the error."""
    if not start.cancelled():
        start.exception()
