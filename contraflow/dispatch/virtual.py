"""Ranks that are threads of one process: the twin of `group.py`, for tests, byte counts and planning.

Takes a topology, gives the links of each rank. Rows change hands at a barrier; a rank that raises or ends breaks it, so
that nobody waits in vain. Nothing is fast here.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from contraflow.dispatch.domains import Topology, Traffic
from contraflow.dispatch.exchange import check_tags
from contraflow.errors import DeadlineExceeded

T = TypeVar("T")


class VirtualWorld:
    """All ranks. Invariant: between two passes of a barrier, each slot is written by one rank."""

    def __init__(self, topology: Topology, *, deadline_s: float = 20.0) -> None:
        self.topology = topology
        self.deadline_s = deadline_s
        self._meetings: dict[tuple[int, ...], _Meeting] = {}
        self._lock = threading.Lock()

    def run(self, work: Callable[["VirtualLinks"], T]) -> list[T]:
        """Run `work` on every rank at once; results by rank. Raises what the first rank to fail raised."""
        failures: list[BaseException] = []

        def one(rank: int) -> T:
            try:
                return work(VirtualLinks(self, rank))
            except BaseException as fault:
                failures.append(fault)
                self._abort()
                raise

        with ThreadPoolExecutor(self.topology.ranks) as threads:
            runs = [threads.submit(one, rank) for rank in range(self.topology.ranks)]
        if failures:
            raise next((f for f in failures if not isinstance(f, DeadlineExceeded)), failures[0])
        return [run.result() for run in runs]

    def meeting(self, members: tuple[int, ...]) -> "_Meeting":
        with self._lock:
            return self._meetings.setdefault(members, _Meeting(members, self.deadline_s))

    def _abort(self) -> None:
        with self._lock:
            for meeting in self._meetings.values():
                meeting.barrier.abort()


class VirtualLinks:
    """See `Links`."""

    def __init__(self, world: VirtualWorld, rank: int) -> None:
        self.rank = rank
        self.topology = world.topology
        self.traffic = Traffic()
        self._world = world

    def exchange(self, members: Sequence[int]) -> "VirtualExchange":
        """See `Links.exchange`."""
        return VirtualExchange(self._world.meeting(tuple(members)), self)

    def gather(self, text: str) -> list[str]:
        """See `Links.gather`."""
        everybody = self._world.meeting(tuple(range(self.topology.ranks)))
        return list(everybody.swap(self.rank, [text] * self.topology.ranks))

    def close(self) -> None:
        """See `Links.close`."""


class _Meeting:
    def __init__(self, members: tuple[int, ...], deadline_s: float) -> None:
        self.members = members
        self.barrier = threading.Barrier(len(members))
        self._deadline_s = deadline_s
        self._slots: list[Sequence[Any]] = [()] * len(members)

    def swap(self, place: int, gifts: Sequence[Any]) -> list[Any]:
        """Give `gifts[m]` to member m; what all gave to this one."""
        self._slots[place] = gifts
        self._wait(place)
        got = [gifts_of[place] for gifts_of in self._slots]
        self._wait(place)
        return got

    def _wait(self, place: int) -> None:
        try:
            self.barrier.wait(self._deadline_s)
        except threading.BrokenBarrierError:
            raise DeadlineExceeded(
                f"rank {self.members[place]}", f"ranks {list(self.members)} to meet; one failed or is missing",
                self._deadline_s,
            ) from None  # fmt: skip


class VirtualExchange:
    """See `Exchange`."""

    def __init__(self, meeting: _Meeting, links: VirtualLinks) -> None:
        self.place = meeting.members.index(links.rank)
        self.size = len(meeting.members)
        self._meeting = meeting
        self._links = links
        self._calls = 0

    def counts(self, send: Sequence[int]) -> list[int]:
        """See `Exchange.counts`."""
        self._calls += 1
        self._links.traffic.control += 16 * (self.size - 1)
        return self._swap("counts", send)

    def begin(self, sent_SB: Tensor, send: Sequence[int], receive: Sequence[int]) -> Callable[[], Tensor]:
        """See `Exchange.begin`."""
        self._calls += 1
        count_bytes(self._links, self._meeting.members, send, sent_SB.shape[1])
        rows_MB = torch.cat(self._swap("rows", sent_SB.split(list(send))))
        assert rows_MB.shape[0] == sum(receive), "members disagree on counts"
        return lambda: rows_MB

    def _swap(self, what: str, gifts: Sequence[T]) -> list[T]:
        tag = f"call {self._calls}, {what}"
        got: list[tuple[str, T]] = self._meeting.swap(self.place, [(tag, gift) for gift in gifts])
        check_tags(tag, [theirs for theirs, _ in got], self._meeting.members)
        return [gift for _, gift in got]


def count_bytes(links: Any, members: Sequence[int], send: Sequence[int], row_bytes: int) -> None:
    """Charge rows sent to the domains they go to."""
    domains = links.topology.domains
    for member, rows in zip(members, send, strict=True):
        if member != links.rank:
            same = domains[member] == domains[links.rank]
            links.traffic.add(same_domain=same, nbytes=rows * row_bytes)
