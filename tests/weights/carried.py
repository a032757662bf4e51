"""One trainer rank in this process and engines of one rank in others, joined by links: on any pair of devices."""

import os
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch

from contraflow.config import Parallel
from contraflow.errors import ContraflowError
from contraflow.model.families import ModelConfig
from contraflow.parallel.pieces import dtypes, served, shapes, trained
from contraflow.types import Manifest, Probe, Version
from contraflow.weights.bridge import Bridge, Link, open_bridge
from contraflow.weights.collective import Inbox, Outbox, contents
from contraflow.weights.reshard import Plan, plan
from tests.processes import forking

ONE = Parallel()
CONFIG = ModelConfig(
    family="qwen3_moe", vocab=97, dim=64, layers=3, heads=4, kv_heads=2, head_dim=16, experts=8, top_k=2, expert_ffn=64
)
WHOLE = shapes(CONFIG)
WIRE = dtypes(CONFIG, torch.bfloat16)
BUCKET = 1 << 16
PROBE = Probe((np.array([3, 1], np.int32),), (np.array([-0.5], np.float32),), 1e-3)
WAIT_S = 100.0


def weights(seed: int, device: torch.device) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=noise).to(device) for name, shape in WHOLE.items()}


def planned() -> Plan:
    return plan(trained(CONFIG, ONE), served(CONFIG, ONE), WIRE, bucket_bytes=BUCKET)


def join(link: Link, rank: int, device: torch.device, deadline_s: float) -> Bridge:
    return open_bridge(link, [], rank=rank, sources=1, targets=1, device=device, deadline_s=deadline_s, join_s=60.0)


def serve(link: Link, where: str, wired: str, orders: Connection) -> None:
    """An engine's rank: receives what it is told to, and says what it got."""
    torch.set_num_threads(1)
    device = torch.device(where)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    bridge = join(link, 1, torch.device(wired), 20.0)
    inbox = Inbox(planned(), 0, WHOLE, WIRE, kind="collective", device=device)
    orders.send("joined")
    while (order := orders.recv()) is not None:
        manifest, seed = order
        try:
            got = inbox.receive(manifest, bridge)
        except ContraflowError as fault:
            orders.send(str(fault))
            continue
        wanted = weights(seed, device)
        wrong = [name for name, tensor in got.items() if not torch.equal(tensor, wanted[name].to(WIRE[name]))]
        orders.send("whole" if not wrong and got.keys() == wanted.keys() else f"wrong: {wrong}")
    os._exit(0)


@dataclass
class Trainer:
    """The trainer's rank. `wired` are the devices of what travels, on the two sides."""

    folder: Path
    device: torch.device
    wired: tuple[str, str]
    engine_device: str
    deadline_s: float = 20.0
    number: int = 0
    engines: list[BaseProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plan = planned()
        self.outbox = Outbox(self.plan, 0, WIRE, device=torch.device(self.wired[0]), deadline_s=5.0)

    def start(self) -> tuple[Bridge, Connection]:
        """A new engine, and the trainer's end of the link to it."""
        self.number += 1
        link = Link("rollout-0", self.number, f"file://{self.folder}/meeting")
        here, there = forking().Pipe()
        engine = forking().Process(target=serve, args=(link, self.engine_device, self.wired[1], there))
        engine.start()
        self.engines.append(engine)
        bridge = join(link, 0, torch.device(self.wired[0]), self.deadline_s)
        assert here.poll(WAIT_S)
        assert here.recv() == "joined"
        return bridge, here

    def publish(self, n: int) -> Manifest:
        digests = self.outbox.pack(Version(1, n), weights(n, self.device))
        return Manifest(
            version=Version(1, n),
            parent=None,
            model="m",
            chunk_bytes=BUCKET,
            probe=PROBE,
            **contents(self.plan, [digests], WHOLE, WIRE),
        )

    def carry(self, n: int, bridge: Bridge, engine: Connection) -> str:
        """Publish and send version `n`; what the engine says of it."""
        manifest = self.publish(n)
        self.outbox.hold(manifest.version, "rollout-0")
        engine.send((manifest, n))
        self.outbox.send(manifest.version, bridge)
        self.outbox.drop("rollout-0")
        assert engine.poll(WAIT_S)
        return str(engine.recv())

    def close(self) -> None:
        for engine in self.engines:
            engine.kill()
            engine.join()


def versions_arrive_and_damage_is_named(trainer: Trainer) -> None:
    bridge, engine = trainer.start()
    assert [trainer.carry(n, bridge, engine) for n in (1, 2, 3)] == ["whole"] * 3
    manifest = trainer.publish(4)
    trainer.outbox._sets[-1].buckets[1][7] ^= 1
    trainer.outbox.hold(manifest.version, "rollout-0")
    engine.send((manifest, 4))
    trainer.outbox.send(manifest.version, bridge)
    trainer.outbox.drop("rollout-0")
    assert engine.poll(WAIT_S)
    assert "version 1.4, bucket 1 of" in engine.recv()
    assert trainer.carry(5, bridge, engine) == "whole"  # the link is as good as before
    engine.send(None)
    trainer.engines[0].join(WAIT_S)


def an_engine_killed_in_mid_transfer_is_named_and_its_successor_served(trainer: Trainer) -> None:
    import threading

    bridge, engine = trainer.start()
    assert trainer.carry(1, bridge, engine) == "whole"
    manifest = trainer.publish(2)
    trainer.outbox.hold(manifest.version, "rollout-0")
    killing = threading.Timer(0.3, trainer.engines[0].kill)  # it was not told to receive: the transfer has begun
    killing.start()
    try:
        trainer.outbox.send(manifest.version, bridge)
    except ContraflowError as fault:
        assert "rank 0 of rollout-0" in str(fault)  # noqa: PT017
        bridge.abort(str(fault))
    else:
        raise AssertionError("a transfer without a receiver ended well")
    killing.join()
    trainer.outbox.drop("rollout-0")
    assert trainer.carry(3, *trainer.start()) == "whole"
