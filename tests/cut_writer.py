"""A space of cuts, one attempt at a cut from beginning to end, and what is whole: for tests. Imports no torch."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from contraflow.cuts import CutId, CutSpace, open_cuts
from contraflow.errors import CutTaken, CutTorn


def never(_seconds: float) -> bool:
    """A pause that is none: nobody has to leave."""
    return False


def keys() -> dict[str, str]:
    """What a child process needs to reach the store that this one reaches; fork servers remember an older one."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def space_in(folder: Path | str, deadline_s: float = 0.0) -> CutSpace:
    return open_cuts(str(folder), clock=time.monotonic, pause=never, deadline_s=deadline_s)


def attempt(space: CutSpace, name: str, writer: str, *, keep: int = 9) -> None:
    here = CutId(name, writer)
    parts = [space.put(here, part, f"{name} {part} ".encode() * 50) for part in ("model/a", "rank-00000/00000")]
    space.commit(here, parts, {"writer": writer})
    space.tidy(here, keep)


def names_whole(space: CutSpace) -> list[str]:
    """Of the cuts that are seen, those of which every part is there as it was written."""
    whole = []
    for name in space.names():
        try:
            manifest = space.manifest(name)
            for part in manifest.parts:
                assert space.read(manifest, part) == f"{name} {part.name} ".encode() * 50
            whole.append(name)
        except CutTorn:
            continue
    return whole


def claimer(url: str, racer: str) -> Callable[[str], bool]:
    """A racer for lines, which are named by their numbers."""
    space = space_in(url, 5.0)

    def claim(line: str) -> bool:
        try:
            space.lines.claim(int(line), racer)
        except CutTaken:
            return False
        return True

    return claim
