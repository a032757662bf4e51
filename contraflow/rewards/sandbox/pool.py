"""The side that asks: a few cells, each started when first needed, replaced when it dies or hangs.

Takes programs; gives how they ended and the bytes they wrote. Safe to use from many threads; never evaluates a byte.
"""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from contraflow import config
from contraflow.errors import ConfigError, RewardError
from contraflow.rewards.sandbox.cell import MESSAGE
from contraflow.rewards.sandbox.room import seen

_ROOT = Path(__file__).parents[3]
_OPEN_S = 60.0  # from starting a cell to its first word; a busy disk imports slowly
_GRACE_S = 10.0  # beyond a program's own deadline: then it is the cell that hangs
_KILL_S = 5.0  # for a killed cell to be gone
_CPU_SLACK_S = 0.3  # the kernel counts ticks where it ends a process, and the time itself where it reports it
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_MAIN = (
    "import sys; sys.path.append(sys.argv.pop()); from contraflow.rewards.sandbox.cell import main; "
    "sys.path.pop(); main()"
)

End = Literal["done", "failed", "cpu", "late"]


class Program(msgspec.Struct, frozen=True):
    """Python source, what it reads, and an expression to evaluate in its module afterwards (empty: none)."""

    source: str
    stdin: str = ""
    call: str = ""


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """How a program ended. `late` and `cpu`: it was ended; `failed`: by an exception, a signal or an exit code."""

    end: End
    stdout: bytes
    stderr: bytes
    result: bytes  # what lies where the call's tokens belong: the program may have written anything
    cpu_s: float
    wall_s: float


class Sandbox:
    """Runs programs in at most `processes` cells at a time.

    Invariants: a cell runs one program at a time; one that broke is closed and never asked again; after `close` there
    is no process left.
    """

    def __init__(self, section: config.Sandbox, *, warm: str = "", packages: Sequence[str] = ()) -> None:
        """`warm` is source of our own, run once before anything is confined; `packages`: folders it imports from."""
        self._section = section
        self._warm, self._packages = warm, tuple(packages)
        self._free = threading.Semaphore(section.processes)
        self._lock = threading.Lock()
        self._idle: list[_Cell] = []
        self._closed = False

    @property
    def section(self) -> config.Sandbox:
        return self._section

    @property
    def most_s(self) -> float:
        """After so many seconds an answer was judged, or RewardError raised: a cell started, all its programs run."""
        return _OPEN_S + self._section.total_s + _GRACE_S

    @property
    def isolation(self) -> str:
        """What is in force, in words."""
        return describe(self._section, root=os.geteuid() == 0)

    def run(self, program: Program, *, wall_s: float | None = None) -> Ran:
        """Run one program, for at most `wall_s` seconds (those of the section if not given).

        Raises: ConfigError when this machine can't give the isolation that was asked for, with the reason;
        RewardError when the cell died or hung: nothing is known of the program then.
        """
        wall_s = self._section.wall_s if wall_s is None else min(wall_s, self._section.wall_s)
        if not self._free.acquire(timeout=self.most_s):
            raise RewardError(f"the sandbox waited {self.most_s:g} s for a free one of {self._section.processes} cells")
        try:
            cell = self._take()
            try:
                ran = cell.run(program, wall_s)
            except BaseException:
                cell.close()
                raise
            self._give(cell)
            return ran
        finally:
            self._free.release()

    def close(self) -> None:
        """End the cells; one that runs a program is ended when that is over."""
        with self._lock:
            self._closed = True
            cells, self._idle = self._idle, []
        for cell in cells:
            cell.close()

    def _take(self) -> "_Cell":
        with self._lock:
            if self._closed:
                raise RewardError("the sandbox is closed")
            if self._idle:
                return self._idle.pop()
        return _Cell(self._section, self._warm, self._packages)

    def _give(self, cell: "_Cell") -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(cell)
                return
        cell.close()


class _Cell:
    """One cell's process, and the socket to it. Invariant: it answers every job once, or is closed."""

    def __init__(self, section: config.Sandbox, warm: str, packages: Sequence[str]) -> None:
        self._section = section
        if sys.platform != "linux":
            raise ConfigError(f"rewards that run programs need Linux's isolation; this is {sys.platform}")
        folders = seen([sysconfig.get_path("stdlib"), sysconfig.get_config_var("DESTSHARED"), *packages])
        settings = {**_limits(section), "folders": folders, "warm": warm, "packages": packages}
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-P", "-B", "-X", "utf8", "-c", _MAIN, json.dumps(settings), str(_ROOT)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                cwd="/",
                env={"PYTHONHASHSEED": "0", "TMPDIR": "/scratch"},  # one seed: the same program, the same end
                start_new_session=True,
            )
        try:
            hello = self._receive(_OPEN_S)
            if "fault" in hello:
                raise ConfigError(_refusal(section.isolation, hello["fault"]))
        except BaseException:
            self.close()
            raise

    def run(self, program: Program, wall_s: float) -> Ran:
        files: list[int] = []
        try:
            files.append(_sealed(program.stdin.encode("utf-8", "surrogatepass")))
            files += [os.memfd_create(name) for name in ("stdout", "stderr", "result")]
            files.append(_sealed(json.dumps({"source": program.source, "call": program.call}).encode()))
            socket.send_fds(self._channel, [json.dumps({"wall_s": wall_s}).encode()], files)
            report = self._receive(wall_s + _GRACE_S)
            stdout, stderr, result = (_read(file, self._section.file_kb << 10) for file in files[1:4])
        except OSError as fault:
            raise RewardError(f"the sandbox's cell {self._process.pid} broke: {fault}") from fault
        finally:
            for file in files:
                os.close(file)
        if report["fault"]:
            raise ConfigError(_refusal(self._section.isolation, report["fault"]))
        return Ran(
            end=_end(report, self._section.cpu_s),
            stdout=stdout,
            stderr=stderr,
            result=result,
            cpu_s=report["cpu_s"],
            wall_s=report["wall_s"],
        )

    def close(self) -> None:
        self._channel.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # what cannot be killed is left to the kernel
            self._process.wait(timeout=_KILL_S)

    def _receive(self, deadline_s: float) -> dict[str, Any]:
        self._channel.settimeout(deadline_s)
        try:
            message = self._channel.recv(MESSAGE)
        except TimeoutError:
            raise RewardError(f"the sandbox's cell {self._process.pid} was silent for {deadline_s:g} s") from None
        if not message:
            raise RewardError(f"the sandbox's cell {self._process.pid} died")
        answer: dict[str, Any] = json.loads(message)
        return answer


def describe(section: config.Sandbox, *, root: bool) -> str:
    """What programs run under, in words."""
    filters = "system calls by a list of what is allowed (no sockets, processes, signals), rights and resources limited"
    own = ", a user of their own" if root else ""
    if section.isolation == "filters":
        return f"filters: files read-only below named folders (Landlock), {filters}{own}"
    return f"namespaces: own root, process ids, network, IPC, an empty scratch folder; {filters}{own}"


def _limits(section: config.Sandbox) -> dict[str, Any]:
    return section.model_dump(include={"isolation", "cpu_s", "memory_mb", "file_kb", "threads"})


def _refusal(isolation: str, reason: str) -> str:
    other = {
        "namespaces": "allow user namespaces (or run as root), or choose 'filters', which is less: see docs/sandbox.md",
        "filters": "Landlock needs Linux 5.13 with it switched on; choose 'namespaces'",
    }
    return f"reward.sandbox.isolation = {isolation!r} cannot be had on this machine: {reason}; {other[isolation]}"


def _end(report: dict[str, Any], cpu_s: int) -> End:
    if report["late"]:
        return "late"
    if report["code"] == 0:
        return "done"
    return "cpu" if report["code"] == -signal.SIGKILL and report["cpu_s"] > cpu_s - _CPU_SLACK_S else "failed"


def _sealed(content: bytes) -> int:
    """A file in memory that nobody can change any more, read from its start."""
    file = os.memfd_create("input", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    with open(file, "wb", closefd=False) as writer:
        writer.write(content)
    os.lseek(file, 0, os.SEEK_SET)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    return file


def _read(file: int, limit: int) -> bytes:
    return os.pread(file, limit, 0)
