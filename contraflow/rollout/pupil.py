"""Stands in for a model behind the scripted engine: knows the answer, and says it more often the more it was trained.

Lets the whole loop run, and its reward rise, without a model. What it says is fixed by the request and the version.
"""

import math
from collections.abc import Callable, Sequence

from contraflow.envs.draws import Draws
from contraflow.types import Request, Version


class Pupil:
    """Answers requests of the groups it was told about. Invariant: `_references` holds the groups being played."""

    def __init__(self, version: Callable[[], Version | None], *, eos: int, letters: Sequence[int]) -> None:
        """`letters`: token ids that mistakes are made of, at least two."""
        self._version = version
        self._eos = eos
        self._letters = letters
        self._references: dict[str, list[int]] = {}

    def learn(self, group: str, reference: Sequence[int]) -> None:
        """Requests of `group` are to be answered with these tokens, or nearly."""
        self._references[group] = list(reference)

    def forget(self, group: str) -> None:
        """No more requests of `group` will come."""
        self._references.pop(group, None)

    def __call__(self, request: Request) -> list[int]:
        """The reference with chance `skill(n)`, otherwise the reference with one token changed; then the end token."""
        version = self._version()
        draws = Draws(request.seed, "pupil")
        answer = list(self._references[request.group])
        right = draws.below(1000) < 1000 * skill(version.n if version else 0)
        if not right:
            place = draws.below(len(answer)) if answer else 0
            others = [letter for letter in self._letters if letter not in answer[place : place + 1]]
            answer[place : place + 1] = [others[draws.below(len(others))]]
        return [*answer, self._eos]


def skill(n: int) -> float:
    """Chance of a right answer after n published steps: 0.25 at first, half of the way to 1 every 8 steps."""
    return 1 - 0.75 * math.exp2(-n / 8)
