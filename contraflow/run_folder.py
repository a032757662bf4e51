"""A run's folder: who may write in it, and how a file there is replaced.

Takes a folder; gives it to one process at a time, cleared of what a killed one left. Does not know what is in it.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from contraflow.errors import RunFolderError


@contextmanager
def locked(folder: Path, *, resume: bool) -> Iterator[None]:
    """Hold the folder's lock inside. Raises: RunFolderError (in use, cannot be written, or not empty for a new run)."""
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a+", encoding="utf-8")
    with lock:
        if not resume and any(entry.name != "lock" for entry in folder.iterdir()):
            raise RunFolderError(
                f"{folder} is not empty; give --folder another name, or --resume to go on with that run"
            )
        _claim(lock, folder)
        yield


def _claim(lock: TextIO, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        raise RunFolderError(
            f"{folder} is in use by the run of process {owner}; stop it, or use another folder"
        ) from None
    with _writing(folder):
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()


def sweep_workers(folder: Path) -> None:
    """Remove what a killed run left behind: whoever holds the lock may."""
    for leftover in folder.glob(".workers-*"):
        shutil.rmtree(leftover)


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises: RunFolderError."""
    part = path.with_suffix(".part")
    with _writing(path):
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        raise RunFolderError(
            f"{path} cannot be written: {fault}; free some space or choose another --folder"
        ) from fault
