"""One rank of an engine that is spread over several: joins the others, takes its part of the model, leads or follows.

Takes an `engine` section and a rendezvous. What the rank then does is `gang.py` on rank 0, `follow.py` on the others.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from contraflow.config import Engine as EngineSection
from contraflow.dispatch.base import Phase
from contraflow.errors import CarrierError, DeadlineExceeded
from contraflow.model.decoder import Decoder
from contraflow.model.families import ModelConfig
from contraflow.model.folder import open_folder, read_config
from contraflow.model.names import Part, parts
from contraflow.model.reading import TensorFiles
from contraflow.parallel.devices import DTYPES, device_of, enter_device, same_gpu
from contraflow.parallel.forms import choose_forms
from contraflow.parallel.layout import Shard, shards
from contraflow.parallel.mesh import Mesh, open_mesh
from contraflow.parallel.pieces import Shape, shapes
from contraflow.parallel.slots import open_slots
from contraflow.parallel.spread import cut_decoder, settle
from contraflow.rollout.core import EngineCore
from contraflow.rollout.follow import follow
from contraflow.rollout.gang import GangCore, GangEngine
from contraflow.rollout.intake import Intake, Offers, run_aside
from contraflow.rollout.passes import bucket
from contraflow.rollout.settle import StarPeers
from contraflow.rollout.star import Star, open_star
from contraflow.runtime.base import Host, Rendezvous
from contraflow.telemetry import Clock
from contraflow.types import Manifest, Version


@dataclass(frozen=True)
class Rank:
    """A rank's connections and its part of the engine. `leave` ends it: the process may join other ranks then."""

    mesh: Mesh
    star: Star
    core: EngineCore
    leave: Callable[[], None]


def join_ranks(
    section: EngineSection,
    rendezvous: Rendezvous,
    part: Callable[[Mesh], Decoder],
    *,
    clock: Clock,
    version: Version | None = None,
    config: ModelConfig | None = None,
) -> Rank:
    """Join the engine's ranks with `part(mesh)` of the model, whose weights are `version`'s if they may be served.

    With the model's `config`, a dispatch of "auto" is measured before it is chosen.

    Collective. Raises DeadlineExceeded, or what torch raises, when a rank does not come; ConfigError for a bad fit.
    """
    parallel, told = section.parallel, tuple[str, ...]()
    device = device_of(section.device, rendezvous.rank)
    enter_device(device)
    stack = ExitStack()
    with stack:
        mesh = stack.enter_context(
            open_mesh(parallel, rank=rendezvous.rank, init_method=rendezvous.init_method, device=device)
        )
        if config is not None:
            most: dict[Phase, int] = {"prefill": section.prefill_tokens, "decode": bucket(section.max_sequences)}
            mesh, told = choose_forms(mesh, config, most, clock=clock, dtype=DTYPES[section.compute])
        star = open_star(mesh.world, rendezvous.init_method, deadline_s=parallel.deadline_s, device=device)
        stack.enter_context(closing(star))
        decoder = part(mesh)
        slots = None
        if section.replace_every:
            slots = open_slots(decoder, mesh, spare=section.spare_experts, max_tokens=most_tokens(section))
        core = EngineCore(
            decoder, section, clock=clock, version=version, peers=StarPeers(star, mesh), slots=slots, told=told
        )
        stack = stack.pop_all()
    return Rank(mesh, star, core, stack.close)


def load_rank(section: EngineSection, folder: Path, rendezvous: Rendezvous, *, clock: Clock) -> Rank:
    """Join the engine's ranks with this rank's part of a model folder. Collective. Also raises ModelError."""
    config = read_config(folder)
    return join_ranks(section, rendezvous, lambda mesh: load_part(folder, mesh, section), clock=clock, config=config)


def load_part(folder: Path, mesh: Mesh, section: EngineSection) -> Decoder:
    """What this rank computes with, in the engine's precision; the rest is not read. Raises ModelError, ConfigError."""
    config = read_config(folder)
    decoder = empty_part(config, mesh, section)
    cuts, table, whole = shards(config, mesh.parallel, mesh.here), parts(config), shapes(config)
    with open_folder(folder) as files, torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(_read(files, table[name], whole[name], cuts[name]))
    return decoder


def empty_part(config: ModelConfig, mesh: Mesh, section: EngineSection) -> Decoder:
    """See `load_part`: in place, but not filled."""
    decoder = cut_decoder(
        config,
        mesh,
        dtype=DTYPES[section.compute],
        max_tokens=most_tokens(section),
        wired=not section.replace_every,
    )
    settle(decoder, mesh.device)
    return decoder


def most_tokens(section: EngineSection) -> int:
    """The most tokens that one pass of a rank feeds, a probe of one context's length included."""
    return max(section.prefill_tokens, bucket(section.max_sequences), section.context_tokens)


def _read(files: TensorFiles, there: list[Part], whole: Shape, shard: Shard | None) -> Tensor:
    box = [(0, size) for size in whole]
    if shard is None:
        return files.read(there, tuple(box))
    found = [files.read(there, (*box[: shard.dim], span, *box[shard.dim + 1 :])) for span in shard.ranges]
    return torch.cat(found, shard.dim)


def led_engine(rank: Rank, *, clock: Clock, on_broken: Callable[[str], None], whole: bool = True) -> GangEngine:
    """The engine over all ranks, on rank 0; closing it leaves them. Keywords as for `GangCore`."""
    core = GangCore(rank.core, rank.star, rank.mesh, clock=clock, on_broken=on_broken, whole=whole)
    return GangEngine(core, rank.leave)


class EngineRank:
    """A worker that computes for the worker of rank 0, on a thread of its own, and gives up when that is gone."""

    def __init__(self, rank: Rank, host: Host, intake: Intake | None = None) -> None:
        self._rank, self._host, self._intake = rank, host, intake
        # Each thread has its own OpenMP setting and its own current GPU.
        self._thread = threading.Thread(
            target=self._run, args=(torch.get_num_threads(), same_gpu()), name="contraflow-engine", daemon=True
        )
        self._thread.start()

    async def receive(self, manifest: Manifest, offers: Offers) -> None:
        """See `Mate`."""
        if self._intake is None:
            raise CarrierError(f"{self._host.name} has no link to the trainer: its leader is given whole versions")
        await run_aside(partial(self._intake.receive, manifest, offers))

    async def close(self) -> None:
        """Wait for the leader to say stop. Raises DeadlineExceeded when it does not."""
        if self._intake is not None:
            self._intake.close()
        wait_s = self._rank.star.deadline_s
        await asyncio.to_thread(self._thread.join, wait_s)
        if self._thread.is_alive():
            raise DeadlineExceeded(self._host.name, "the leader of its engine to say stop", wait_s)
        self._rank.leave()

    def _run(self, threads: int, enter_gpu: Callable[[], None]) -> None:
        torch.set_num_threads(threads)
        enter_gpu()
        try:
            follow(self._rank.core, self._rank.star, self._rank.mesh, self._intake)
        except Exception as fault:  # noqa: BLE001 - a rank that cannot go on is of no use, whatever it is
            self._host.give_up(f"{type(fault).__name__}: {fault}")
