"""Where a start of a run begins: the line that it claims where cuts are kept, and the cut that it goes on from.

Takes a run's folder and where its cuts are; gives a `Beginning`. The claim comes first: from then on an older start of
the same run, wherever it lives, commits no cut. Starts nothing.
"""

import threading
from pathlib import Path

import msgspec

from contraflow.buffer.ledger import FILE
from contraflow.buffer.riding import position
from contraflow.config import Train
from contraflow.cuts import CutManifest, Newest, open_cuts
from contraflow.errors import BlobError, CheckpointError, RunFolderError
from contraflow.telemetry import Clock
from contraflow.train.checkpoint import Cut, cut_of
from contraflow.train.uploads import space_url

ANSWER_S = 60.0  # deadline of each call to the store, before anything is started


class Beginning(msgspec.Struct, frozen=True, kw_only=True):
    """`cut` is None where there is no whole one, or the run is new."""

    writer: str  # of cuts, this start's own
    line: int
    run_id: int  # for a ledger that is made now
    step: int = 0
    event: int = 0  # of the ledger, the last that the cut has
    cut: Cut | None = None
    note: str = ""  # what a person should know

    def ledger(self, *, resume: bool, exact: bool) -> dict[str, int | None]:
        """Where the buffer's line begins: see `Buffer`. `exact`: what came after the cut is undone."""
        return {
            "resume_step": self.step if resume else None,
            "least_line": self.line,
            "run_id": self.run_id,
            "back_to": self.event if exact else None,
        }


def begin(train: Train, folder: Path, *, resume: bool, writer: str, clock: Clock) -> Beginning:
    """Claim a line for `writer` (hex digits), then find the newest whole cut if the run is to be resumed.

    Raises RunFolderError when the ledger in `folder` is of another run than the cut, CutTaken when another start was
    faster, CheckpointError when the store does not answer, LedgerError.
    """
    pause, deadline_s = threading.Event().wait, min(train.checkpoint_deadline_s, ANSWER_S)
    space = open_cuts(space_url(train, folder), clock=clock, pause=pause, deadline_s=deadline_s)
    stands = position(folder) if resume and (folder / FILE).exists() else None
    run_id = int(writer, 16) % 2**31
    try:
        line = 0 if not resume else max(space.lines.newest(), -1 if stands is None else stands["line"]) + 1
        space.lines.claim(line, writer)
        if not resume:
            return Beginning(writer=writer, line=line, run_id=run_id)
        found = space.newest()
    except BlobError as fault:
        raise CheckpointError(f"{space.url}, where cuts are kept, does not answer: {fault}") from fault
    if found.manifest is not None and stands is not None:
        _check_ledger(folder, stands["run"], found.manifest, space.url)
    cut = None if found.manifest is None else cut_of(found.manifest)
    step = 0 if cut is None else cut.step
    stood = {} if found.manifest is None else found.manifest.about.get("ledger", {})
    return Beginning(
        writer=writer,
        line=line,
        run_id=run_id,
        step=step,
        event=stood.get("event", 0),
        cut=cut,
        note=_resumed(found, step),
    )


def _check_ledger(folder: Path, run_id: int, manifest: CutManifest, url: str) -> None:
    written = manifest.about.get("ledger")
    owner = written.get("run") if isinstance(written, dict) else None
    if owner and owner != run_id:
        raise RunFolderError(
            f"{folder / FILE} is the ledger of run {run_id:08x}, but cut {manifest.id.name} in {url} is of run"
            f" {owner:08x}: put the run's own ledger back, or bring the cut back with its ledger: contraflow resume"
            f" {url} --folder NEW"
        )


def _resumed(found: Newest, first_step: int) -> str:
    at = "the beginning: there is no whole cut" if found.manifest is None else f"cut {found.manifest.id.name}"
    return "; ".join([f"resumed at step {first_step}, from {at}", *(f"passed over: {why}" for why in found.refused)])
