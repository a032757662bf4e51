"""Engines over several ranks for tests: this process leads, others follow.

They are forked when first needed and serve one engine after another, each over a process group of its own.
"""

import dataclasses
import os
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue

import torch
import torch.distributed as dist

from contraflow.config import Engine as EngineSection
from contraflow.errors import ConfigError
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.families import ModelConfig
from contraflow.parallel.layout import cut, shards
from contraflow.parallel.mesh import Mesh
from contraflow.rollout.follow import follow
from contraflow.rollout.gang import GangCore, GangEngine
from contraflow.rollout.rank import Rank, empty_part, join_ranks, led_engine
from contraflow.runtime.base import Rendezvous
from contraflow.types import Version
from tests.processes import forking


@dataclasses.dataclass(frozen=True)
class Spec:
    """An engine of a random model. `turned`: a rank that turns positions too far, and so can prove no version."""

    config: ModelConfig
    section: EngineSection
    seed: int = 1
    std: float = 0.2
    version: Version | None = None
    turned: int = -1

    @property
    def ranks(self) -> int:
        return self.section.parallel.ranks


def join(spec: Spec, rendezvous: Rendezvous) -> Rank:
    """Sit down with the other ranks of the spec's engine."""

    def part(mesh: Mesh) -> Decoder:
        whole = new_decoder(spec.config, seed=spec.seed, std=spec.std).state_dict()
        decoder = empty_part(spec.config, mesh, spec.section)
        cuts = shards(spec.config, mesh.parallel, mesh.here)
        decoder.load_state_dict({name: cut(tensor, cuts[name]) for name, tensor in whole.items()})
        if rendezvous.rank == spec.turned:
            decoder.signed_d.mul_(1.5)
        return decoder

    return join_ranks(spec.section, rendezvous, part, clock=time.perf_counter, version=spec.version)


class Gang:
    """Follower processes by number, from 1. One that ended is started again when it is needed."""

    def __init__(self) -> None:
        self.followers: dict[int, BaseProcess] = {}
        self.broken: list[str] = []  # what engines said of their ranks
        self._orders: dict[int, Connection] = {}
        self._folder = tempfile.TemporaryDirectory()
        self._engines = 0
        self._last: Rank | None = None

    def lead(self, spec: Spec, first: int = 1) -> Rank:
        """Rank 0 of an engine, when all others have sat down: process `first` as rank 1, and so on."""
        if self._last is not None and dist.is_initialized():
            self._last.leave()  # a test that failed did not close its engine: its followers end, and are started again
        self._engines += 1
        meeting = f"file://{self._folder.name}/{self._engines}"
        for rank in range(1, spec.ranks):
            self._follower(first + rank - 1).send((spec, Rendezvous(rank, spec.ranks, meeting)))
        self._last = join(spec, Rendezvous(0, spec.ranks, meeting))
        return self._last

    def engine(self, spec: Spec, first: int = 1) -> GangEngine:
        return led_engine(self.lead(spec, first), clock=time.perf_counter, on_broken=self.broken.append)

    def core(self, rank: Rank) -> GangCore:
        """What an engine steps, to be stepped by the test."""
        return GangCore(rank.core, rank.star, rank.mesh, clock=time.perf_counter, on_broken=self.broken.append)

    def close(self) -> None:
        """End the followers."""
        for follower in self.followers.values():
            follower.kill()  # stopped ones too
            follower.join()
        self._folder.cleanup()

    def _follower(self, number: int) -> Connection:
        if number not in self.followers or self.followers[number].exitcode is not None:
            there, self._orders[number] = forking().Pipe(duplex=False)
            self.followers[number] = forking().Process(target=serve, args=(there,), daemon=True)
            self.followers[number].start()
            there.close()
        return self._orders[number]


def serve(orders: Connection) -> None:
    """Follow, one engine after another. Ends with `orders`, whatever it is doing: whoever leads is gone then."""
    torch.set_num_threads(1)
    engines = SimpleQueue[tuple[Spec, Rendezvous]]()

    def receive() -> None:
        try:
            while True:
                engines.put(orders.recv())
        except EOFError:
            os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    while True:
        try:
            rank = join(*engines.get())
        except ConfigError:  # the leader got it too
            continue
        try:
            follow(rank.core, rank.star, rank.mesh)
        finally:
            rank.leave()
