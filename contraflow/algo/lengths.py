"""How long the answers were that got trained, beside all that were begun: what a deadline or a drop does to lengths.

Takes lengths of episodes in sampled tokens; gives counts by power of two, and the ratio of the means. Plain numbers.
"""

from collections.abc import Iterable


class Lengths:
    """Invariant: `counts[i]` episodes had a length of i binary digits: 0, 1, 2 to 3, 4 to 7, ..."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.episodes = self.tokens = 0

    def add(self, lengths: Iterable[int]) -> None:
        for length in lengths:
            place = length.bit_length()
            self.counts += [0] * (place + 1 - len(self.counts))
            self.counts[place] += 1
            self.episodes += 1
            self.tokens += length

    @property
    def mean(self) -> float:
        """Tokens an episode; 0 of none."""
        return self.tokens / self.episodes if self.episodes else 0.0


def length_record(posed: Lengths, trained: Lengths, cut: int) -> dict[str, object]:
    """Both distributions as plain numbers, and `bias`: mean length trained over mean length posed; 1 is fair.

    `cut` episodes were not finished by their deadline: longer than they got, and in neither.
    """
    bias = trained.mean / posed.mean if posed.mean else 1.0
    return {"posed": posed.counts, "trained": trained.counts, "cut": cut, "bias": round(bias, 4)}


def bin_name(place: int) -> str:
    """What lengths of so many binary digits are: `4 to 7`."""
    low, high = (1 << place) >> 1, max(0, (1 << place) - 1)
    return str(low) if low == high else f"{low} to {high}"
