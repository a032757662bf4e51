"""Linux calls that Python's standard library lacks, each raising OSError with what was tried.

Takes plain values; gives what the kernel gave. Decides nothing.
"""

import ctypes
import os

from contraflow.rewards.sandbox.syscalls import number

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER, _AT_FDCWD, _AT_RECURSIVE, _MNT_DETACH, _SIGCHLD = 2, -100, 0x8000, 2, 17
_CAPABILITIES_V3 = 0x20080522

_libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL keeps the interpreter lock, which `clone` needs


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def system(name: str, *args: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """One system call by name."""
    plain = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    return _checked(_libc.syscall(ctypes.c_long(number(name)), *plain), name)


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), f"unshare({flags:#x})")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    args = [text.encode() for text in (source, target, kind)]
    _checked(_libc.mount(*args, ctypes.c_ulong(flags), options.encode()), f"mount of {source or kind} at {target}")


def restrict_mount(target: str, attributes: int, *, recursive: bool) -> None:
    """Add attributes, such as read-only, to a mount. Needs Linux 5.12."""
    settings = ctypes.create_string_buffer(attributes.to_bytes(8, "little") + bytes(24), 32)
    flags = _AT_RECURSIVE if recursive else 0
    system("mount_setattr", _AT_FDCWD, target.encode(), flags, settings, 32)


def pivot_root(new: str, old: str) -> None:
    system("pivot_root", new.encode(), old.encode())


def detach(target: str) -> None:
    _checked(_libc.umount2(target.encode(), _MNT_DETACH), f"umount of {target}")


def process_control(option: int, value: int) -> None:
    args = [ctypes.c_ulong(arg) for arg in (value, 0, 0, 0)]
    _checked(_libc.prctl(option, *args), f"prctl({option})")


def drop_capabilities() -> None:
    header = ctypes.create_string_buffer(_CAPABILITIES_V3.to_bytes(4, "little") + bytes(4), 8)
    system("capset", header, bytes(24))


def install_filter(program: bytes) -> None:
    """Put this thread, and all it starts, under a seccomp filter of 8-byte instructions, for good."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    filled = Program(len(program) // 8, program)
    result = _libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(filled), 0, 0)
    _checked(result, "seccomp filter")


def fork_into(flags: int) -> int:
    """As `os.fork`, with the child in new namespaces. Of a process with one thread only."""
    ctypes.pythonapi.PyOS_BeforeFork()
    child = -1
    try:
        child = system("clone", flags | _SIGCHLD, 0, 0, 0, 0)
    finally:
        if child == 0:
            ctypes.pythonapi.PyOS_AfterFork_Child()
        else:
            ctypes.pythonapi.PyOS_AfterFork_Parent()
    return child
