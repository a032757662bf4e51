"""Run a command as an ordinary user, of root's making: `python -m tests.rewards.laptop FOLDER COMMAND...`.

Where the interpreter lies in a folder that only root can read, it is shown to that user in a mount namespace of the
command's own. FOLDER becomes the user's.
"""

import os
import sys
from pathlib import Path

from contraflow.rewards.sandbox import kernel

USER = 63_999


def main() -> None:
    folder, command = sys.argv[1], sys.argv[2:]
    kernel.unshare(kernel.NEWNS)
    kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    prefix = Path(os.path.realpath(sys.base_prefix))
    closed = [place for place in reversed(prefix.parents) if not place.stat().st_mode & 0o001]
    if closed:
        show(prefix, closed[0])
    os.chown(folder, USER, USER)
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    os.execve(command[0], command, {**os.environ, "HOME": folder, "TMPDIR": folder})


def show(prefix: Path, closed: Path) -> None:
    """Replace `closed` by an empty folder that holds nothing but `prefix`."""
    place = os.open(prefix, os.O_PATH)
    kernel.mount("laptop", str(closed), "tmpfs", 0, "size=1m,mode=0755")
    prefix.mkdir(parents=True)
    kernel.mount(f"/proc/self/fd/{place}", str(prefix), "", kernel.MS_BIND | kernel.MS_REC)
    os.close(place)


if __name__ == "__main__":
    main()
