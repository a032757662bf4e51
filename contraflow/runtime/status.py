"""What a worker is doing, written where it can be read after the worker was killed.

One page of a file, mapped by the worker and read by anybody: when its process and its event loop last showed a sign of
life, and which methods are running. Times are of one clock shared by all processes of the machine.
"""

import mmap
import struct
from pathlib import Path

import msgspec

_HEAD = struct.Struct("<ddII")  # process beat, loop beat, length of the text, whether it was told to leave
_PAGE = 4096
GAVE_UP = "gave up: "  # how `running` begins when a worker ended itself, and why follows
LEFT = "left in order"  # what `running` says once a worker was told to stop and did
STALE_S = 2.0  # four missed beats


class Status(msgspec.Struct, frozen=True):
    """`process_s` and `loop_s` are the clock's times of the last sign of life; `running` names methods.

    `leaving`: its process was told to leave (SIGTERM).
    """

    process_s: float
    loop_s: float
    running: str
    leaving: bool = False

    def trouble(self, now: float) -> str:
        """Why the worker may be slow to answer; empty when it looks healthy."""
        if now - self.process_s > STALE_S:
            return f"its process has not moved for {now - self.process_s:.0f} s"
        if now - self.loop_s > STALE_S:
            return (
                f"its event loop has been blocked for {now - self.loop_s:.0f} s; running: {self.running or 'nothing'}"
            )
        return ""


class StatusPage:
    """The worker's side. Each field is written by one thread only; a reader may see a field one write late."""

    def __init__(self, path: Path, now: float) -> None:
        with path.open("w+b") as file:
            file.truncate(_PAGE)
            self._map = mmap.mmap(file.fileno(), _PAGE)
        self.beat(now)
        self.tick(now)

    def beat(self, now: float) -> None:
        """The process runs."""
        struct.pack_into("<d", self._map, 0, now)

    def tick(self, now: float) -> None:
        """The event loop runs."""
        struct.pack_into("<d", self._map, 8, now)

    def running(self, text: str) -> None:
        """These methods run now."""
        data = text.encode()[: _PAGE - _HEAD.size]
        self._map[_HEAD.size : _HEAD.size + len(data)] = data
        struct.pack_into("<I", self._map, 16, len(data))

    def leaving(self) -> None:
        """The process was told to leave."""
        struct.pack_into("<I", self._map, 20, 1)


def read_status(path: Path) -> Status | None:
    """The last status of a worker, or None when it never wrote one."""
    try:
        page = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(page) < _PAGE:
        return None
    process_s, loop_s, length, leaving = _HEAD.unpack_from(page)
    text = page[_HEAD.size : _HEAD.size + length].decode("utf-8", "replace")
    return Status(process_s, loop_s, text, bool(leaving))
