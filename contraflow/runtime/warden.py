"""Looks after the workers of one machine of a cluster, for a runtime that is on another one.

A process of its own beside the workers: it knows when one of them ends and reads what it was doing then (status.py),
has stacks written, and ends a worker by signal, however stuck it is. When it goes itself, so do the workers it keeps.
Starts nobody, and decides nothing.
"""

import asyncio
import os
import shutil
import signal
from pathlib import Path

import msgspec

from contraflow.errors import ChannelError
from contraflow.runtime.base import Host
from contraflow.runtime.process import stack_path, status_path
from contraflow.runtime.status import Status, read_status
from contraflow.runtime.watch import DUMP_S, ask_for_stacks


class End(msgspec.Struct, frozen=True):
    """A worker process that is gone, by its number, and its last status."""

    number: int
    last: Status | None


class Stacks(msgspec.Struct, frozen=True):
    """`text` of a worker's threads, or `why` there is none."""

    text: str = ""
    why: str = ""


class _Kept(msgspec.Struct, frozen=True):
    """`handle`: a file descriptor of the process, which becomes readable when it ends."""

    pid: int
    files: str
    handle: int


class Warden:
    """Invariant: a process that is watched is in `_kept` until it ended, and from then on in `_ended`, once."""

    def __init__(self, folder: Path) -> None:
        """`folder` holds the files of this machine's workers, and goes with the warden."""
        self._folder = folder
        self._kept: dict[int, _Kept] = {}
        self._ended: list[End] = []
        self._news = asyncio.Event()

    async def watch(self, number: int, pid: int, files: str) -> None:
        """Look after a process of this machine from now on. One that is gone already has ended."""
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return self._note(number, files)
        self._kept[number] = _Kept(pid, files, handle)
        asyncio.get_running_loop().add_reader(handle, self._on_end, number)

    async def ends(self, known: int, wait_s: float) -> list[End]:
        """All ends after the first `known`; the next one is waited for, `wait_s` at most."""
        try:
            async with asyncio.timeout(wait_s):
                while len(self._ended) <= known:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return []
        return self._ended[known:]

    async def look(self) -> dict[int, Status]:
        """The status of every worker that lives and has one yet."""
        found = {number: read_status(status_path(kept.files)) for number, kept in self._kept.items()}
        return {number: status for number, status in found.items() if status}

    async def kill(self, number: int) -> None:
        """End a worker on the spot, unless it has ended."""
        if number in self._kept:
            signal.pidfd_send_signal(self._kept[number].handle, signal.SIGKILL)

    async def stacks(self, numbers: list[int]) -> dict[int, Stacks]:
        """The stacks of workers, of those that live; takes `DUMP_S`."""
        asked = {number: self._kept[number] for number in numbers if number in self._kept}
        why = {number: ask_for_stacks(kept.pid) for number, kept in asked.items()}
        await asyncio.sleep(DUMP_S if any(not reason for reason in why.values()) else 0)
        return {number: _stacks(stack_path(kept.files), why[number]) for number, kept in asked.items()}

    async def sees(self, path: str) -> bool:
        """Whether there is such a file on this machine."""
        return await asyncio.to_thread(Path(path).exists)

    async def make_folder(self, path: str) -> None:
        """Have a folder on this machine. Raises ChannelError where that cannot be."""
        try:
            await asyncio.to_thread(Path(path).mkdir, parents=True, exist_ok=True)
        except OSError as fault:
            raise ChannelError(f"{path} cannot be made on this machine: {fault}") from fault

    async def close(self) -> None:
        """Let go of all files. Workers that are still there leave when this process is gone."""
        for number in list(self._kept):
            self._release(number)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _on_end(self, number: int) -> None:
        self._note(number, self._release(number).files)

    def _release(self, number: int) -> _Kept:
        kept = self._kept.pop(number)
        asyncio.get_running_loop().remove_reader(kept.handle)
        os.close(kept.handle)
        return kept

    def _note(self, number: int, files: str) -> None:
        self._ended.append(End(number, read_status(status_path(files))))
        self._news.set()
        for path in (status_path(files), stack_path(files)):
            path.unlink(missing_ok=True)


def make_warden(host: Host, *, folder: str) -> Warden:
    return Warden(Path(folder))


def _stacks(path: Path, why: str) -> Stacks:
    if why or not path.is_file() or not path.stat().st_size:
        return Stacks(why=why or "it wrote none")
    text = path.read_text(encoding="utf-8")
    os.truncate(path, 0)
    return Stacks(text=text)
