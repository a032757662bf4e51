"""A writer killed at every step of the commit protocol: no torn cut is seen, and the older one loads."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contraflow.blobs import Blobs, open_blobs
from contraflow.cuts import CutId, CutSpace
from contraflow.cuts.patience import Patience
from tests.cut_writer import attempt, keys, names_whole, never, space_in
from tests.processes import forking

# Two parts, a look at the lines, the syncing of the parts, the manifest and its; then, after a look, the older cut's
# manifest emptied and synced and its parts deleted; then, after two looks, a fence for what was abandoned, and its
# parts deleted.
CALLS = 14
WHEN = ("before", "half way", "after")


class Deadly:
    """Blobs whose process is killed at its `fatal`-th call, before it, after it, or with half a file written."""

    def __init__(self, blobs: Blobs, fatal: int, when: str) -> None:
        self._blobs, self._left, self._when = blobs, fatal, when
        self.url = blobs.url

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*given: Any, **keys: Any) -> Any:
            self._left -= 1
            if self._left == 0 and self._when != "after":
                if self._when == "half way":
                    self._half(name, *given)
                os.kill(os.getpid(), signal.SIGKILL)
            found = getattr(self._blobs, name)(*given, **keys)
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return call

    def _half(self, name: str, *given: Any) -> None:
        """A folder's writes are staged beside their place, under a name with a number, and then moved there; what is
        cleared goes file by file."""
        if "://" in self.url:
            return
        root = Path(self.url)
        if name == "put":
            staged = root / f"{given[0]}#1"
            staged.parent.mkdir(parents=True, exist_ok=True)
            staged.write_bytes(given[1][: len(given[1]) // 2])
        if name == "clear":
            for path in sorted(path for path in (root / given[0]).rglob("*") if path.is_file())[::2]:
                path.unlink()


def _write(url: str, fatal: int, when: str, aws: dict[str, str]) -> None:
    os.environ.update(aws)
    space = CutSpace(Deadly(open_blobs(url), fatal, when), Patience(0.0, lambda: 0.0, never))  # type: ignore[arg-type]
    attempt(space, "line-1-step-2", "killed", keep=1)


def prepare(url: str) -> None:
    """An older cut to fall back to, and an abandoned attempt of an older line to sweep."""
    space = space_in(url, 5.0)
    space.put(CutId("line-0-step-9", "gone"), "rank-00000/00000", b"left behind")
    attempt(space, "line-1-step-1", "w")
    space.put(CutId("line-0-step-10", "gone"), "rank-00000/00000", b"left behind")


def crash(url: str, fatal: int, when: str) -> bool:
    """Kill a writer at its `fatal`-th call, look, and have the next one go on; whether it lived to the end."""
    prepare(url)
    process = forking().Process(target=_write, args=(url, fatal, when, keys()))
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    space = space_in(url, 5.0)
    names = space.names()
    assert names
    assert names == names_whole(space)
    newest = space.newest()
    assert newest.refused == ()
    assert newest.manifest is not None
    assert newest.manifest.id.name == names[0]
    assert names[0] == ("line-1-step-2" if "line-1-step-2" in names else "line-1-step-1")
    attempt(space, "line-2-step-2", "next", keep=1)
    assert space.names() == names_whole(space) == ["line-2-step-2"]
    assert {key.split("/")[1] for key in open_blobs(url).list("parts")} == {"line-2-step-2"}
    return process.exitcode == 0


@pytest.mark.parametrize("when", WHEN)
def test_killed_at_any_step_a_writer_in_a_folder_leaves_no_torn_cut(tmp_path: Path, when: str) -> None:
    for fatal in range(1, 100):
        folder = tmp_path / str(fatal)
        if crash(str(folder), fatal, when):
            break
        assert not [path for path in (folder / "parts").rglob("*#*") if path.is_file()]
    assert fatal == CALLS + 1


@pytest.mark.s3
@pytest.mark.timeout(300)
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_any_step_a_writer_on_s3_leaves_no_torn_cut(bucket: str, when: str) -> None:
    for fatal in range(1, 100):
        if crash(f"{bucket}/{when}-{fatal}", fatal, when):
            break
    assert fatal > CALLS  # more, since this store still names folders that are empty: they are looked at again
