"""Which ranks share a domain (NVLink, one node), and how many bytes went inside and across domains.

Takes an environment or a size, gives a `Topology`. Does not send anything.
"""

import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from contraflow.errors import DispatchError

DOMAIN_VARIABLE = "CONTRAFLOW_DOMAIN"  # names this process's domain where a host is not one, such as a NVL72 rack


@dataclass(frozen=True)
class Topology:
    """`domains[r]` is the domain of rank r, numbered from 0 in order of their first rank."""

    domains: tuple[int, ...]

    @classmethod
    def even(cls, ranks: int, domain_ranks: int) -> "Topology":
        """`domain_ranks` neighbouring ranks to a domain. Raises DispatchError when they do not divide the ranks."""
        if domain_ranks < 1 or ranks % domain_ranks:
            raise DispatchError(f"domains of {domain_ranks} ranks do not divide {ranks} ranks evenly")
        return cls(tuple(rank // domain_ranks for rank in range(ranks)))

    @classmethod
    def named(cls, names: Sequence[str]) -> "Topology":
        """From the name of each rank's domain: equal names share one, in whatever order the ranks lie."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(tuple(numbers[name] for name in names))

    @property
    def ranks(self) -> int:
        return len(self.domains)

    @property
    def count(self) -> int:
        """Number of domains."""
        return len(set(self.domains))

    @property
    def even_sized(self) -> bool:
        """Whether every domain has as many ranks: what forwarding through partners needs."""
        return len(set(Counter(self.domains).values())) == 1

    def members(self, domain: int) -> tuple[int, ...]:
        """Ranks of a domain, in order."""
        return tuple(rank for rank, its in enumerate(self.domains) if its == domain)

    def grid(self) -> tuple[tuple[int, ...], ...]:
        """Ranks by domain and place in it. Raises DispatchError when domains differ in size: rails need partners."""
        rows = tuple(self.members(domain) for domain in range(self.count))
        if len({len(row) for row in rows}) > 1:
            raise DispatchError(
                f"domains hold {[len(row) for row in rows]} ranks: forwarding through partners needs domains of one "
                "size; use all_to_all, or place the ranks evenly"
            )
        return rows


def domain_name(environment: Mapping[str, str] = os.environ) -> str:
    """The name of this process's domain: what the environment says, or the host."""
    return environment.get(DOMAIN_VARIABLE) or socket.gethostname()


@dataclass
class Traffic:
    """Bytes this rank sent, by the domain they went to. What a rank keeps for itself is not sent.

    `control` are counts and agreements, apart from the rows: they do not grow with the tokens.
    """

    inside: int = 0
    across: int = 0
    control: int = 0

    def add(self, *, same_domain: bool, nbytes: int) -> None:
        if same_domain:
            self.inside += nbytes
        else:
            self.across += nbytes

    def take(self) -> "Traffic":
        """What was counted since the last call."""
        taken = Traffic(self.inside, self.across, self.control)
        self.inside = self.across = self.control = 0
        return taken
