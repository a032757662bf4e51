"""Exchanges over torch.distributed process groups: gloo between processes of any kind, NCCL between GPUs.

Takes a process group and a topology, gives `Links`. A rank that dies or hangs is named: every rank that fails posts
that it did in the group's store, and those who post nothing in time are the missing. Does not know tokens or experts.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from contraflow.dispatch.domains import Topology, Traffic, domain_name
from contraflow.dispatch.exchange import check_tags
from contraflow.dispatch.virtual import count_bytes
from contraflow.errors import DispatchError, WorkerDied

STORE_RANK = 0  # whose process holds the store of all ranks
GRACE_S = 2.0  # for others to notice and post as well, before the silent ones are named


class Store(Protocol):
    """What all ranks can read and write: torch's FileStore and TCPStore are such."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


class GroupLinks:
    """See `Links`. Ranks are numbered as in the group.

    `store` is one that all ranks share; without it a missing rank ends the wait but has no name. `deadline_s` bounds
    each wait, and must be below the group's own time-out.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        topology: Topology | None = None,
        device: torch.device | str = "cpu",
        store: Store | None = None,
        deadline_s: float = 60.0,
    ) -> None:
        self.device = torch.device(device)
        self.rank = dist.get_rank(group)
        self.traffic = Traffic()
        self.deadline_s = deadline_s
        self.global_ranks = tuple(dist.get_process_group_ranks(group))
        self.group = group
        self._store = store
        self.topology = topology or Topology.named(self.gather(domain_name()))
        if self.topology.ranks != len(self.global_ranks):
            raise DispatchError(
                f"a topology of {self.topology.ranks} ranks was given for a group of {len(self.global_ranks)}"
            )

    def exchange(self, members: Sequence[int]) -> "GroupExchange":
        """See `Links.exchange`."""
        if len(members) == len(self.global_ranks):
            return GroupExchange(self, self.group, tuple(members))
        ranks = [self.global_ranks[member] for member in members]
        # Only its members make it: other groups of the world may be doing something else.
        group = dist.new_group(ranks, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return GroupExchange(self, group, tuple(members))

    def gather(self, text: str) -> list[str]:
        """See `Links.gather`."""
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.device)
        ranks = len(self.global_ranks)
        sizes = self._tell_all(torch.full((1,), len(data), device=self.device), [1] * ranks).tolist()
        heard = self._tell_all(data, sizes).split(sizes)
        return [bytes(part.cpu().numpy()).decode() for part in heard]

    def _tell_all(self, mine: Tensor, sizes: list[int]) -> Tensor:
        """Everybody's `mine`, end to end, given how long each is. torch's gathers change names between versions."""
        ranks = len(self.global_ranks)
        heard = mine.new_empty(sum(sizes))
        work = dist.all_to_all_single(heard, mine.repeat(ranks), sizes, [len(mine)] * ranks, self.group, async_op=True)
        self.wait(work, "an agreement")
        return heard

    def close(self) -> None:
        """See `Links.close`. Groups end with the process group they belong to: ending one here could wait."""

    def wait(self, work: dist.Work, what: str) -> None:
        """Wait on the host for a collective, within the deadline. Raises WorkerDied naming who did not take part."""
        try:
            work.wait(timedelta(seconds=self.deadline_s))
        except RuntimeError as fault:
            raise self.fallen(what, fault) from fault

    def fallen(self, what: str, fault: RuntimeError) -> WorkerDied:
        """The error of a failed wait in this group, naming who took no part. Finding out may take a few seconds."""
        missing = self._roll_call()
        names = ", ".join(f"rank {rank}" for rank in missing) or "a rank"
        first = str(fault).strip().splitlines()[0][:200]
        return WorkerDied(
            names,
            f"took no part in {what} within {self.deadline_s:g} s of rank {self.global_ranks[self.rank]}, or its "
            f"connection broke ({first})",
        )

    def _roll_call(self) -> list[int]:
        """Global ranks that are missing: those of this group that post no failure, or whom the failed ones blame."""
        if self._store is None:
            return []
        store, found = self._store, SimpleQueue[list[int]]()
        # In a thread: a store whose process is stopped, not gone, never answers, and torch's wait for it has no end.
        Thread(target=lambda: found.put(self._ask(store)), name="roll call", daemon=True).start()
        try:
            return found.get(timeout=GRACE_S * (len(self.global_ranks) + 1))
        except Empty:
            return [STORE_RANK]

    def _ask(self, store: Store) -> list[int]:
        me, missing, blamed = self.global_ranks[self.rank], list[int](), set[int]()
        try:
            store.set(f"fallen/{me}", "[]")
        except RuntimeError:
            return [STORE_RANK]
        for rank in self.global_ranks:
            try:
                store.wait([f"fallen/{rank}"], timedelta(seconds=GRACE_S))
                blamed |= set(json.loads(store.get(f"fallen/{rank}")))
            except RuntimeError:  # torch's DistStoreError: it has not posted, or the store went down with its rank
                missing.append(rank)
        found = missing or sorted(blamed)
        with suppress(RuntimeError):  # the store went down; who asks us later will find out the same way
            store.set(f"fallen/{me}", json.dumps(found))
        return found


class GroupExchange:
    """See `Exchange`."""

    def __init__(self, links: GroupLinks, group: dist.ProcessGroup, members: tuple[int, ...]) -> None:
        self.place = members.index(links.rank)
        self.size = len(members)
        self._links = links
        self._group = group
        self._members = members
        self._calls = 0

    def counts(self, send: Sequence[int]) -> list[int]:
        """See `Exchange.counts`."""
        self._calls += 1
        self._links.traffic.control += 16 * (self.size - 1)
        told = torch.tensor([[self._calls, count] for count in send], device=self._links.device)
        heard = torch.empty_like(told)
        work = dist.all_to_all_single(heard, told, group=self._group, async_op=True)
        self._links.wait(work, f"exchange {self._calls}")
        tags, counts = heard.T.tolist()
        check_tags(f"call {self._calls}", [f"call {tag}" for tag in tags], self._members)
        return [int(count) for count in counts]

    def begin(self, sent_SB: Tensor, send: Sequence[int], receive: Sequence[int]) -> Callable[[], Tensor]:
        """See `Exchange.begin`. On a GPU the wait is one of the stream, not of the host."""
        self._calls += 1
        count_bytes(self._links, self._members, send, sent_SB.shape[1])
        rows_MB = sent_SB.new_empty(sum(receive), sent_SB.shape[1])
        work = dist.all_to_all_single(
            rows_MB, sent_SB.contiguous(), list(receive), list(send), group=self._group, async_op=True
        )

        def finish() -> Tensor:
            if rows_MB.is_cuda:
                work.wait()
            else:
                self._links.wait(work, f"exchange {self._calls}")
            return rows_MB

        return finish
