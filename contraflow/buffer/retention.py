"""Which segments still hold a payload that a restart may ask for.

Takes the events of the ledger and the cuts, gives the files that may go. Pure: it removes nothing itself.
A payload is settled once its attempt was given up, its group dropped, or a committed cut contains the step that trained
it; one that was handed back once the next attempt has started. A file goes as a whole, when all in it is settled.
Where a restart goes back to what was at the last cut, what is settled stays until there is a newer cut.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

from contraflow.buffer.ledger import Event, Kind
from contraflow.buffer.salvage import Kept


class Retention:
    """Invariant: `_unsettled[s]` counts the groups of `_where` and `_lately` in file s; files of `files` with none may
    go."""

    def __init__(self, files: Iterable[str], kept: Iterable[Kept], *, until_cut: bool = False) -> None:
        """`files` are there, and of what they hold only `kept` is not settled. `until_cut`: a restart goes back to what
        was at the last cut."""
        self.files = set(files)
        self._where: dict[int, str] = {}
        self._unsettled: Counter[str] = Counter()
        self._until_cut = until_cut
        self._lately: dict[int, list[str]] = {}  # by group: files of what was settled since the last cut
        self._trained: defaultdict[int, list[int]] = defaultdict(list)  # by step, in no cut yet
        for each in kept:
            self._hold(each.group, each.place.segment)

    def note(self, event: Event) -> None:
        """What an event says about its group's payload."""
        if event.kind == Kind.READY and event.place is not None:
            self._hold(event.group, event.place.segment)
        elif event.again is not None:
            self._hold_again(event.group)
        elif event.kind in (Kind.WAITING, Kind.DROPPED, Kind.STARTED):
            self._settle(event.group)
            if event.place is not None:
                self._hold(event.group, event.place.segment)
        elif event.kind == Kind.TRAINED and event.step is not None:
            self._trained[event.step].append(event.group)

    def cut(self, step: int) -> None:
        """A cut contains the steps below `step`."""
        for done in [done for done in self._trained if done < step]:
            for group in self._trained.pop(done):
                self._settle(group)
        for segments in self._lately.values():
            self._unsettled.subtract(segments)
        self._lately.clear()

    def spent(self, writing: str) -> set[str]:
        """Files that may go; the one that is written to stays."""
        return {name for name in self.files if not self._unsettled[name] and name != writing}

    def gone(self, files: set[str]) -> None:
        self.files -= files

    def _hold(self, group: int, segment: str) -> None:
        self.files.add(segment)
        self._where[group] = segment
        self._unsettled[segment] += 1

    def _hold_again(self, group: int) -> None:
        """What is there of it is to be gone on with after all."""
        if group not in self._where and self._lately.get(group):
            self._where[group] = self._lately[group].pop()

    def _settle(self, group: int) -> None:
        segment = self._where.pop(group, None)
        if segment is None:
            return
        if self._until_cut:
            self._lately.setdefault(group, []).append(segment)
        else:
            self._unsettled[segment] -= 1
