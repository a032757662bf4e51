"""How one trainer rank publishes: the whole model gathered on rank 0, or every rank's part sent by itself.

Takes a spread model and what proves it, gives the manifest (on rank 0). Does not compute the proof or decide when.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from contraflow import config
from contraflow.errors import CarrierError, DeadlineExceeded, WorkerDied
from contraflow.parallel.data import at_rest, local
from contraflow.parallel.devices import DTYPES, device_of, same_gpu
from contraflow.parallel.pieces import dtypes, served, trained
from contraflow.parallel.spread import Spread
from contraflow.parallel.team import Team
from contraflow.train.float8 import expert_matrices
from contraflow.types import Manifest, Probe, Version
from contraflow.weights import open_carrier
from contraflow.weights.bridge import Bridge, Link, open_bridge
from contraflow.weights.collective import Outbox, circles, contents
from contraflow.weights.fp8 import lowered
from contraflow.weights.ipc import Handle, Shared
from contraflow.weights.publish import Publisher
from contraflow.weights.reshard import plan

# The newest, its predecessor for roll-back, and two that a slow engine may still be fetching.
KEPT_VERSIONS = 4


class Publishing(Protocol):
    """Collective over the trainer's ranks, but for `close`."""

    def publish(self, version: Version, probe: Probe) -> Manifest | None:
        """Publish the weights as they are; the manifest on rank 0. Raises CarrierError, BlobError, DeadlineExceeded."""
        ...

    def close(self) -> None:
        """Remove what was published."""
        ...


class Whole:
    """Gathers every tensor on rank 0, which publishes it by a carrier of chunks."""

    def __init__(self, spread: Spread, section: config.Weights, run: Path, *, wire: str) -> None:
        self._spread, self._section, self._wire = spread, section, wire
        self._dtypes = dtypes(spread.config, DTYPES[section.plain])
        self._publisher = Publisher(open_carrier(section, run), keep=KEPT_VERSIONS) if spread.first else None

    def publish(self, version: Version, probe: Probe) -> Manifest | None:
        """See `Publishing`."""
        # What is gathered or converted is a copy, and on the host: a GPU need not hold all of those at once.
        as_they_are = self._spread.mesh is None and self._section.dtype == "float32"
        whole = ((name, tensor) for name, tensor in self._spread.tensors() if tensor is not None)
        tensors = {name: tensor if as_they_are else tensor.to(self._dtypes[name]).cpu() for name, tensor in whole}
        if self._section.dtype == "float8":
            for name, weight in expert_matrices(self._spread.decoder).items():
                tensors |= {part: tensor.cpu() for part, tensor in lowered(name, weight).items()}
        if self._publisher is None:
            return None
        return self._publisher.publish(
            tensors,
            version=version,
            model=self._spread.config.digest(),
            probe=probe,
            chunk_bytes=self._section.chunk_bytes,
            wire=self._wire,
        )

    def close(self) -> None:
        """See `Publishing`."""
        if self._publisher is not None:
            self._publisher.close()


@dataclass
class Carried:
    """What went over this rank's links."""

    sent: int = 0  # versions, counted once an engine
    failed: int = 0
    fault: str = ""  # the last one


class Shards:
    """Packs this rank's part of each version, and sends it to engines that ask, on threads of its own.

    Invariant: a link has one bridge, which one transfer uses at a time; a link that failed is of no more use.
    """

    def __init__(
        self,
        spread: Spread,
        team: Team,
        *,
        train: config.Train,
        engine: config.Engine,
        weights: config.Weights,
    ) -> None:
        self._spread, self._team, self._weights = spread, team, weights
        self._wire = train.parallel.wire
        self._rank = 0 if spread.mesh is None else spread.mesh.here.rank
        self._trainers, self._engines = train.parallel.ranks, engine.parallel.ranks
        model = spread.config
        self._dtypes = dtypes(model, DTYPES[weights.plain])
        self._plan = plan(
            trained(model, train.parallel),
            served(model, engine.parallel),
            self._dtypes,
            bucket_bytes=weights.bucket_bytes,
        )
        self._device = device_of(train.device if engine.device.startswith("cuda") else "cpu", self._rank)
        self._shared = Shared()
        self._outbox = Outbox(
            self._plan, self._rank, self._dtypes, device=self._device, deadline_s=weights.refresh_deadline_s
        )
        self._newest: Version | None = None
        self._links: dict[str, Future[Bridge]] = {}
        self.threads = ThreadPoolExecutor(thread_name_prefix="send", initializer=same_gpu())
        self.carried = Carried()

    @property
    def skipped(self) -> int:
        """Versions that no engine asked for in time."""
        return self._outbox.skipped

    def publish(self, version: Version, probe: Probe) -> Manifest | None:
        """See `Publishing`: what lies packed can be held and sent from here on."""
        at_rest(self._spread.decoder)
        parts = {name: local(parameter) for name, parameter in self._spread.decoder.named_parameters()}
        said = self._team.words(" ".join(self._outbox.pack(version, parts)))
        parent, self._newest = self._newest, version
        if not self._spread.first:
            return None
        return Manifest(
            version=version,
            parent=parent,
            model=self._spread.config.digest(),
            chunk_bytes=self._weights.bucket_bytes,
            probe=probe,
            wire=self._wire,
            **contents(
                self._plan,
                [words.split() for words in said],
                self._spread.shapes,
                self._dtypes,
                kind=self._weights.carrier,
            ),
        )

    def join(self, link: Link) -> None:
        """Begin to meet an engine that is being started; what an earlier one of the name left is let go."""
        self._outbox.drop(link.name)
        self._shared.forget(link.name)
        if self._weights.carrier == "ipc":
            return  # it reads what lies here
        self._end(link.name, "its engine was started again")
        self._links[link.name] = self.threads.submit(
            open_bridge,
            link,
            circles(self._plan),
            rank=self._rank,
            sources=self._trainers,
            targets=self._engines,
            device=self._device,
            deadline_s=self._weights.refresh_deadline_s,
        )

    def hold(self, link: str, version: Version) -> None:
        """See `Sender`."""
        self._outbox.hold(version, link)

    def offer(self, link: str, version: Version) -> tuple[Handle, ...]:
        """See `Sender`."""
        handles = self._shared.give(link, self._outbox.held(version, link))
        self.carried.sent += 1
        return handles

    def let_go(self, link: str) -> None:
        """See `Sender`."""
        self._outbox.drop(link)

    def send(self, link: str, version: Version) -> None:
        """See `Sender`. Blocks."""
        if link not in self._links:
            raise CarrierError(
                f"the trainer knows no engine {link!r}; its links are {', '.join(self._links) or 'none'}"
            )
        try:
            self._outbox.send(version, self._joined(link))
            self.carried.sent += 1
        except (WorkerDied, DeadlineExceeded) as fault:
            self.carried.failed += 1
            self.carried.fault = str(fault)
            self._end(link, str(fault))
            raise
        finally:
            self._outbox.drop(link)

    def close(self) -> None:
        """See `Publishing`. Transfers under way end, or run into their deadline."""
        for link in self._links:
            self._end(link, "the trainer ends")
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _joined(self, link: str) -> Bridge:
        wait_s = self._weights.refresh_deadline_s
        try:
            return self._links[link].result(wait_s)
        except TimeoutError:
            raise DeadlineExceeded(f"rank {self._rank} of the trainer", f"{link} to join its link", wait_s) from None

    def _end(self, link: str, why: str) -> None:
        joined = self._links.get(link)
        if joined is not None and joined.done() and joined.exception() is None:
            joined.result().abort(why)


def open_publishing(
    spread: Spread,
    team: Team,
    run: Path,
    *,
    train: config.Train,
    engine: config.Engine,
    weights: config.Weights,
) -> Whole | Shards:
    """How a recipe publishes. Raises CarrierError, and ConfigError where the layouts do not fit."""
    if weights.in_parts:
        return Shards(spread, team, train=train, engine=engine, weights=weights)
    return Whole(spread, weights, run, wire=train.parallel.wire)
