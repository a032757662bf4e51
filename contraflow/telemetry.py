"""Where a process's seconds went, and the numbers a run writes down.

Takes a clock, gives accounts whose causes sum to the wall clock by construction, and a line-per-record journal.
Does not: decide, draw or read the clock by itself.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from contraflow.errors import RunFolderError

Clock = Callable[[], float]


class Account:
    """Seconds of one process (or engine thread) by cause.

    Invariant: at every moment exactly one cause is running, so the causes sum to the time since `start`.
    Only the thread that owns the account may switch causes; anybody may read.
    """

    def __init__(self, clock: Clock, first: str = "start") -> None:
        self._clock = clock
        self._cause = first
        self._since = clock()
        self._seconds: dict[str, float] = {}

    @property
    def cause(self) -> str:
        """What the process is doing now."""
        return self._cause

    def switch(self, cause: str) -> str:
        """Start charging `cause`; returns the cause that was running."""
        now = self._clock()
        previous = self._cause
        self._seconds[previous] = self._seconds.get(previous, 0.0) + now - self._since
        self._cause, self._since = cause, now
        return previous

    @contextmanager
    def charge(self, cause: str) -> Iterator[None]:
        """Charge the body to `cause`, then go back to what ran before."""
        previous = self.switch(cause)
        try:
            yield
        finally:
            self.switch(previous)

    def seconds(self) -> dict[str, float]:
        """Seconds by cause up to now, the running cause included."""
        running = self._clock() - self._since
        totals = dict(self._seconds)
        totals[self._cause] = totals.get(self._cause, 0.0) + running
        return totals


class Journal:
    """A file of JSON lines, each written whole and flushed, so a reader never sees half a record.

    A torn last line, left by a crash in mid-write, is cut off when the journal is opened again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._guarded():
            if path.is_file():
                whole = path.read_bytes().rpartition(b"\n")
                os.truncate(path, len(whole[0]) + len(whole[1]))
            self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Raises RunFolderError when the disk is full."""
        with self._guarded():
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
            self._file.flush()

    def close(self) -> None:
        with self._guarded():
            self._file.close()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as fault:
            raise RunFolderError(f"{self._path} cannot be written: {fault}; free some space and resume") from fault


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All whole records of a journal; a torn last line (a crash in mid-write) is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
