"""A new version from one GPU that trains to another that generates: link, transfer, stall, and what both lose by it.

    python -m bench.refresh_gpu [--versions 6] [--no-host]
    python -m bench.refresh_gpu --device cpu --layers 1 --dim 64 --experts 4 --ffn 32 --vocab 256   # a rehearsal

OLMoE-1B-7B's shape, random weights: fp32 masters that train (SGD, bf16 compute) on the first GPU, bf16 on the second,
where `--sequences` are always in flight. By carrier: `collective`, and `memory` through the host. The link is measured
between the same two processes, by the same group, 1 GiB at a time. A transfer is all from asking to proven bytes.
"""

import argparse
import multiprocessing as mp
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench.record import write
from bench.refreshed import DEADLINE_S, NAME, ONE, devices, half, join, model, random_decoder, serve
from contraflow.config import Weights
from contraflow.errors import ContraflowError
from contraflow.model.attention import PackedPlan
from contraflow.model.logprobs import token_logprobs
from contraflow.parallel.devices import device_of, enter_device
from contraflow.parallel.pieces import dtypes, served, shapes, trained
from contraflow.types import Manifest, Version
from contraflow.weights import open_carrier
from contraflow.weights.collective import Outbox, contents
from contraflow.weights.probe import as_probe, probe_logprobs, probe_prompts
from contraflow.weights.publish import Publisher
from contraflow.weights.reshard import plan

TRAINED_TOKENS = 2048  # of one step
GOAL_STALL_MS, GOAL_RATIO = 100.0, 1.5


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="refresh-gpu-") as folder:
        spawn = mp.get_context("spawn")
        (orders, heard), (calls, asked) = spawn.Pipe(), spawn.Pipe()
        engine = spawn.Process(target=serve, args=(options, Path(folder), heard, asked), daemon=True)
        engine.start()
        heard.close()
        asked.close()
        trainer = Trainer(options, Path(folder), orders, calls)
        rows = trainer.measure()
        orders.send(None)
        engine.join(30)
        trainer.close()
    if options.device == "cuda":
        print("wrote", write("refresh_gpu", rows, options=vars(options), gpu=torch.cuda.get_device_name()))
    print("\n".join(lines(rows)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--ffn", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--versions", type=int, default=6, help="by the collective carrier, after one that warms up")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--no-host", action="store_true", help="leave out the carrier through the host")
    return parser.parse_args()


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Trainer:
    """This process: trains all the time, publishes now and then, and sends when the engine asks."""

    def __init__(self, options: argparse.Namespace, folder: Path, orders: Connection, calls: Connection) -> None:
        self.options, self.folder, self.orders = options, folder, orders
        self.device = device_of(devices(options)[0])
        enter_device(self.device)
        self.config = model(options)
        self.decoder = random_decoder(options, torch.float32, self.device, 0)
        self.whole, self.wired = shapes(self.config), dtypes(self.config, half(options))
        mine, theirs = trained(self.config, ONE), served(self.config, ONE)
        self.plan = plan(mine, theirs, self.wired, bucket_bytes=options.bucket_mib << 20)
        self.outbox = Outbox(self.plan, 0, self.wired, device=self.device, deadline_s=DEADLINE_S)
        self.bridge = join(options, folder, 0, "link")
        self.bridges = [self.bridge]
        self.steps: list[tuple[float, float]] = []  # when each ended, how long it took
        self.prompts = probe_prompts(self.config.vocab, prompts=4, tokens=16, seed=0)
        self.packed_s = 0.0
        noise = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, self.config.vocab, (TRAINED_TOKENS + 1,), generator=noise).to(self.device)
        self.answering = threading.Thread(target=self._answer, args=(calls,), daemon=True)
        self.answering.start()

    def measure(self) -> list[dict[str, Any]]:
        """Everything in turn: the link, the pace of both sides undisturbed, then versions by each carrier."""
        link = self._link()
        self.orders.send("load")
        self.bridge = join(self.options, self.folder, 0, NAME)
        self.bridges.append(self.bridge)
        assert self.orders.recv() == "loaded"
        for _ in range(3):
            self._step()
        self.steps.clear()
        self.orders.send("pace")
        quiet = self._until_heard()
        quiet_ms = 1e3 * statistics.median(took for _, took in self.steps)
        rows = [
            {"way": "link", "gb_s": link},
            {"way": "quiet", "step_ms": quiet_ms, "tokens_s": quiet},
            self._versions("collective", self.options.versions, self._pack),
        ]
        if not self.options.no_host:
            rows.append(self._versions("memory", 1, self._by_host()))
        return rows

    def close(self) -> None:
        """The engine has ended, and so has what answers it."""
        self.answering.join(30)
        for bridge in self.bridges:
            bridge.abort("the end")

    def _link(self) -> float:
        size = 1 << 30 if self.device.type == "cuda" else 1 << 22
        data_B = torch.ones(size, dtype=torch.uint8, device=self.device)
        for batch in range(2):  # the first one connects
            assert self.orders.recv() == "ready"
            messages = [self.bridge.send(data_B, 0, (0,), tag=index) for index in range(8 if batch else 1)]
            for message in messages:
                message.land()
        return float(self.orders.recv())

    def _versions(self, way: str, count: int, publish: Callable[[int], Manifest]) -> dict[str, Any]:
        rows = []
        for n in range(count + 1):
            self.packed_s, began = 0.0, time.perf_counter()
            try:
                manifest = publish(n)
            except ContraflowError as fault:
                return {"way": way, "fault": str(fault)}
            published_s = time.perf_counter() - began
            self.steps.clear()
            self.orders.send((way, manifest))
            report = self._until_heard()
            if isinstance(report, str):
                return {"way": way, "fault": report}
            took = [took for _, took in self.steps]
            step_ms = 1e3 * statistics.median(took) if took else 0.0
            if n or not count:  # the first one connects, allocates, and keeps a copy to roll back to
                rows.append({"publish_s": published_s, "pack_s": self.packed_s, "step_ms": step_ms, **report})
        return {"way": way, "versions": len(rows), "held_gb": self.outbox.nbytes / 1e9, **medians(rows)}

    def _until_heard(self) -> Any:
        while not self.orders.poll():
            self._step()
        return self.orders.recv()

    def _step(self) -> None:
        """Forward, backward, and an update that changes every weight."""
        began = time.perf_counter()
        count = len(self.tokens) - 1
        positions = torch.arange(count, device=self.device)
        with self.decoder.computing_in(half(self.options)):
            hidden = self.decoder(self.tokens[:-1], positions, PackedPlan.of([0, count], self.device))
            logprobs, _ = token_logprobs(hidden, self.decoder.head, self.tokens[1:])
            logprobs.mean().neg().backward()
        with torch.no_grad():
            for weight in self.decoder.parameters():
                if weight.grad is not None:
                    weight.sub_(weight.grad, alpha=1e-3)
                    weight.grad = None
        sync(self.device)
        self.steps.append((time.perf_counter(), time.perf_counter() - began))

    def _facts(self, n: int) -> dict[str, Any]:
        with torch.no_grad(), self.decoder.computing_in(half(self.options)):
            given = probe_logprobs(self.decoder, self.prompts)
        digest = self.config.digest()
        return {"version": Version(1, n), "model": digest, "probe": as_probe(self.prompts, given, 0.05)}

    def _pack(self, n: int) -> Manifest:
        facts = self._facts(n)
        sync(self.device)
        began = time.perf_counter()
        digests = self.outbox.pack(Version(1, n), dict(self.decoder.named_parameters()))
        self.packed_s = time.perf_counter() - began
        inside = contents(self.plan, [digests], self.whole, self.wired)
        return Manifest(parent=None, chunk_bytes=self.options.bucket_mib << 20, **facts, **inside)

    def _by_host(self) -> Callable[[int], Manifest]:
        publisher = Publisher(open_carrier(Weights(carrier="memory"), self.folder), keep=2)

        def publish(n: int) -> Manifest:
            tensors = {k: v.detach().to(self.wired[k]).cpu() for k, v in self.decoder.named_parameters()}
            return publisher.publish(tensors, chunk_bytes=1 << 24, **self._facts(1000 + n))

        return publish

    def _answer(self, calls: Connection) -> None:
        enter_device(self.device)
        ways: dict[str, Callable[..., Any]] = {
            "hold": lambda link, version: self.outbox.hold(version, link),
            "send": lambda link, version: self.outbox.send(version, self.bridge),
            "let_go": self.outbox.drop,
        }
        while True:
            try:
                name, given = calls.recv()
            except EOFError:  # the engine has ended
                return
            try:
                ways[name](*given)
                if name == "send":
                    self.outbox.drop(NAME)
                calls.send(None)
            except ContraflowError as fault:
                calls.send(fault)


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    found = {name: round(statistics.median(row[name] for row in rows), 5) for name in rows[0]}
    return found | {"worst_stall_ms": round(max(row["stall_ms"] for row in rows), 2)}


def lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The result, for people."""
    link, quiet, *ways = rows
    yield f"link             {link['gb_s']:8.1f} GB/s, 1 GiB messages"
    yield f"undisturbed      {quiet['step_ms']:8.1f} ms a training step, {quiet['tokens_s']:.0f} tokens/s generated"
    for row in ways:
        if "fault" in row:
            yield f"{row['way']:16s} {row['fault']}"
            continue
        rate = row["gb"] / row["fetch_s"]
        yield (
            f"{row['way']:16s} {row['fetch_s']:8.4f} s for {row['gb']:.3f} GB: {rate:.1f} GB/s, "
            f"{link['gb_s'] / rate:.2f}x of bytes over the link (goal {GOAL_RATIO}x)"
        )
        yield (
            f"{'':16s} {row['stall_ms']:8.1f} ms stall, worst {row['worst_stall_ms']:.1f} (goal {GOAL_STALL_MS:.0f}); "
            f"trainer stands {1e3 * row['publish_s']:.0f} ms, {1e3 * row['pack_s']:.0f} of it packing"
        )
        yield (
            f"{'':16s} {row['step_ms']:8.1f} ms a training step and {row['tokens_s']:.0f} tokens/s meanwhile; "
            f"{row['held_gb']:.2f} GB lie on the trainer's GPU"
        )


if __name__ == "__main__":
    main()
