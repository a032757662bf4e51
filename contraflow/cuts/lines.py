"""Who may write cuts into a place: the start of a run that claimed the newest line there, and nobody else.

Takes blobs; keeps one small blob a line, `lines/N`, which holds who claimed it and is put *if there is none*. So of two
starts of one run, in whatever folders, one gets a line; and who holds an older line is told so before it commits.
"""

from contraflow.blobs import Blobs
from contraflow.cuts.patience import Patience
from contraflow.errors import BlobExists, CutTaken


class Lines:
    """Invariant: a line belongs to the writer that claimed it first, for good."""

    def __init__(self, blobs: Blobs, patience: Patience) -> None:
        self._blobs, self._patience = blobs, patience

    def newest(self) -> int:
        """The newest line that was claimed here; -1 when none was."""
        keys = self._patience.keep_on(lambda: self._blobs.list("lines"))
        numbers = (key.rpartition("/")[2] for key in keys)
        return max((int(number) for number in numbers if number.isdigit()), default=-1)

    def claim(self, line: int, writer: str) -> None:
        """Take a line. Raises CutTaken when another has it; BlobError, and then it may be taken or not."""
        key = f"lines/{line}"
        try:
            self._patience.keep_on(lambda: self._blobs.put(key, writer.encode(), create=True))
        except BlobExists:  # ours, if an answer was lost
            owner = self._patience.keep_on(lambda: self._blobs.get(key)).decode(errors="replace")
            if owner != writer:
                raise CutTaken(
                    f"line {line} in {self._blobs.url} was begun by writer {owner}: another run has its cuts there, or"
                    " another start of this one was faster; stop that one, or give this run a train.checkpoint_url of"
                    " its own"
                ) from None
        self._patience.keep_on(lambda: self._blobs.sync([key]))

    def check(self, line: int) -> None:
        """Raise CutTaken unless `line` is the newest, or none was claimed here."""
        newest = self.newest()
        if newest > line:
            owner = self._patience.keep_on(lambda: self._blobs.get(f"lines/{newest}")).decode(errors="replace")
            raise CutTaken(
                f"line {newest} in {self._blobs.url} was begun by writer {owner} after line {line}: that run goes on"
                " from an earlier cut, stop this one"
            )
