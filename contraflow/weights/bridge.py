"""One process group between the ranks of the trainer and those of one engine, apart from the groups of either.

Takes a link and a rank's place on it, gives sends and receives that end by a deadline and name who did not take part.
NCCL between GPUs, gloo otherwise. A group an engine: one that dies breaks nobody else's. Knows no tensors or versions.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]  # it is public, torch does not say so
from torch.distributed.distributed_c10d import PrefixStore, Store

from contraflow.errors import ConfigError, DeadlineExceeded, WorkerDied
from contraflow.types import Version
from contraflow.weights.ipc import Handle

JOIN_S = 120.0  # one side waits while the other loads its model
_FILE = "file://"


class Link(msgspec.Struct, frozen=True):
    """Where the two sides meet: once for each time that an engine is started."""

    name: str  # the engine's worker
    number: int  # how often it was started
    meeting: str  # file:// and a path that nothing else uses

    @property
    def key(self) -> str:
        """What keeps its groups apart from those of other links."""
        return f"{self.name}/{self.number}"


class Bridge:
    """This rank's end. Ranks are numbered through: the trainer's first, then the engine's.

    Belongs to one thread at a time; `abort` may be called from any. After a failure it is of no more use.
    """

    def __init__(
        self,
        link: Link,
        groups: Mapping[tuple[int, ...], Any],
        *,
        rank: int,
        sources: int,
        device: torch.device,
        deadline_s: float,
    ) -> None:
        """`groups`: backends by their ranks, in order; that of all ranks is the first. `device` is of what travels."""
        self.link, self.rank, self.device, self.deadline_s = link, rank, device, deadline_s
        self._groups, self._sources = dict(groups), sources
        self._all = next(iter(groups))
        self.broken = ""

    def send(self, data_B: Tensor, source: int, targets: Sequence[int], *, tag: int) -> "Message":
        """Begin to send to engine ranks; `data_B` must stand still until it is through."""
        return self._begin(data_B, source, targets, tag, sending=True)

    def receive(self, data_B: Tensor, source: int, targets: Sequence[int], *, tag: int) -> "Message":
        """Begin to receive what trainer rank `source` sends to `targets`, of which this rank is one."""
        return self._begin(data_B, source, targets, tag, sending=False)

    def abort(self, why: str) -> None:
        """End all that is under way, here and, as soon as they notice, on the other ranks. Safe to call twice."""
        if self.broken:
            return
        self.broken = why
        for group in self._groups.values():
            group.abort()

    def name(self, rank: int) -> str:
        """A rank, for people."""
        if rank < self._sources:
            return f"rank {rank} of the trainer"
        return f"rank {rank - self._sources} of {self.link.name}"

    def _begin(self, data_B: Tensor, source: int, targets: Sequence[int], tag: int, *, sending: bool) -> "Message":
        if self.broken:
            raise WorkerDied(self.link.name, f"its link was broken: {self.broken}")
        engine = tuple(self._sources + target for target in targets)
        others = engine if sending else (source,)
        try:
            if len(targets) > 1:
                work = self._groups[source, *engine].broadcast([data_B], dist.BroadcastOptions())
            elif sending:
                work = self._groups[self._all].send([data_B], engine[0], tag)
            else:
                work = self._groups[self._all].recv([data_B], source, tag)
        except RuntimeError as fault:
            raise Message(self, others, None).fallen(fault) from fault
        return Message(self, others, work)


class Message:
    """One message under way, with the other ranks it is from or for."""

    def __init__(self, bridge: Bridge, others: Sequence[int], work: Any) -> None:
        self._bridge, self._others, self._work = bridge, others, work
        self._landed = False  # gloo would wait for a second message

    def order(self) -> None:
        """What is computed next sees the message through: on a GPU this stream waits and not the host."""
        if self._bridge.device.type == "cuda":
            self._work.wait()
        else:
            self.land()

    def land(self) -> None:
        """Wait on the host. Raises WorkerDied or DeadlineExceeded, naming the ranks at the other end."""
        if self._landed:
            return
        try:
            self._work.wait(timedelta(seconds=self._bridge.deadline_s))
        except RuntimeError as fault:
            raise self.fallen(fault) from fault
        self._landed = True

    def fallen(self, fault: RuntimeError) -> WorkerDied | DeadlineExceeded:
        """The error of a message that is not through."""
        bridge, names = self._bridge, ", ".join(self._bridge.name(rank) for rank in self._others)
        first = str(fault).strip().splitlines()[0][:200]
        if "timed out" in first.lower() or "timeout" in first.lower():
            return DeadlineExceeded(bridge.name(bridge.rank), f"{names} to take part in a transfer", bridge.deadline_s)
        return WorkerDied(bridge.link.name, f"{names} did not take part in a transfer: its connection broke ({first})")


def open_bridge(
    link: Link,
    circles: Sequence[tuple[int, tuple[int, ...]]],
    *,
    rank: int,
    sources: int,
    targets: int,
    device: torch.device,
    deadline_s: float,
    join_s: float = JOIN_S,
) -> Bridge:
    """Meet the other ranks. `circles`: a source and the targets of what it sends to several at once, the same on all.

    `rank` counts through; `deadline_s` bounds each message. Collective. Raises DeadlineExceeded when the others do not
    come within `join_s`.
    """
    if not link.meeting.startswith(_FILE):
        raise ConfigError(f"a link at {link.meeting!r}: it must be a file, which all ranks of one machine see")
    store = PrefixStore(link.key, FileStore(link.meeting.removeprefix(_FILE)))
    store.set_timeout(timedelta(seconds=join_s))
    members = [tuple(range(sources + targets))]
    members += [(source, *(sources + target for target in there)) for source, there in circles]
    try:
        groups = {
            ranks: _group(PrefixStore(repr(ranks), store), ranks.index(rank), len(ranks), device, join_s)
            for ranks in dict.fromkeys(members)  # one of the circles may be of all
            if rank in ranks
        }
    except RuntimeError as fault:
        first = str(fault).strip().splitlines()[0][:200]
        raise DeadlineExceeded(
            f"rank {rank} of the link to {link.name}", f"the other ranks to join it ({first})", join_s
        ) from fault
    return Bridge(link, groups, rank=rank, sources=sources, device=device, deadline_s=deadline_s)


def _group(store: Store, rank: int, size: int, device: torch.device, join_s: float) -> Any:
    """A backend of its own: no part of the process's groups, which stay as they are when it breaks."""
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=join_s))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=join_s)
    with _outliving():
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _outliving() -> Iterator[None]:
    """Groups made inside do not take the process down when another rank dies, as torch's watchdog else would."""
    name, before = "TORCH_NCCL_ASYNC_ERROR_HANDLING", os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    os.environ[name] = "2"  # clean up only; read when the group is made
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class Sender(Protocol):
    """A trainer rank as an engine calls it, to be brought a version: hold it on all ranks, then have it sent by all."""

    async def hold(self, link: str, version: Version) -> None:
        """Keep a version as it is until `let_go`. Raises VersionGone."""
        ...

    async def send(self, link: str, version: Version) -> None:
        """Send this rank's share over a link. Raises WorkerDied or DeadlineExceeded, naming who took no part."""
        ...

    async def offer(self, link: str, version: Version) -> tuple[Handle, ...]:
        """Instead of `send`: where a held version lies, to be copied on the same machine. Raises CarrierError."""
        ...

    async def let_go(self, link: str) -> None:
        """Nothing is held for a link any more."""
        ...
