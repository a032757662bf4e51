"""Which tasks are worth sampling, by how often their kind was solved of late: a share per kind, and a draw per group.

Takes measured solve rates and a band; gives how many of a kind's groups to sample, and yes or no for one of them. Pure.
A group whose answers all earn the same teaches nothing where they are compared (DAPO, arXiv 2503.14476, section 3.2);
it is likeliest far from the middle. Leaving tasks out changes what is trained: the mean over kinds becomes another.
"""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Band:
    """Kinds whose mean rate is in [`low`, `high`] are sampled whole, others to a share of `keep`.

    A kind of fewer than `least` measured groups is sampled whole.
    """

    low: float
    high: float
    keep: float
    least: int

    def share(self, rates: Collection[float]) -> float:
        """The share of a kind's groups to sample, from the solve rates of its last ones; `keep` or 1."""
        if len(rates) < self.least:
            return 1.0
        return 1.0 if self.low <= sum(rates) / len(rates) <= self.high else self.keep


def draw(seed: int, group: int) -> float:
    """A number in [0, 1), uniform over groups, a function of its arguments alone: a group goes in if share > draw."""
    digest = hashlib.blake2b(f"curriculum/{seed}/{group}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2.0**53
