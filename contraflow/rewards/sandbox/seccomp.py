"""The filter of system calls, as the kernel's classic BPF: what is not allowed fails with EPERM.

Takes a machine and a process id; gives bytes. A list of what is allowed, so a call that a later kernel adds is refused.
"""

import struct
from collections.abc import Iterator

from contraflow.rewards.sandbox.syscalls import allowed, judged

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ALLOW, _EPERM, _ENOSYS = 0x80000000, 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in seccomp_data
_X32 = 0x40000000  # numbers from here on are x86-64's second interface, which nobody needs
_CLONE_THREAD = 0x10000
_FCNTL = (0, 1, 2, 3, 4, 1030, 1032)  # dup, flags, pipe size; no owners, signals, leases
_IOCTL = (0x5401, 0x541B, 0x5450, 0x5451)  # is it a terminal, bytes to read, close on exec

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def make_filter(machine: str, process: int) -> bytes:
    """The filter for a program whose process id, as it sees it itself, is `process`."""
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in _program(machine, process))


def _program(machine: str, process: int) -> Iterator[Instruction]:
    yield _LOAD, 0, 0, _ARCHITECTURE
    yield _EQUAL, 1, 0, _ARCHITECTURES[machine]
    yield _RETURN, 0, 0, _KILL
    yield _LOAD, 0, 0, _NUMBER
    yield _AT_LEAST, 0, 1, _X32
    yield _RETURN, 0, 0, _KILL
    for number in allowed(machine).values():
        yield _EQUAL, 0, 1, number
        yield _RETURN, 0, 0, _ALLOW
    numbers = judged(machine)
    yield _EQUAL, 0, 1, numbers["clone3"]  # its flags lie in memory, out of a filter's sight; libc falls back to clone
    yield _RETURN, 0, 0, _ENOSYS
    yield from _when(numbers["clone"], 0, (_ANY_BIT, (_CLONE_THREAD,)))  # threads, no processes
    yield from _when(numbers["ioctl"], 1, (_EQUAL, _IOCTL))
    yield from _when(numbers["fcntl"], 1, (_EQUAL, _FCNTL))
    yield from _when(numbers["prlimit64"], 0, (_EQUAL, (0,)))  # its own limits, which it can only lower
    yield from _when(numbers["tgkill"], 0, (_EQUAL, (process,)))  # a signal to itself, as abort() sends
    yield _RETURN, 0, 0, _EPERM


def _when(number: int, argument: int, test: tuple[int, tuple[int, ...]]) -> Iterator[Instruction]:
    """Allow a call if the low word of one argument passes a test with any of the constants; refuse it otherwise."""
    code, constants = test
    yield _EQUAL, 0, 2 * len(constants) + 2, number
    yield _LOAD, 0, 0, _ARGUMENTS + 8 * argument
    for constant in constants:
        yield code, 0, 1, constant
        yield _RETURN, 0, 0, _ALLOW
    yield _RETURN, 0, 0, _EPERM
