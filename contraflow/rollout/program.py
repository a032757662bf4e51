"""An outside program of the user's: started for one episode, told its task, killed with its children when it is over.

Takes words of a command line, which no shell reads, and an invitation: the task as a line of JSON on standard input,
endpoint and key as OPENAI_BASE_URL and OPENAI_API_KEY. Says how it ended. Does not listen to what it asks.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from contraflow.errors import TaskError
from contraflow.rollout.desk import Ended, Session

_LAST_WORDS = 400  # characters of a program's standard error that an error repeats
_LEAVE_S = 2.0  # for a program that is done to end by itself
_KILL_S = 5.0  # for a killed program to be gone


@asynccontextmanager
async def program(
    command: tuple[str, ...], session: Session, invitation: dict[str, object], environ: Mapping[str, str]
) -> AsyncIterator[None]:
    """Start it, in a process group of its own; the session hears of its end. Raises: TaskError when it does not start.

    On the way out it has a moment to end by itself, unless something failed; then the whole group is killed.
    """
    process = await _started(command, invitation, environ)
    assert process.stderr is not None
    words, leave_s = bytearray(), 0.0
    reading = asyncio.create_task(keep_last(process.stderr, words))
    watching = asyncio.create_task(_watch(process, reading, words, session))
    try:
        yield
        leave_s = _LEAVE_S
    finally:
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), leave_s)
        finally:  # whoever plays may be cancelled in that moment, too
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.wait([watching, reading], timeout=_KILL_S)  # what cannot be killed is left to the kernel
            watching.cancel()
            reading.cancel()


async def _started(
    command: tuple[str, ...], invitation: dict[str, object], environ: Mapping[str, str]
) -> asyncio.subprocess.Process:
    place = {"OPENAI_BASE_URL": str(invitation["base_url"]), "OPENAI_API_KEY": str(invitation["api_key"])}
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**environ, **place},
            start_new_session=True,
        )
    except OSError as fault:
        raise TaskError(f"the harness {command[0]!r} does not start: {fault}") from None
    assert process.stdin is not None
    process.stdin.write(json.dumps(invitation["task"]).encode() + b"\n")
    process.stdin.close()
    return process


async def _watch(
    process: asyncio.subprocess.Process, reading: "asyncio.Task[None]", words: bytearray, session: Session
) -> None:
    """Tell the session how its program ended."""
    code = await process.wait()
    await asyncio.wait([reading], timeout=_LEAVE_S)  # a child of its own may hold its standard error open
    said = bytes(words).decode(errors="replace").strip()[-_LAST_WORDS:]
    fault = "" if code == 0 else f"the harness ended with exit code {code}" + (f": {said}" if said else "")
    session.end(Ended(None, fault), f"its program ended with exit code {code}")


async def keep_last(stream: asyncio.StreamReader, words: bytearray) -> None:
    """Read a stream to its end into `words`, of which only the last are kept."""
    while piece := await stream.read(1 << 12):
        words += piece
        del words[: -4 * _LAST_WORDS]
