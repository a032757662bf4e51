"""The watchdog of worker processes: tells who has stopped showing signs of life, and who was told to leave.

Takes status pages that workers write (status.py), gives troubles and notices; gets stacks out of processes by signal.
Does not kill or replace anybody. Staleness is counted in the watcher's own time: a machine, or a watcher, that was
itself stopped for an hour finds nobody late.
"""

import os
import signal
from pathlib import Path

from contraflow.runtime.status import Status

LOOK_S = 0.5  # between two looks at all pages
DUMP_S = 0.5  # from the signal that asks for stacks until the file is read


class Pulse:
    """How long one beat has not changed. Invariant: `stale_s` grows by at most `2 * LOOK_S` from one look to the next.

    Only change counts: a page's own times are never compared with a clock.
    """

    def __init__(self) -> None:
        self._beat = float("nan")
        self._looked = 0.0
        self.stale_s = 0.0

    def look(self, now: float, beat: float) -> float:
        """The beat as it is `now`; gives the seconds for which it has not changed."""
        self.stale_s = 0.0 if beat != self._beat else self.stale_s + min(now - self._looked, 2 * LOOK_S)
        self._beat, self._looked = beat, now
        return self.stale_s


class Patient:
    """One worker as the watchdog knows it: the pulse of its process, and that of its event loop."""

    def __init__(self) -> None:
        self._process, self._loop = Pulse(), Pulse()

    def look(self, now: float, status: Status, hang_s: float) -> str:
        """Why the worker counts as hung; empty while it does not."""
        self._process.look(now, status.process_s)
        self._loop.look(now, status.loop_s)
        trouble = self.trouble(hang_s)
        return f"hung: {trouble}; was {f'running {status.running}' if status.running else 'idle'}" if trouble else ""

    def trouble(self, least_s: float) -> str:
        """What has not moved for `least_s` or longer, at the last look; empty if all did."""
        if self._process.stale_s >= least_s:
            return f"its process has not moved for {self._process.stale_s:.0f} s"
        if self._loop.stale_s >= least_s:
            return f"its event loop has been blocked for {self._loop.stale_s:.0f} s"
        return ""


def ask_for_stacks(pid: int) -> str:
    """Signal a process to write the stacks of its threads. Gives why they cannot be had; empty when it was asked.

    A stopped process (SIGSTOP, a debugger, a frozen group) runs no handler: it is told apart, not signalled.
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        state = ""
    if state in ("T", "t"):
        return "it is stopped by a signal, so its stack cannot be had"
    try:
        os.kill(pid, signal.SIGUSR1)
    except ProcessLookupError:
        return "its process is gone"
    return ""


def keep_stacks(source: Path, target: Path) -> bool:
    """Move what a worker wrote to where people look; False when it wrote nothing."""
    if not source.is_file() or not source.stat().st_size:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())
    os.truncate(source, 0)
    return True
