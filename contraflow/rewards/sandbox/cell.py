"""A cell: a warm Python process that shut itself off and runs one program after another, each in a fork of its own.

Takes its settings as JSON on the command line and jobs (file descriptors) over the socket that is its descriptor 0;
answers how each ended. Ends when the socket does. Never reads what a program wrote.
"""

import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from contraflow.rewards.sandbox import kernel, room
from contraflow.rewards.sandbox.confine import Limits, confine, own_user
from contraflow.rewards.sandbox.inside import PROGRAM, run_program

MESSAGE = 4096
_DESCRIPTORS = PROGRAM + 1  # stdin, stdout, stderr, result, program

_WARM = """bisect collections copy dataclasses datetime decimal fractions functools heapq inspect io itertools
math operator random re statistics string typing"""  # modules that programs often import


def main() -> None:
    """The whole life of a cell."""
    channel = socket.socket(fileno=os.dup(0))
    settings = json.loads(sys.argv[1])
    limits = Limits(**{name: settings[name] for name in Limits._fields})
    try:
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")  # where memory runs out, this goes first
        base_bytes = _warm_up(settings["packages"], settings["warm"])
        if limits.isolation == "namespaces":
            room.enter(limits.folders)
        else:
            os.chdir("/")
    except (OSError, ImportError) as fault:
        channel.send(json.dumps({"fault": f"{fault}"}).encode()[:MESSAGE])
        return
    channel.send(b"{}")
    user = own_user()
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE, _DESCRIPTORS)
        if not message:
            return
        told, telling = os.pipe()
        child = kernel.fork_into(kernel.NEWNS | kernel.NEWPID) if limits.isolation == "namespaces" else os.fork()
        if child == 0:
            _become(descriptors, telling, limits, user, base_bytes)
        for descriptor in (telling, *descriptors):
            os.close(descriptor)
        with open(told, encoding="utf-8") as reasons:
            refusal = reasons.read()  # until the child closes it: confined, or not to be
        report = _watch(child, json.loads(message)["wall_s"], channel)
        channel.send(json.dumps({**report, "fault": refusal}).encode())


def _warm_up(packages: list[str], source: str) -> int:
    """Import what programs often need, and run our own `source`; gives the address space in bytes."""
    sys.path[:] = [os.path.realpath(entry) for entry in sys.path if os.path.isdir(entry)] + packages
    for name in _WARM.split():
        importlib.import_module(name)
    exec(compile(source, "<warm>", "exec", dont_inherit=True), {})
    gc.collect()
    gc.freeze()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _become(descriptors: list[int], telling: int, limits: Limits, user: int | None, base_bytes: int) -> NoReturn:
    """In the child: take the job's descriptors, give up the rest, run the program.

    A program that can't be confined is not run, and the reason goes through `telling`, which no program ever holds.
    """
    try:
        descriptors = [fcntl.fcntl(one, fcntl.F_DUPFD, 4 * _DESCRIPTORS) for one in (*descriptors, telling)]
        for place, descriptor in enumerate(descriptors):
            os.dup2(descriptor, place)
        os.closerange(_DESCRIPTORS + 1, os.sysconf("SC_OPEN_MAX"))
        os.setsid()
        confine(limits, user=user, base_bytes=base_bytes)
        os.close(_DESCRIPTORS)
    except BaseException as fault:  # noqa: BLE001 - it travels as data
        os.write(_DESCRIPTORS, f"{type(fault).__name__}: {fault}".encode()[: MESSAGE // 4])
        os._exit(1)
    try:
        run_program()
    finally:
        os._exit(1)


def _watch(child: int, wall_s: float, channel: socket.socket) -> dict[str, Any]:
    """Wait for a program's end, or end it: after `wall_s` seconds, or when nobody is left who asked."""
    handle = os.pidfd_open(child)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(channel, select.POLLHUP)  # a hang-up only: nobody asks before this answer
    began = time.monotonic()
    ready = poll.poll(wall_s * 1000)
    late = not any(descriptor == handle for descriptor, _ in ready)
    if late:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    os.close(handle)
    _, status, usage = os.wait4(child, 0)
    return {
        "code": os.waitstatus_to_exitcode(status),
        "late": late,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "wall_s": time.monotonic() - began,
    }
