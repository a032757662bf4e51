"""Engines over several ranks for tests: this process leads, processes of `python -m tests.rollout.gangs` follow.

They are started when first needed and serve one engine after another, each over a process group of its own.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from queue import SimpleQueue

import torch
import torch.distributed as dist

from contraflow.config import Engine as EngineSection
from contraflow.errors import ConfigError
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.kinds import Latent
from contraflow.parallel.layout import cut, shards
from contraflow.parallel.mesh import Mesh
from contraflow.rollout.follow import follow
from contraflow.rollout.gang import GangCore, GangEngine
from contraflow.rollout.rank import Rank, empty_part, join_ranks, led_engine
from contraflow.runtime.base import Rendezvous
from contraflow.types import Version


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

    def text(self, rank: int, meeting: str) -> str:
        fields, section = dataclasses.asdict(self.config), self.section.model_dump(mode="json")
        version = None if self.version is None else [self.version.line, self.version.n]
        return json.dumps([fields, section, self.seed, self.std, version, self.turned, rank, meeting])


def read(text: str) -> tuple[Spec, Rendezvous]:
    fields, section, seed, std, version, turned, rank, meeting = json.loads(text)
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    fields["latent"] = fields["latent"] and Latent(**fields["latent"])
    checked = EngineSection.model_validate_json(json.dumps(section))
    spec = Spec(ModelConfig(**fields), checked, seed, std, version and Version(*version), turned)
    return spec, Rendezvous(rank, checked.parallel.ranks, meeting)


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
        self.followers: dict[int, subprocess.Popen[str]] = {}
        self.broken: list[str] = []  # what engines said of their ranks
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
            stdin = self._follower(first + rank - 1).stdin
            assert stdin is not None
            stdin.write(spec.text(rank, meeting) + "\n")
            stdin.flush()
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
            follower.wait()
        self._folder.cleanup()

    def _follower(self, number: int) -> "subprocess.Popen[str]":
        if number not in self.followers or self.followers[number].poll() is not None:
            command = [sys.executable, "-m", "tests.rollout.gangs"]
            self.followers[number] = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        return self.followers[number]


def main() -> None:
    """Follow, one engine after another. Ends with standard input, whatever it is doing: whoever leads is gone then."""
    torch.set_num_threads(1)
    lines = SimpleQueue[str]()

    def receive() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    while True:
        try:
            rank = join(*read(lines.get()))
        except ConfigError:  # the leader got it too
            continue
        try:
            follow(rank.core, rank.star, rank.mesh)
        finally:
            rank.leave()


if __name__ == "__main__":
    main()
