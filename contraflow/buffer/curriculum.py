"""Solve rates by kind of task, as they are measured, and which groups they leave out.

Takes scored groups and the kind of a task about to be sampled; gives what to record, and yes or no. The policy is
algo/curriculum.py. Does not drop anything, or write the record: rates ride with the events of their groups.
"""

from collections import deque
from collections.abc import Iterable

from contraflow import config
from contraflow.algo.curriculum import Band, draw
from contraflow.buffer.ledger import Solved
from contraflow.types import Episode, Group


class Curriculum:
    """The last `look` rates of each kind.

    Invariant: a function of the section and of the sequence of rates told, so a restart that reads them decides alike.
    """

    def __init__(self, section: config.Curriculum, known: Iterable[Solved] = ()) -> None:
        self._section = section
        self._band = Band(low=section.low, high=section.high, keep=section.keep, least=section.least)
        self._rates: dict[str, deque[float]] = {}
        for each in known:
            self._tell(each)

    def wants(self, group: int, kind: str) -> bool:
        """Whether this group of this kind is to be sampled."""
        return draw(self._section.seed, group) < self._band.share(self._rates.get(kind, ()))

    def measure(self, group: Group) -> Solved | None:
        """Count a scored group, with signal or without; what to record of it, None where its task names no kind."""
        kind = group.task.facts.get(self._section.by)
        whole = [_score(episode) for episode in group.episodes if not episode.failed]
        if kind is None or not whole:
            return None
        solved = Solved(kind=kind, rate=sum(whole) / len(whole))
        self._tell(solved)
        return solved

    def rates(self) -> dict[str, float]:
        """The mean rate of each kind, by name."""
        return {kind: sum(rates) / len(rates) for kind, rates in sorted(self._rates.items())}

    def _tell(self, solved: Solved) -> None:
        self._rates.setdefault(solved.kind, deque(maxlen=self._section.look)).append(solved.rate)


def _score(episode: Episode) -> float:
    return episode.parts.get("correct", episode.reward)
