"""How long a new version takes from the trainer's tensors to an engine that serves it, and how long the engine stands.

    python -m bench.refresh [--versions 30] [--out bench/results/refresh.json]

Two processes: this one publishes, the other generates without pause and is refreshed. Beside it, in the same run and in
turn, what people do instead: torch.save or safetensors to shared memory, then load and load_state_dict in the engine's
process, with the engine standing still, no digest and no probe. Times: best, median and worst over versions.
"""

import argparse
import asyncio
import datetime
import itertools
import json
import multiprocessing as mp
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from contraflow.config import Engine as EngineSection
from contraflow.config import Weights
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.families import ModelConfig
from contraflow.rollout.native import NativeEngine
from contraflow.rollout.refresh import ChunkFetcher, Refresher
from contraflow.types import Manifest, Request, Version
from contraflow.weights import open_carrier
from contraflow.weights.manifest import expect
from contraflow.weights.memory import shared_folder
from contraflow.weights.probe import make_probe, probe_prompts
from contraflow.weights.publish import Publisher

SIZES = {
    "shipped": ModelConfig(
        family="qwen3_moe", vocab=32, dim=64, layers=3, heads=4, kv_heads=2, head_dim=16,
        experts=8, top_k=2, expert_ffn=128, renormalise=True,
    ),
    "100 MB": ModelConfig(
        family="qwen3_moe", vocab=512, dim=256, layers=8, heads=8, kv_heads=4, head_dim=32,
        experts=16, top_k=2, expert_ffn=240, renormalise=True,
    ),
}  # fmt: skip
CARRIERS: tuple[Literal["memory", "blob"], ...] = ("memory", "blob")
PEERS = ("torch.save", "safetensors")
SEQUENCES = 32
BUSY_BEFORE = os.getloadavg()
Times = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=30, help="of each way, at the shipped size; a third at 100 MB")
    parser.add_argument("--out", type=Path, default=Path("bench/results/refresh.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for size, versions in (("shipped", options.versions), ("100 MB", max(options.versions // 3, 1))):
        with tempfile.TemporaryDirectory(prefix="refresh-bench-") as folder:
            rows += measure(size, versions, Path(folder))
    for row in rows:
        print(line(row))
    record = {"command": " ".join(["python -m bench.refresh", *sys.argv[1:]]), **machine(), "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def measure(size: str, versions: int, folder: Path) -> list[dict[str, Any]]:
    """Every way in turn, version by version, so that whatever else the machine does falls on all of them."""
    decoder = new_decoder(SIZES[size], seed=0)
    here, there = mp.get_context("forkserver").Pipe()
    engine = mp.get_context("forkserver").Process(target=serve, args=(size, folder, there))
    engine.start()
    times: dict[str, list[Times]] = {way: [] for way in (*CARRIERS, *PEERS)}
    with closing(Trainer(decoder, folder)) as trainer:
        for n, way in itertools.product(range(versions + 1), times):
            with torch.no_grad():
                decoder.head.add_(0.001)
            sent, published = trainer.publish(way, n)
            here.send((way, sent))
            seen = here.recv()
            if n:  # the first of each way is warm-up
                times[way].append({**published, **seen})
    here.send(None)
    engine.join()
    nbytes = sum(tensor.nbytes for tensor in decoder.state_dict().values())
    return [{"size": size, "bytes": nbytes, "way": way, **summary(seen)} for way, seen in times.items()]


class Trainer:
    """Publishes the decoder by any way; gives what the other side needs, and its own seconds."""

    def __init__(self, decoder: Decoder, folder: Path) -> None:
        self._decoder = decoder
        self._prompts = probe_prompts(decoder.config.vocab, prompts=4, tokens=16, seed=0)
        self._shared = shared_folder() / folder.name
        self._publishers = {str(way): Publisher(open_carrier(Weights(carrier=way), folder)) for way in CARRIERS}

    def publish(self, way: str, n: int) -> tuple[Manifest | str, Times]:
        start = time.perf_counter()
        if way in PEERS:
            path = f"{self._shared}-{way}"
            (torch.save if way == "torch.save" else save_file)(dict(self._decoder.state_dict()), path)
            return path, {"publish": time.perf_counter() - start}
        probe = make_probe(self._decoder, self._prompts, 1e-3)
        probed = time.perf_counter()
        manifest = self._publishers[way].publish(
            self._decoder.state_dict(),
            # One engine serves all ways, so their versions rise together.
            version=Version(1, len(CARRIERS) * n + list(self._publishers).index(way)),
            model=self._decoder.config.digest(),
            probe=probe,
            chunk_bytes=Weights().chunk_bytes,
        )
        return manifest, {"publish": time.perf_counter() - probed, "probe": probed - start}

    def close(self) -> None:
        for publisher in self._publishers.values():
            publisher.close()
        for way in PEERS:
            Path(f"{self._shared}-{way}").unlink(missing_ok=True)


def serve(size: str, folder: Path, orders: Connection) -> None:
    """The rollout side: one engine that always has sequences to work on, refreshed whenever told."""
    torch.set_num_threads(1)
    asyncio.run(_serve(size, folder, orders))


async def _serve(size: str, folder: Path, orders: Connection) -> None:
    decoder = new_decoder(SIZES[size], seed=1)
    engine = NativeEngine(decoder, EngineSection(), clock=time.perf_counter, version=Version(0, 0))
    expected = expect(decoder.config.digest(), decoder.state_dict())
    refreshers = {
        way: Refresher(
            engine,
            ChunkFetcher(open_carrier(Weights(carrier=way), folder)),
            clock=time.perf_counter,
            expected=expected,
        )
        for way in CARRIERS
    }
    load = [asyncio.create_task(keep_busy(engine, requests(lane))) for lane in range(SEQUENCES)]
    while (order := await asyncio.to_thread(orders.recv)) is not None:
        way, sent = order
        if way in PEERS:
            orders.send(await peer(engine, decoder, way, sent))
        else:
            report = await refreshers[way].refresh(sent)
            orders.send({"fetch and verify": report.fetch_s, "stall": report.stall_s})
    for task in load:
        task.cancel()
    await engine.close()


def requests(lane: int) -> Iterator[Request]:
    prompt = np.arange(8, dtype=np.int32)
    for turn in itertools.count():
        yield Request(id=f"{lane}-{turn}", prompt=prompt, seed=lane, max_new_tokens=200)


async def keep_busy(engine: NativeEngine, stream: Iterator[Request]) -> None:
    for request in stream:
        await engine.generate(request)


async def peer(engine: NativeEngine, decoder: Decoder, way: str, path: str) -> Times:
    """Read the file and load it into the model that generates, on the engine's own thread between two steps."""

    def load() -> Times:
        start = time.perf_counter()
        state = torch.load(path, weights_only=True) if way == "torch.save" else load_file(path)
        decoder.load_state_dict(state)
        return {"stall": time.perf_counter() - start}

    return await engine._stepper.ask(load)


def summary(seen: list[Times]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "best": round(min(times[name] for times in seen), 6),
            "median": round(statistics.median(times[name] for times in seen), 6),
            "worst": round(max(times[name] for times in seen), 6),
        }
        for name in seen[0]
    }


def line(row: dict[str, Any]) -> str:
    parts = [
        f"{name} {1e3 * value['best']:.1f} / {1e3 * value['median']:.1f} / {1e3 * value['worst']:.1f} ms"
        for name, value in row.items()
        if isinstance(value, dict)
    ]
    return f"{row['size']:8s} {row['bytes'] / 1e6:6.1f} MB  {row['way']:12s} " + "  ".join(parts)


def machine() -> dict[str, Any]:
    names = [text for text in Path("/proc/cpuinfo").read_text().splitlines() if text.startswith("model name")]
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": names[0].partition(":")[2].strip() if names else platform.processor(),
        "cores": os.cpu_count(),
        "load before": [round(load, 2) for load in BUSY_BEFORE],  # the two processes of this bench make it 2
        "python": platform.python_version(),
        "torch": torch.__version__,
        "engine": f"native, {SEQUENCES} sequences in flight, one thread",
        "values": "seconds: best, median and worst over versions",
    }


if __name__ == "__main__":
    main()
