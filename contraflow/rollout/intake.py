"""How an engine is brought a version in parts: each of its ranks receives its own from the trainer's ranks.

Takes a manifest; gives this rank's part, proven, once all ranks have theirs. Loads nothing into an engine.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from contraflow.config import Compute, Engine, Parallel
from contraflow.errors import ChannelError, DeadlineExceeded, WorkerDied
from contraflow.model.families import ModelConfig
from contraflow.parallel.devices import DTYPES, device_of, same_gpu
from contraflow.parallel.pieces import dtypes, served, trained
from contraflow.runtime.base import Address, Ref
from contraflow.runtime.gang import GRACE_S, together
from contraflow.types import Manifest, Version
from contraflow.weights.bridge import Bridge, Link, Sender, open_bridge
from contraflow.weights.carrier import Arrival
from contraflow.weights.collective import Inbox, circles
from contraflow.weights.fetch import Fetched
from contraflow.weights.ipc import Handle, Opened
from contraflow.weights.manifest import Expected, check_fit
from contraflow.weights.reshard import plan

Offers = tuple[tuple[Handle, ...], ...]  # of each trainer rank, where its buckets of one version lie


@dataclass(frozen=True)
class Route:
    """Where an engine's weights come from: the trainer's ranks, how the model lies on them, and the way there."""

    carrier: str
    link: Link
    trainers: tuple[Address, ...]
    parallel: Parallel  # the trainer's
    device: str  # the trainer's, as its section says
    dtype: Compute  # as which tensors travel
    bucket_bytes: int
    deadline_s: float


class Intake:
    """What arrives at this rank, and where it waits to be swapped in.

    Invariant: at most one version waits here, and all of its bytes are proven.
    """

    def __init__(self, inbox: Inbox, bridge: Bridge | None) -> None:
        """Without a `bridge` it copies what the trainer offers."""
        self.inbox, self.bridge = inbox, bridge
        self._opened = Opened()
        self._lock = threading.Lock()
        self._waiting: tuple[Version, dict[str, Tensor]] | None = None

    def receive(self, manifest: Manifest, offers: Offers = ()) -> None:
        """Blocks until this rank's part is here. `offers`: by trainer rank, without a bridge. Raises as `Inbox`."""
        if self.bridge is not None:
            parts = self.inbox.receive(manifest, self.bridge)
        else:
            parts = self.inbox.copy(manifest, lambda source, n: self._opened.tensor(offers[source][n]))
        with self._lock:
            self._waiting = (manifest.version, parts)

    def close(self) -> None:
        """Leave the trainer's ranks. Safe to call twice."""
        if self.bridge is not None:
            self.bridge.abort("the engine is closed")

    def take(self, version: Version) -> dict[str, Tensor]:
        """The part of a version that arrived, given once; empty, which no engine takes, when it did not."""
        with self._lock:
            waiting, self._waiting = self._waiting, None
        return waiting[1] if waiting is not None and waiting[0] == version else {}


class Mate(Protocol):
    """Another rank of the same engine, as its leader calls it."""

    async def receive(self, manifest: Manifest, offers: Offers) -> None:
        """Bring this rank its part of a version. Raises as `Inbox.receive`."""
        ...


class PartFetcher:
    """A `Fetcher` on the engine's first rank: gives this rank's part once every rank has its own.

    A transfer that fails leaves the link of no use: an engine that goes on needs to be started again.
    """

    def __init__(self, intake: Intake, route: Route, connect: Callable[[Address], Ref[Any]]) -> None:
        self.kind = route.carrier
        self._intake, self._route, self._connect = intake, route, connect
        self._trainers: list[Ref[Sender]] = [connect(address) for address in route.trainers]
        self._mates: list[Ref[Mate]] = []
        self._moved = sum(bucket.nbytes * len(bucket.targets) for bucket in intake.inbox.plan.buckets)

    def close(self) -> None:
        """Leave the trainer's ranks."""
        self._intake.close()

    def meet(self, mates: Sequence[Address]) -> None:
        """Where the other ranks of the engine answer."""
        self._mates = [self._connect(address) for address in mates]

    async def fetch(self, manifest: Manifest, expected: Expected | None) -> Fetched:
        """See `Fetcher`; also raises WorkerDied and DeadlineExceeded, naming who took no part."""
        if expected is not None:
            check_fit(manifest, expected)
        self._intake.inbox.check(manifest)
        wait_s, name, version = self._route.deadline_s, self._route.link.name, manifest.version
        try:
            await self._all([ref.call(wait_s, Sender.hold, name, version) for ref in self._trainers])
            if self._intake.bridge is None:
                offered = [ref.call(wait_s, Sender.offer, name, version) for ref in self._trainers]
                await self._all(self._receiving(manifest, tuple(await together(offered, GRACE_S))))
            else:
                sending = [ref.call(wait_s, Sender.send, name, version) for ref in self._trainers]
                await self._transfer([*sending, *self._receiving(manifest, ())], self._intake.bridge)
        except BaseException:
            await self._let_go()
            raise
        if self._intake.bridge is None:
            await self._let_go()
        return Fetched(manifest, self._intake.take(version), Arrival(moved=self._moved))

    def _receiving(self, manifest: Manifest, offers: Offers) -> list[Coroutine[Any, Any, None]]:
        """On every rank of the engine, this one included."""
        mates = [ref.call(self._route.deadline_s, Mate.receive, manifest, offers) for ref in self._mates]
        return [*mates, run_aside(lambda: self._intake.receive(manifest, offers))]

    async def _transfer(self, moves: list[Coroutine[Any, Any, None]], bridge: Bridge) -> None:
        try:
            await self._all(moves)
        except BaseException as fault:
            bridge.abort(f"a transfer failed: {fault or type(fault).__name__}")
            raise

    async def _all(self, calls: list[Coroutine[Any, Any, None]]) -> None:
        await together(calls, GRACE_S)

    async def _let_go(self) -> None:
        for ref in self._trainers:
            with suppress(WorkerDied, DeadlineExceeded, ChannelError):
                await ref.call(self._route.deadline_s, Sender.let_go, self._route.link.name)


async def run_aside(work: Callable[[], None]) -> None:
    """Run what blocks on a thread that has this one's GPU."""
    enter = same_gpu()

    def there() -> None:
        enter()
        work()

    await asyncio.to_thread(there)


def open_intake(route: Route, section: Engine, model: ModelConfig, *, rank: int) -> Intake:
    """Meet the trainer's ranks as rank `rank` of the engine. Collective with them. Raises DeadlineExceeded."""
    theirs, ours = route.parallel, section.parallel
    travelling, held = dtypes(model, DTYPES[route.dtype]), served(model, ours)
    planned = plan(trained(model, theirs), held, travelling, bucket_bytes=route.bucket_bytes)
    device, bridge = device_of(section.device, rank), None
    if route.carrier != "ipc":
        bridge = open_bridge(
            route.link,
            circles(planned),
            rank=theirs.ranks + rank,
            sources=theirs.ranks,
            targets=ours.ranks,
            device=device if route.device.startswith("cuda") else torch.device("cpu"),
            deadline_s=route.deadline_s,
        )
    shape_of = {name: piece.shape for name, piece in held[rank].items()}
    return Intake(Inbox(planned, rank, shape_of, travelling, kind=route.carrier, device=device), bridge)
