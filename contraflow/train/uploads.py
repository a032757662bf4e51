"""How one trainer rank's part of a cut gets out: copied within a step, written by a thread while training goes on.

Takes snapshots one at a time; gives the parts once they are stored, and (rank 0) commits and exports cuts. Does not
know the model or decide when to save.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from contraflow import config
from contraflow.cuts import CutSpace, Part, open_cuts
from contraflow.errors import CheckpointError
from contraflow.telemetry import Clock
from contraflow.train.checkpoint import Cut, Snapshot, commit, export

T = TypeVar("T")
Pause = Callable[[float], bool]  # waits so many seconds; true when it is time to leave instead


class Uploads:
    """Invariant: at most one snapshot is held, until its cut is committed or the run ends.

    Not `threaded`, everything is done within the call: an inline run then repeats from its seed.
    """

    def __init__(self, train: config.Train, run: Path, writer: str, *, clock: Clock, threaded: bool) -> None:
        self._leaving = threading.Event()
        self.space: CutSpace = open_cuts(
            space_url(train, run), clock=clock, pause=self._leaving.wait, deadline_s=train.checkpoint_deadline_s
        )
        self._writer = writer
        self._keep = train.keep_checkpoints
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload") if threaded else None
        self._cut: Cut | None = None
        self._parts: Future[list[Part]] | None = None

    def check_free(self) -> None:
        """Raise CheckpointError while an earlier cut is on its way: memory holds one snapshot."""
        if self._parts is not None and not self._parts.done():
            assert self._cut is not None, "set with the parts"
            raise CheckpointError(f"cut {self._cut.name} is still being written; await Trainer.saved before the next")

    def begin(self, snapshot: Snapshot) -> None:
        """Start to write a snapshot."""
        self.check_free()
        self._cut = snapshot.cut
        self._parts = self._submit(lambda: snapshot.write(self.space, self._writer))

    async def parts(self) -> list[Part]:
        """Of the snapshot begun last, when all are stored. Raises CheckpointError."""
        if self._parts is None:
            raise CheckpointError("no cut was begun on this rank")
        return await asyncio.wrap_future(self._parts)

    async def commit(self, parts: list[Part], about: dict[str, Any]) -> str:
        """Make the cut begun last visible; see `checkpoint.commit`."""
        cut = self._cut
        if cut is None:
            raise CheckpointError("no cut was begun on this rank")
        made = self._submit(
            lambda: commit(self.space, cut, self._writer, parts, keep=self._keep, about=about),
        )
        return await asyncio.wrap_future(made)

    async def export(self, name: str, folder: Path) -> None:
        """See `checkpoint.export`."""
        await asyncio.wrap_future(self._submit(lambda: export(self.space, name, folder)))

    def close(self) -> None:
        """Give up what is on its way; nothing of it is visible."""
        self._leaving.set()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        if self._thread is not None:
            return self._thread.submit(work)
        done = Future[T]()
        try:
            done.set_result(work())
        except Exception as fault:  # noqa: BLE001 - raised to whoever asks for the result
            done.set_exception(fault)
        return done


def space_url(train: config.Train, run: Path) -> str:
    """Where a run's cuts are."""
    return train.checkpoint_url or str(run / "checkpoints")
