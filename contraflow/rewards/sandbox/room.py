"""A view of the system that holds nothing: namespaces of its own, and a root of read-only folders that were named.

Takes folders; changes the calling process, which keeps the rights over its namespaces. As root or, where the kernel
allows user namespaces, as anybody. After bubblewrap's order of steps: two changes of root, the old one let go.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from contraflow.rewards.sandbox import kernel

SCRATCH = "/scratch"  # the one place a program can write to: a file system of its own, made for each
_BASE = "/tmp"  # any folder that exists will do to mount upon
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_DEVICES = ("null", "zero", "urandom")
_LOCKED = kernel.ATTR_RDONLY | kernel.ATTR_NOSUID


def enter(folders: Sequence[str]) -> None:
    """Leave the host's files, network, names and IPC behind. Raises: OSError naming the step that is not allowed."""
    user, group = os.geteuid(), os.getegid()
    flags = kernel.NEWNS | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS | kernel.NEWCGROUP
    kernel.unshare(flags if user == 0 else flags | kernel.NEWUSER)
    if user:
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("room", _BASE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=0755")
    os.mkdir(f"{_BASE}/old")
    os.mkdir(f"{_BASE}/new")
    kernel.pivot_root(_BASE, f"{_BASE}/old")
    os.chdir("/")
    _furnish(folders)
    kernel.pivot_root("/new", "/new/old")
    os.chdir("/")
    kernel.detach("/old")
    os.rmdir("/old")
    kernel.restrict_mount("/", _LOCKED | kernel.ATTR_NODEV, recursive=False)


def seen(folders: Sequence[str]) -> tuple[str, ...]:
    """The folders that exist, with the system's libraries, by their real paths; none lies in another."""
    real = sorted({os.path.realpath(folder) for folder in (*_LIBRARIES, *folders) if os.path.isdir(folder)})
    return tuple(one for one in real if not any(one.startswith(f"{other}/") for other in real))


def _furnish(folders: Sequence[str]) -> None:
    """Fill /new from /old."""
    kernel.mount("/new", "/new", "", kernel.MS_BIND)  # a root must be a mount point
    for name in ("old", "dev", SCRATCH[1:]):
        os.mkdir(f"/new/{name}")
    for folder in folders:
        os.makedirs(f"/new{folder}", exist_ok=True)
        kernel.mount(f"/old{folder}", f"/new{folder}", "", kernel.MS_BIND | kernel.MS_REC)
        kernel.restrict_mount(f"/new{folder}", _LOCKED | kernel.ATTR_NODEV, recursive=True)
    for name in _DEVICES:
        Path(f"/new/dev/{name}").touch()
        kernel.mount(f"/old/dev/{name}", f"/new/dev/{name}", "", kernel.MS_BIND)
        kernel.restrict_mount(f"/new/dev/{name}", _LOCKED, recursive=False)
    for link in _LIBRARIES:
        if os.path.islink(f"/old{link}"):
            os.symlink(os.readlink(f"/old{link}"), f"/new{link}")
