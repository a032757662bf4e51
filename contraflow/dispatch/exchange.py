"""Exchanges of rows between ranks: the only effect of expert parallelism.

`Links` is a rank's way to others; an `Exchange` is one fixed set of them that swaps rows. `group.py` does it over
torch.distributed, `virtual.py` between threads of one process (the twin that tests and byte counts use).

Shape letters: S rows sent, M rows received, B bytes of a row.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from contraflow.dispatch.domains import Topology, Traffic
from contraflow.errors import DispatchError


class Exchange(Protocol):
    """Some ranks that exchange rows. Collective: every member makes the same calls in the same order.

    Every call carries its number; ranks that are not at the same call are told so instead of mixing their rows.
    """

    @property
    def place(self) -> int:
        """This rank's place among the members."""
        ...

    @property
    def size(self) -> int: ...

    def counts(self, send: Sequence[int]) -> list[int]:
        """Tell each member how many rows it will get; how many this one will get from each. Waits for all."""
        ...

    def begin(self, sent_SB: Tensor, send: Sequence[int], receive: Sequence[int]) -> Callable[[], Tensor]:
        """Send rows (uint8, contiguous, by destination); call the result to wait for the rows `[M, B]`, by source."""
        ...


class Links(Protocol):
    """The ranks of one expert-parallel group as seen by one of them."""

    @property
    def rank(self) -> int: ...

    @property
    def topology(self) -> Topology: ...

    @property
    def traffic(self) -> Traffic:
        """Bytes sent through all exchanges made here."""
        ...

    def exchange(self, members: Sequence[int]) -> Exchange:
        """The exchange of these ranks, of which this is one. Collective over the members."""
        ...

    def gather(self, text: str) -> list[str]:
        """What every rank says, by rank. Collective over all."""
        ...

    def close(self) -> None:
        """Let go of what was opened. Never waits for others."""
        ...


def agree(links: Links, what: Mapping[str, Any]) -> None:
    """Raise DispatchError, showing both values, unless every rank was set up with the same `what`."""
    mine = _text(dict(what))
    for rank, theirs in enumerate(links.gather(mine)):
        if theirs == mine:
            continue
        other = json.loads(theirs)
        keys = sorted(what.keys() | other.keys())
        odd = next(key for key in keys if _text(what.get(key)) != _text(other.get(key)))
        raise DispatchError(
            f"ranks disagree on {odd}: rank {links.rank} has {what.get(odd)!r}, rank {rank} has {other.get(odd)!r}; "
            "start all ranks from the same recipe"
        )


def _text(value: Any) -> str:
    """Equal for equal values, in whatever order their keys came."""
    return json.dumps(value, sort_keys=True)


def check_tags(expected: str, tags: Sequence[str], members: Sequence[int]) -> None:
    """Raise DispatchError unless all members are at the same call, such as "call 3, counts"."""
    for member, tag in zip(members, tags, strict=True):
        if tag != expected:
            raise DispatchError(
                f"rank {member} is at {tag}; this rank is at {expected}: a rank skipped or repeated a layer; "
                "every rank must take part in every exchange, with zero tokens if it has none"
            )
