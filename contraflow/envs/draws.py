"""Random numbers as pure functions of names: the same in every process, on every machine and Python version.

A keyed hash (BLAKE2b) stands in for a generator, so task 1,000,000 costs as much as task 0 and nothing is stored.
"""

import hashlib
import struct
from collections.abc import Sequence

_WORDS = 8  # 64-bit words in one digest


def derive_seed(seed: int, *names: str | int) -> int:
    """A seed in [0, 2^63) for the thing called `names` in a run seeded with `seed`."""
    return _first_word(seed, names) >> 1


class Draws:
    """A stream of uniform integers, fixed by (`seed`, `names`).

    Invariant: the i-th word drawn is a function of seed, names and i alone.
    """

    def __init__(self, seed: int, *names: str | int) -> None:
        self._seed = seed
        self._names = names
        self._block = 0
        self._words: list[int] = []

    def word(self) -> int:
        """The next integer in [0, 2^64)."""
        if not self._words:
            self._words = list(struct.unpack(f"<{_WORDS}Q", _digest(self._seed, self._names, self._block)))
            self._block += 1
        return self._words.pop()

    def below(self, bound: int) -> int:
        """An integer in [0, bound), for bounds far below 2^64 (the bias is bound / 2^64)."""
        return self.word() % bound

    def pick(self, weights: Sequence[float]) -> int:
        """An index, with chance in proportion to its weight."""
        point = self.word() / 2**64 * sum(weights)
        for index, weight in enumerate(weights):
            point -= weight
            if point < 0:
                return index
        return max(i for i, w in enumerate(weights) if w > 0)  # rounding at the upper end


def in_test_split(seed: int, question: str, share: float) -> bool:
    """Whether a question belongs to the held-out split: decided by the question itself, so splits cannot overlap."""
    return _first_word(seed, ("split", question)) < share * 2**64


def _first_word(seed: int, names: Sequence[str | int]) -> int:
    return int.from_bytes(_digest(seed, names, 0)[:8], "little")


def _digest(seed: int, names: Sequence[str | int], block: int) -> bytes:
    text = "\x1f".join([str(seed), str(block), *map(str, names)])
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8 * _WORDS).digest()
