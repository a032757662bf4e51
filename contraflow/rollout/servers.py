"""Servers that are started by us, and servers that run already: two kinds of `Process`, with one deadline each.

Takes words and an environment, or nothing; gives a server that answers. What a started one prints goes to a file.
"""

import asyncio
import shutil
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from contraflow.errors import ServerError
from contraflow.rollout.keeper import STOP_S

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 1.0  # between questions whether it answers yet
_TAIL = 1500  # bytes of what a server printed last that an error repeats

Answers = Callable[[], Coroutine[Any, Any, None]]


class Attached:
    """A server that somebody else started, and would start again."""

    def __init__(self, url: str, *, deadline_s: float) -> None:
        self._url, self._deadline_s = url, deadline_s

    async def start(self, answers: Answers) -> None:
        """Wait until it answers. Raises: ServerError if that takes longer than the deadline."""
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await _answered(self._url, answers, never, self._deadline_s)

    async def stop(self) -> None:
        """Leave it be."""


class Started:
    """A server of our own. Invariant: at most one process is alive, and none once this process has ended."""

    def __init__(
        self, url: str, words: Sequence[str], environment: Mapping[str, str], log: Path, *, deadline_s: float
    ) -> None:
        """`log` is appended to. The folder of a `unix:` address is made, for this user only, and removed again."""
        self._url, self._words, self._environment = url, words, environment
        self._log, self._deadline_s = log, deadline_s
        self._keeper: asyncio.subprocess.Process | None = None
        self._socket = Path(url.removeprefix("unix:")) if url.startswith("unix:") else None

    async def start(self, answers: Answers) -> None:
        """Start it anew. Raises: ServerError when it cannot be, when it ends, with its last words, or is late."""
        await self.stop()
        try:
            keeper = self._keeper = await self._launch()
        except OSError as fault:
            self._remove_socket()
            raise ServerError(self._url, "unreachable", f"it cannot be started: {fault}") from fault
        ended = asyncio.create_task(keeper.wait())
        try:
            await _answered(self._url, answers, ended, self._deadline_s)
        except ServerError as fault:
            await self.stop()
            raise ServerError(
                self._url, fault.kind, f"{fault}; its log {self._log} ends: {self._last_words()}"
            ) from None

    async def stop(self) -> None:
        """End it; returns when it has ended. Safe to call twice."""
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        assert keeper.stdin is not None
        keeper.stdin.close()
        try:
            async with asyncio.timeout(2 * STOP_S):
                await keeper.wait()
        except TimeoutError:
            keeper.kill()
            await keeper.wait()
        self._remove_socket()

    async def _launch(self) -> asyncio.subprocess.Process:
        if self._socket is not None:
            self._socket.parent.mkdir(mode=0o700)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "contraflow.rollout.keeper", *self._words),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**self._environment},
            )

    def _remove_socket(self) -> None:
        if self._socket is not None:
            shutil.rmtree(self._socket.parent, ignore_errors=True)

    def _last_words(self) -> str:
        with self._log.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - _TAIL))
            return log.read().decode(errors="replace").strip()


async def _answered(url: str, answers: Answers, ended: "asyncio.Future[Any]", deadline_s: float) -> None:
    """Ask until there is an answer, `ended` says that none will come, or the deadline passes."""
    wait_s, fault = _FIRST_WAIT_S, "it never answered"
    try:
        async with asyncio.timeout(deadline_s):
            while not ended.done():
                try:
                    await answers()
                    return
                except ServerError as refusal:
                    fault = str(refusal)
                await asyncio.wait([ended], timeout=wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
    except TimeoutError:
        raise ServerError(url, "late", f"not ready within {deadline_s:g} s: {fault}") from None
    raise ServerError(url, "unreachable", f"its process ended with status {ended.result()} before it answered")
