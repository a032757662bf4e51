"""The trainer on one CUDA device or several: tokens a second and MFU of whole updates, and where their time goes.

    python -m bench.train_gpu [--variants whole,whole+all] [--starts 2] [--no-profile]
    python -m bench.train_gpu --variants whole+all,ep2,ep2+all,dp2 --no-profile    # the last three take two GPUs

The work of an RL update at the shape of OLMoE-1B-7B: random fp32 master weights, bf16 compute, packed micro-batches of
1k to 4k-token sequences of which all tokens but the first are trained, the clipped policy loss without load balancing,
gradient clipping, AdamW. Each start of each variant is a process of its own, or one a rank, and as many micro-batches;
the profile is of one more update. A rehearsal on a CPU: `--device cpu --variants tiny,tiny-ep2`.

MFU = model FLOP / (seconds * 989e12 * GPUs), 989e12 being the H200's dense bf16 FLOP/s as its maker states them.
Model FLOP = 6 * (matmul weights a token meets) * tokens + 6 * V * D * trained tokens + the causal half of attention,
6 * L^2 * heads * head_dim per sequence and layer. What is computed twice to save memory is not counted twice.
"""

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.record import spread, write
from bench.rollout_gpu import SHAPES
from bench.trace import by_group, scopes
from contraflow import config
from contraflow.algo.loss import Bounds, Sequences, policy_loss, ppo
from contraflow.model.decoder import Decoder
from contraflow.model.families import ModelConfig
from contraflow.parallel.data import local, shard_rows
from contraflow.parallel.devices import device_of, enter_device
from contraflow.parallel.mesh import Mesh, open_mesh
from contraflow.parallel.spread import Spread, cut_decoder, settle
from contraflow.telemetry import Account
from contraflow.train.crew import open_crew
from contraflow.train.forward import Fed, Scored
from contraflow.train.optimizer import Optimizer
from contraflow.train.update import Updater
from contraflow.types import Batch

PEAK = 989e12
OLMOE = SHAPES["olmoe-1b-7b"]
WARM, TIMED = 2, 5
VARIANT_DEADLINE_S = 150


ONE_RANK = config.Parallel()


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What is trained and how."""

    shape: ModelConfig = OLMOE
    layers: int = 16
    tokens: int = 16384  # of a micro-batch
    micro: int = 4  # micro-batches of an update
    lengths: tuple[int, int] = (1024, 4096)  # of sequences, drawn evenly
    recompute: bool = False
    split_head: bool = False
    fuse: bool = False
    hold_copies: bool = False
    parallel: config.Parallel = ONE_RANK

    @property
    def model(self) -> ModelConfig:
        return dataclasses.replace(self.shape, layers=self.layers)


TINY = Variant(
    shape=dataclasses.replace(OLMOE, vocab=96, dim=64, heads=2, kv_heads=2, head_dim=32, expert_ffn=32, experts=8),
    layers=2,
    tokens=192,
    micro=2,
    lengths=(16, 64),
)
NVLINK = config.Parallel(dp=2, ep=2, dispatch="nvlink")
FAST: dict[str, Any] = {"split_head": True, "fuse": True, "hold_copies": True}
VARIANTS = {
    "whole": Variant(recompute=True),  # all of OLMoE's layers, which leaves no room for activations
    "whole+head": Variant(recompute=True, split_head=True),
    "whole+head+fuse": Variant(recompute=True, split_head=True, fuse=True),
    "whole+all": Variant(recompute=True, **FAST),
    "kept+all": Variant(layers=14, tokens=8192, micro=8, **FAST),  # fewer layers, but nothing computed twice
    "shallow": Variant(layers=8),
    "shallow+all": Variant(layers=8, **FAST),
    "ep2": Variant(recompute=True, parallel=config.Parallel(dp=2, ep=2)),
    "ep2+all": Variant(recompute=True, split_head=True, fuse=True, parallel=config.Parallel(dp=2, ep=2)),
    "ep2-kept+all": Variant(split_head=True, fuse=True, tokens=8192, micro=8, parallel=config.Parallel(dp=2, ep=2)),
    "ep2-nvlink+all": Variant(recompute=True, split_head=True, fuse=True, parallel=NVLINK),
    "ep2-nvlink-kept+all": Variant(split_head=True, fuse=True, tokens=8192, micro=8, parallel=NVLINK),
    "dp2": Variant(recompute=True, split_head=True, fuse=True, parallel=config.Parallel(dp=2)),
    "tiny": TINY,
    "tiny-ep2": dataclasses.replace(TINY, parallel=config.Parallel(dp=2, ep=2)),
    "tiny+all": dataclasses.replace(TINY, recompute=True, **FAST),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default="whole,whole+all,kept+all,whole+head,whole+head+fuse")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=480, help="no process is started after that")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # what a process of its own is told to do
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("ROW", json.dumps(as_rank(VARIANTS[options.one], options)), flush=True)
        return
    names = options.variants.split(",")
    starts: dict[str, list[dict[str, Any] | None]] = {name: [] for name in names}
    began = time.perf_counter()
    for number, name in itertools.product(range(options.starts), names):
        if time.perf_counter() - began < options.seconds:
            starts[name].append(started(name, options, number))
    rows = [{"variant": name, **summary([row for row in starts[name] if row])} for name in names if any(starts[name])]
    facts = {"gpu": torch.cuda.get_device_name()} if options.device == "cuda" else {}
    print("wrote", write("train_gpu", rows, peak_flops=PEAK, **facts))
    show(rows)
    if len(rows) < len(names):
        sys.exit("a variant gave no result: see above")


def started(name: str, options: argparse.Namespace, number: int) -> dict[str, Any] | None:
    """One start of a variant's processes; only the first is profiled. None when it failed, its output shown."""
    command = [sys.executable, "-m", "bench.train_gpu", "--one", name, "--device", options.device]
    if number or options.no_profile:
        command.append("--no-profile")
    environment = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command += ["--meeting", f"file://{folder}/store"]
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], env=environment, text=True, stdout=log, stderr=log)
            for rank in range(VARIANTS[name].parallel.ranks)
            for log in [(Path(folder) / f"rank-{rank}").open("w")]
        ]
        try:
            for process in ranks:
                process.wait(max(1.0, VARIANT_DEADLINE_S - (time.perf_counter() - began)))
        except subprocess.TimeoutExpired:
            print(f"{name} took more than {VARIANT_DEADLINE_S} s", flush=True)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        texts = [(Path(folder) / f"rank-{rank}").read_text() for rank in range(len(ranks))]
    rows = [json.loads(line[4:]) for line in texts[0].splitlines() if line.startswith("ROW ")]
    codes = [process.returncode for process in ranks]
    print(f"START {name} {number}: {time.perf_counter() - began:.0f} s, exit {codes}", flush=True)
    if not rows:
        print("\n".join(text[-3000:] for text in texts), flush=True)
    return rows[0] if rows else None


def as_rank(variant: Variant, options: argparse.Namespace) -> dict[str, Any]:
    """One rank of a variant, which may be the only one."""
    if variant.parallel.ranks == 1:
        return measure(variant, options, None)
    device = device_of(options.device, options.rank)
    enter_device(device)
    with open_mesh(variant.parallel, rank=options.rank, init_method=options.meeting, device=device) as mesh:
        return measure(variant, options, mesh)


def measure(variant: Variant, options: argparse.Namespace, mesh: Mesh | None) -> dict[str, Any]:
    """Seconds of each timed update, and the profile of one."""
    cuda = options.device == "cuda"
    spread_out = random_spread(variant, options.device, mesh)
    decoder, account = spread_out.decoder, Account(time.perf_counter)
    optimizer = Optimizer(decoder, config.Train(), spread_out)
    updater = Updater(decoder, optimizer, account, open_crew(decoder, mesh, account, temperature=1.0))
    rng, gpus = np.random.default_rng(0), variant.parallel.ranks
    micro = variant.micro * gpus
    seconds, flops = [], []
    for number in range(WARM + TIMED):
        batches = [random_batch(variant, rng, micro) for _ in range(micro)]
        began = time.perf_counter()
        updater.update(batches, objective)  # it reads the loss and the gradient norm, and so waits for both
        if cuda:
            torch.cuda.synchronize()
        if number >= WARM:
            seconds.append(time.perf_counter() - began)
            flops.append(sum(model_flops(variant.model, batch) for batch in batches))
    row = {
        "seconds": seconds,
        "gpus": gpus,
        "tokens": micro * variant.tokens,
        "mfu": [flop / second / PEAK / gpus for flop, second in zip(flops, seconds, strict=True)],
        "parameters": sum(int(np.prod(shape)) for shape in spread_out.shapes.values()),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if cuda else 0.0,
    }
    if not options.no_profile:
        row["profile"] = profile(updater, decoder, [random_batch(variant, rng, micro) for _ in range(micro)])
    return row


def random_spread(variant: Variant, device: str, mesh: Mesh | None) -> Spread:
    """fp32 weights made where they are held, norms 1; compute in bf16 on a GPU."""
    compute = torch.bfloat16 if device == "cuda" or variant.split_head else torch.float32
    if mesh is None:
        decoder = Decoder(variant.model, device=device, compute_dtype=compute)
    else:
        decoder = cut_decoder(variant.model, mesh, compute=compute, max_tokens=variant.tokens)
        shard_rows(decoder, mesh)
        settle(decoder, mesh.device)
    decoder.recompute, decoder.split_head = variant.recompute, variant.split_head
    decoder.hold_copies = variant.hold_copies
    if variant.fuse:
        decoder.fuse()
    noise = torch.Generator(decoder.head.device).manual_seed(0)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            held = local(weight)
            held.fill_(1.0) if name.endswith("norm") else held.normal_(0.0, 0.02, generator=noise)
    return Spread(decoder, mesh)


def random_batch(variant: Variant, rng: np.random.Generator, micro: int) -> Batch:
    """`variant.tokens` tokens in sequences of random lengths, the last taking what is left; one of `micro` batches."""
    least, most = variant.lengths
    starts = [0]
    while variant.tokens - starts[-1] > most:
        starts.append(starts[-1] + int(rng.integers(least, min(most, variant.tokens - starts[-1] - 2), endpoint=True)))
    starts.append(variant.tokens)
    lengths = np.diff(starts)
    mask = np.ones(variant.tokens, np.bool_)
    mask[starts[:-1]] = False
    share = 1 / (mask.sum() * micro)
    return Batch(
        tokens=rng.integers(0, variant.shape.vocab, variant.tokens, dtype=np.int32),
        positions=np.arange(variant.tokens, dtype=np.int32) - np.repeat(starts[:-1], lengths).astype(np.int32),
        starts=np.array(starts, np.int32),
        mask=mask,
        behaviour=np.full(variant.tokens, -np.log(variant.shape.vocab), np.float32),
        advantages=rng.standard_normal(variant.tokens, np.float32),
        weights=np.where(mask, np.float32(share), np.float32(0)),
        versions=np.zeros(variant.tokens, np.int32),
    )


def objective(batch: Batch, fed: Fed, scored: Scored) -> Tensor:
    """The policy loss of a step."""
    device = scored.logprobs_N.device
    behaviour, advantages, weights = (
        torch.from_numpy(values[batch.mask]).to(device, non_blocking=True)
        for values in (batch.behaviour, batch.advantages, batch.weights)
    )
    sequences = Sequences(torch.zeros_like(weights, dtype=torch.int64), 1)
    surrogate = ppo(scored.logprobs_N, behaviour, advantages, sequences, Bounds(0.2, 0.2))
    return policy_loss(surrogate.values_N, weights)


def model_flops(shape: ModelConfig, batch: Batch) -> float:
    """Forward and backward, as the module docstring counts them."""
    lengths = np.diff(batch.starts).astype(np.float64)
    width = shape.heads * shape.head_dim
    projections = shape.dim * (2 * width + 2 * shape.kv_heads * shape.head_dim)
    experts = shape.top_k * 3 * shape.dim * shape.expert_ffn + shape.dim * shape.experts
    attention = (lengths**2).sum() * width
    layers = shape.layers * 6 * ((projections + experts) * lengths.sum() + attention)
    return float(layers + 6 * shape.vocab * shape.dim * batch.mask.sum())


def profile(updater: Updater, decoder: Decoder, batches: list[Batch]) -> dict[str, Any]:
    """Milliseconds of one update by group of kernels, device idle time included."""
    with scopes(decoder), torch.profiler.profile() as trace:
        began = time.perf_counter()
        updater.update(batches, objective)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall = 1000 * (time.perf_counter() - began)
    return {"wall_ms": wall, **by_group(trace)}


def summary(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """All starts of a variant together."""
    seconds = [s for row in starts for s in row["seconds"]]
    tokens = starts[0]["tokens"]
    return {
        "tokens_s": spread([tokens / s for s in seconds]),
        "mfu": spread([m for row in starts for m in row["mfu"]]),
        "update_ms": spread([1000 * s for s in seconds]),
        "medians_of_starts_ms": [1000 * spread(row["seconds"])["median"] for row in starts],
        **{key: starts[0][key] for key in ("gpus", "tokens", "parameters", "peak_gib", "reserved_gib")},
        "profile": starts[0].get("profile"),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """The profiles, then one line a variant: a tail of the output has what matters."""
    for row in rows:
        if trace := row["profile"]:
            print(f"\nPROFILE {row['variant']}: {trace['wall_ms']:.0f} ms, device busy {trace['busy_ms']:.0f} ms")
            for group, ms in trace["groups_ms"].items():
                print(f"  {ms:9.1f} ms {100 * ms / max(trace['busy_ms'], 1e-9):5.1f} %  {group}")
            for name, ms in trace["kernels_ms"].items():
                print(f"    {ms:9.1f} ms  {name}")
    print("\nvariant           GPUs tokens/s [least, largest]     MFU %  update ms  (starts)    parameters  peak GiB")
    for row in rows:
        rate, share, ms = row["tokens_s"], row["mfu"], row["update_ms"]
        print(
            f"{row['variant']:<17} {row['gpus']:>4} {rate['median']:10.0f} [{rate['least']:.0f}, {rate['largest']:.0f}]"
            f"  {100 * share['median']:8.2f}  {ms['median']:9.1f}  "
            f"({', '.join(f'{m:.1f}' for m in row['medians_of_starts_ms'])})"
            f"  {row['parameters'] / 1e9:8.3f}e9  {row['peak_gib']:7.1f}"
        )


if __name__ == "__main__":
    main()
