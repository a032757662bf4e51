"""How much of a model one training step changes, what a delta of that takes, and how fast it is made and applied.

    python -m bench.delta                                  # real runs of the shipped model, some at smaller rates
    python -m bench.delta --device cuda --layers 2         # OLMoE's width, 1.05e9 parameters, real AdamW steps
    python -m bench.delta --device cpu --layers 1 --tiny   # the second, rehearsed

The first runs the recipe with a cut after every step and compares the cuts. The second trains a random decoder on the
next token of random rows (`Updater`, `Optimizer`: fp32 masters, bf16 compute). Both lay the weights out as a version in
bf16 would be (router and head fp32), encode every chunk against the step before, apply it and compare all bits. Shares
are of elements whose bits changed, fp32 of the masters and bf16 of what travels as bf16. GB/s are of the whole
version's bytes, without digests: on one GPU, or in seconds of one CPU thread's own time, whatever else is running.
"""

import argparse
import dataclasses
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.record import spread, write
from bench.rollout_gpu import SHAPES
from bench.train_gpu import TINY, Variant, random_batch, random_spread
from contraflow import config
from contraflow.model.decoder import Decoder
from contraflow.model.folder import load_folder
from contraflow.restoring import find_cut
from contraflow.telemetry import Account
from contraflow.train.checkpoint import export
from contraflow.train.forward import Fed, Scored
from contraflow.train.optimizer import Optimizer
from contraflow.train.update import Updater
from contraflow.types import Batch
from contraflow.weights.delta import apply, encode
from contraflow.weights.manifest import layout, spans, total_bytes, views

RECIPE = "recipes/tiny_cpu.toml"
STEPS, WARM = 16, 10  # of a run; the rate rises over the recipe's first 10 updates, which are left out
Weights = dict[str, Tensor]
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu or cuda: the random decoder; left out: runs of the shipped model")
    parser.add_argument("--rates", type=float, nargs="+", help="learning rates")
    parser.add_argument("--shape", default="olmoe-1b-7b", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--chunk-mib", type=int, help="1 by default, 64 on a GPU")
    parser.add_argument("--tiny", action="store_true", help="a tiny width: a rehearsal")
    parser.add_argument("--out", help="name of the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chunk_bytes = (options.chunk_mib or (64 if options.device == "cuda" else 1)) << 20
    if options.device is None:
        rates, source = options.rates or [4e-4, 1e-5, 1e-6], shipped
    else:
        rates, source = options.rates or [1e-6], random_one
    rows = []
    for rate in rates:
        states = source(rate, options)
        rows.append({"learning_rate": rate, **summary(list(compared(states, chunk_bytes)))})
        torch.cuda.empty_cache()
    facts = {"gpu": torch.cuda.get_device_name()} if options.device == "cuda" else {}
    name = options.out or ("delta" if options.device is None else f"delta_{options.shape}_{options.device}")
    print("wrote", write(name, rows, chunk_bytes=chunk_bytes, **facts))
    show(rows)


def shipped(rate: float, _: argparse.Namespace) -> Iterator[tuple[Weights, Weights]]:
    """Masters, and what travels in bf16, after each step of a real run."""
    with tempfile.TemporaryDirectory(prefix="delta-bench-") as folder:
        keys = {
            "run.steps": STEPS, "run.eval_every": STEPS, "run.eval_tasks": 0, "train.learning_rate": rate,
            "train.checkpoint_every": 1, "train.keep_checkpoints": STEPS + 1,
        }  # fmt: skip
        sets = itertools.chain.from_iterable(("--set", f"{key}={value}") for key, value in keys.items())
        command = [sys.executable, "-c", "from contraflow.cli import main; main()"]
        command += ["run", RECIPE, "--folder", f"{folder}/run", *sets]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for step in range(WARM, STEPS + 1):
            space, manifest = find_cut(
                f"{folder}/run/checkpoints/line-0-step-{step}", clock=time.monotonic, pause=Event().wait
            )
            export(space, manifest.id.name, Path(folder, "model"))
            kinds = (torch.float32, torch.bfloat16)
            yield tuple(load_folder(Path(folder, "model"), dtype=kind).state_dict() for kind in kinds)


def random_one(rate: float, options: argparse.Namespace) -> Iterator[tuple[Weights, Weights]]:
    """The same of a random decoder, before the first step and after each; the masters are overwritten by the next."""
    variant = Variant(shape=SHAPES[options.shape], layers=options.layers, tokens=8192, micro=1, lengths=(512, 1024))
    if options.tiny:
        variant = dataclasses.replace(TINY, layers=options.layers, micro=1)
    decoder = random_spread(variant, options.device, None).decoder
    train = config.Train(learning_rate=rate, warmup_updates=0, betas=(0.9, 0.99))
    updater = Updater(decoder, Optimizer(decoder, train), Account(time.perf_counter))
    like = Decoder(variant.model, dtype=torch.bfloat16, device="meta").state_dict()
    print(f"{sum(p.numel() for p in decoder.parameters()):,} parameters", flush=True)
    rng = np.random.default_rng(0)
    for step in range(options.steps + 1):
        masters = decoder.state_dict()
        yield masters, {name: tensor.to(like[name].dtype) for name, tensor in masters.items()}
        if step < options.steps:
            updated = updater.update([random_batch(variant, rng, 1)], next_token)
            print(f"step {step}: loss {updated.loss:.3f}, learning rate {rate:g}", flush=True)


def next_token(batch: Batch, fed: Fed, scored: Scored) -> Tensor:
    """Cross-entropy of the next token, mean over all that are trained."""
    weights_N = torch.from_numpy(batch.weights[batch.mask]).to(scored.logprobs_N.device)
    return -(weights_N * scored.logprobs_N).sum()


def compared(states: Iterable[tuple[Weights, Weights]], chunk_bytes: int) -> Iterator[Row]:
    """One row a step: what changed, and what a delta of it takes."""
    before: tuple[Weights, Tensor] | None = None
    for masters, sent in states:
        now_B = laid_out(sent)
        if before is not None:
            halves = {name: tensor for name, tensor in sent.items() if tensor.dtype == torch.bfloat16}
            old = views(before[1], layout(sent))
            yield {
                "share_fp32": share(before[0], masters),
                "share_bf16": share({name: old[name] for name in halves}, halves),
                **delta_of(before[1], now_B, chunk_bytes),
            }
        before = {name: tensor.clone() for name, tensor in masters.items()}, now_B


def share(before: Weights, after: Weights) -> float:
    """Of elements whose bits differ."""
    changed = sum(int((bits(before[name]) != bits(tensor)).sum()) for name, tensor in after.items())
    return changed / sum(tensor.numel() for tensor in after.values())


def bits(values: Tensor) -> Tensor:
    return values.view({4: torch.int32, 2: torch.int16}[values.element_size()])


def laid_out(sent: Weights) -> Tensor:
    """The version's bytes, as `publish` lays them out."""
    entries = layout(sent)
    version_B = torch.zeros(total_bytes(entries), dtype=torch.uint8, device=next(iter(sent.values())).device)
    for name, place in views(version_B, entries).items():
        place.copy_(sent[name])
    return version_B


def delta_of(old_B: Tensor, new_B: Tensor, chunk_bytes: int) -> Row:
    """Bytes and seconds of the delta, which is proven to give every byte."""
    chunks = spans(len(new_B), chunk_bytes)
    made_B = old_B.clone()
    began = now(old_B)
    changes = [encode(old_B[start:end], new_B[start:end]) for start, end in chunks]
    encoded = now(old_B)
    for (start, end), change_B in zip(chunks, changes, strict=True):
        apply(made_B[start:end], change_B)
    applied = now(old_B)
    if not torch.equal(made_B, new_B):
        raise RuntimeError("the delta did not give the new version")
    return {
        "bytes": len(new_B),
        "delta_bytes": sum(map(len, changes)),
        "encode_gb_s": len(new_B) / (encoded - began) / 1e9,
        "apply_gb_s": len(new_B) / (applied - encoded) / 1e9,
    }


def now(beside: Tensor) -> float:
    if not beside.is_cuda:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def summary(steps: Sequence[Row]) -> Row:
    names = ("share_fp32", "share_bf16", "delta_bytes", "encode_gb_s", "apply_gb_s")
    spreads = {name: spread([step[name] for step in steps]) for name in names}
    of_whole = statistics.median(step["delta_bytes"] / step["bytes"] for step in steps)
    return {"steps": len(steps), "bytes": steps[0]["bytes"], "delta_of_whole": of_whole, **spreads}


def show(rows: Sequence[Row]) -> None:
    print("\nlearning rate  changed a step: fp32 %  bf16 %   version MB  delta MB  (of whole)  encode GB/s  apply GB/s")
    for row in rows:
        middle = {name: value["median"] for name, value in row.items() if isinstance(value, dict)}
        print(
            f"{row['learning_rate']:13g}  {100 * middle['share_fp32']:23.2f}  {100 * middle['share_bf16']:6.2f}  "
            f"{row['bytes'] / 1e6:11.3f}  {middle['delta_bytes'] / 1e6:8.3f}  {100 * row['delta_of_whole']:8.2f} %  "
            f"{middle['encode_gb_s']:11.2f}  {middle['apply_gb_s']:10.2f}"
        )


if __name__ == "__main__":
    main()
