"""The other process of `bench.refresh_gpu`: an engine that is always busy, refreshed when told; and what both share.

It calls the trainer over a pipe, where a run would over its runtime; all else is as in a run.
"""

import argparse
import asyncio
import itertools
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from contraflow.config import Engine, Parallel, Weights
from contraflow.errors import CarrierError, ContraflowError
from contraflow.model.decoder import Decoder
from contraflow.model.families import ModelConfig
from contraflow.parallel.devices import device_of, enter_device
from contraflow.parallel.pieces import shapes
from contraflow.rollout.intake import PartFetcher, Route, open_intake
from contraflow.rollout.native import NativeEngine
from contraflow.rollout.refresh import ChunkFetcher, Refresher
from contraflow.runtime.base import Address
from contraflow.types import Request, Version
from contraflow.weights import open_carrier
from contraflow.weights.bridge import Bridge, Link, open_bridge
from contraflow.weights.manifest import Expected

ONE = Parallel()
NAME = "rollout-0"
DEADLINE_S = 60.0


def model(options: argparse.Namespace) -> ModelConfig:
    head = min(128, options.dim)
    return ModelConfig(
        family="olmoe", vocab=options.vocab, dim=options.dim, layers=options.layers, heads=options.dim // head,
        kv_heads=options.dim // head, head_dim=head, experts=options.experts, top_k=min(8, options.experts),
        expert_ffn=options.ffn, rope_theta=1e4, context=4096,
    )  # fmt: skip


def devices(options: argparse.Namespace) -> tuple[str, str]:
    return ("cuda:0", "cuda:1") if options.device == "cuda" else ("cpu", "cpu")


def half(options: argparse.Namespace) -> torch.dtype:
    return torch.bfloat16 if options.device == "cuda" else torch.float32


def random_decoder(options: argparse.Namespace, dtype: torch.dtype, device: torch.device, seed: int) -> Decoder:
    decoder = Decoder(model(options), dtype=dtype, device=device)
    noise = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            weight.fill_(1.0) if name.endswith("norm") else weight.normal_(0.0, 0.02, generator=noise)
    return decoder


class PipeRef:
    """The trainer's rank as the engine calls it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self.address = pipe, Address("trainer-0", "pipe")

    async def call(self, deadline_s: float, method: Callable[..., Any], /, *args: Any) -> Any:
        fault = await asyncio.to_thread(self._ask, deadline_s, method.__name__, args)
        if fault is not None:
            raise fault

    def _ask(self, deadline_s: float, name: str, args: tuple[Any, ...]) -> Any:
        self._pipe.send((name, args))
        if not self._pipe.poll(deadline_s):
            raise CarrierError(f"the trainer did not answer {name} within {deadline_s:g} s")
        return self._pipe.recv()


def link_to(folder: Path, name: str) -> Link:
    return Link(name, 1, f"file://{folder}/meeting")


def join(options: argparse.Namespace, folder: Path, rank: int, name: str) -> Bridge:
    device = device_of(devices(options)[rank])
    return open_bridge(link_to(folder, name), [], rank=rank, sources=1, targets=1, device=device, deadline_s=DEADLINE_S)


def serve(options: argparse.Namespace, folder: Path, orders: Connection, calls: Connection) -> None:
    """The engine's process."""
    torch.set_num_threads(1)
    device = device_of(devices(options)[1])
    enter_device(device)
    bridge = join(options, folder, 1, "link")
    orders.send("ready")
    gb_s = 0.0
    size = 1 << 30 if device.type == "cuda" else 1 << 22
    data_B = torch.empty(size, dtype=torch.uint8, device=device)
    for batch in (1, 8):
        began = time.perf_counter()
        messages = [bridge.receive(data_B, 0, (0,), tag=index) for index in range(batch)]
        for message in messages:
            message.land()
        gb_s = batch * size / 1e9 / (time.perf_counter() - began)
        orders.send("ready" if batch == 1 else gb_s)
    del data_B
    asyncio.run(Generating(options, folder, orders, calls).run())


class Generating:
    """The engine, always busy, refreshed when told."""

    def __init__(self, options: argparse.Namespace, folder: Path, orders: Connection, calls: Connection) -> None:
        self.options, self.folder, self.orders, self.calls = options, folder, orders, calls

    async def run(self) -> None:
        assert await asyncio.to_thread(self.orders.recv) == "load"
        engine, refreshers = self._open()
        self.orders.send("loaded")
        load = [asyncio.create_task(self._busy(engine, lane)) for lane in range(self.options.sequences)]
        while (order := await asyncio.to_thread(self.orders.recv)) is not None:
            began, before = time.perf_counter(), engine.report().tokens
            if order == "pace":
                await asyncio.sleep(3.0)
                self.orders.send((engine.report().tokens - before) / (time.perf_counter() - began))
                continue
            way, manifest = order
            try:
                report = await refreshers[way].refresh(manifest)
            except ContraflowError as fault:
                self.orders.send(f"{type(fault).__name__}: {fault}")
                continue
            rate = (engine.report().tokens - before) / (time.perf_counter() - began)
            told = {"gb": report.moved / 1e9, "fetch_s": report.fetch_s, "stall_ms": 1e3 * report.stall_s}
            self.orders.send({**told, "served": float(report.served), "tokens_s": rate})
        for task in load:
            task.cancel()
        await engine.close()

    def _open(self) -> tuple[NativeEngine, dict[str, Refresher]]:
        options, config = self.options, model(self.options)
        trained, mine = devices(options)
        compute = "bfloat16" if options.device == "cuda" else "float32"
        section = Engine(
            device=mine,
            compute=compute,
            context_tokens=1024,
            kv_tokens=options.sequences * 1024,
            max_sequences=options.sequences,
        )
        decoder = random_decoder(options, half(options), device_of(mine), 7).requires_grad_(False)
        engine = NativeEngine(decoder, section, clock=time.perf_counter, version=Version(0, 0))
        route = Route(
            carrier="collective",
            link=link_to(self.folder, NAME),
            trainers=(Address("trainer-0", "pipe"),),
            parallel=ONE,
            device=trained,
            dtype=compute,
            bucket_bytes=options.bucket_mib << 20,
            deadline_s=DEADLINE_S,
        )
        intake = open_intake(route, section, config, rank=0)
        fetchers = {
            "collective": PartFetcher(intake, route, lambda address: PipeRef(self.calls)),
            "memory": ChunkFetcher(open_carrier(Weights(carrier="memory"), self.folder)),
        }
        facts: dict[str, Any] = {"expected": Expected(config.digest(), shapes(config)), "deadline_s": DEADLINE_S}
        return engine, {
            way: Refresher(engine, fetcher, clock=time.perf_counter, **facts) for way, fetcher in fetchers.items()
        }

    async def _busy(self, engine: NativeEngine, lane: int) -> None:
        prompt = np.arange(32, dtype=np.int32) + lane
        for turn in itertools.count():
            await engine.generate(Request(id=f"{lane}/{turn}", prompt=prompt, seed=lane, max_new_tokens=512))
