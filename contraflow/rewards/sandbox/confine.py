"""What a program's process gives up before the program's first line: rights, resources, files. For good.

Takes limits; changes the calling process. Every step that fails raises, and then the program is not run.
"""

import os
import platform
import resource
from typing import NamedTuple

from contraflow.rewards.sandbox import kernel, landlock, room, seccomp

_FIRST_OWN_USER, _OWN_USERS = 64_000, 1_000  # ids that no account has; each cell takes one
_FILES = 64  # that a program can have open
_SCRATCH_FILES = 256


class Limits(NamedTuple):
    """Of one program. Memory is the address space it may add to the warm interpreter's."""

    isolation: str  # "namespaces" or "filters"
    folders: tuple[str, ...]
    cpu_s: int
    memory_mb: int
    file_kb: int  # each file it writes, what it prints included
    threads: int


def own_user() -> int | None:
    """The user id that programs of this cell get where the cell runs as root; None where it has no rights to lose."""
    return None if os.geteuid() else _FIRST_OWN_USER + os.getpid() % _OWN_USERS


def confine(limits: Limits, *, user: int | None, base_bytes: int) -> None:
    """Give everything up. `base_bytes`: address space of the interpreter as it is."""
    os.umask(0o077)
    if limits.isolation == "namespaces":
        _mount_scratch(limits, user)
    _limit(limits, base_bytes, counted=user is not None or limits.isolation == "namespaces")
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    kernel.drop_capabilities()
    kernel.process_control(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.process_control(kernel.PR_SET_PDEATHSIG, 9)
    if limits.isolation == "filters":
        landlock.allow_reading(limits.folders)
    kernel.install_filter(seccomp.make_filter(platform.machine(), os.getpid()))


def _mount_scratch(limits: Limits, user: int | None) -> None:
    owner = os.geteuid() if user is None else user
    group = os.getegid() if user is None else user
    options = f"size={4 * limits.file_kb}k,nr_inodes={_SCRATCH_FILES},mode=0700,uid={owner},gid={group}"
    kernel.mount("scratch", room.SCRATCH, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC, options)
    os.chdir(room.SCRATCH)


def _limit(limits: Limits, base_bytes: int, *, counted: bool) -> None:
    """`counted`: the kernel counts threads of this cell only, and not all that the user runs."""
    wanted = {
        resource.RLIMIT_AS: base_bytes + (limits.memory_mb << 20),
        resource.RLIMIT_CPU: limits.cpu_s,
        resource.RLIMIT_FSIZE: limits.file_kb << 10,
        resource.RLIMIT_NOFILE: _FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if counted:
        wanted[resource.RLIMIT_NPROC] = limits.threads
    for which, value in wanted.items():
        hard = resource.getrlimit(which)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (most, most))
