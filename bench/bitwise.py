"""What bitwise mode costs: tokens per second of generation and of a trainer's step, ordinary against batch-invariant.

Each side runs in fresh processes, in alternation, with one thread of arithmetic; seconds are of processor time, which a
busy machine disturbs less than the clock on the wall. The engine goes over the workloads of `bench.rollout`, then a
trainer's steps over what it sampled, forward and backward, at a learning rate that moves nothing. Beside the cost, what
is bought: how far log-probabilities of the engine are from those of the trainer, token by token, and how many of the
same requests get the same answer alone in the engine.

    python -m bench.bitwise [--folder builtin:tiny-moe] [--starts 5]
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.record import spread, write
from bench.rollout import ONE_THREAD, REPEATS, Work, rounded, workloads
from contraflow.model.builtin import model_folder

SIDES = {"ordinary": {}, "bitwise": {"bitwise": True, "on_refresh": "recompute"}}
RATE = {"learning_rate": 1e-30, "warmup_updates": 0}
ALONE = 16  # requests that are asked again, one after the other


def measure(folder: Path, settings: dict[str, Any]) -> dict[str, float]:
    """Tokens per second of processor time of each workload and of training, medians after one to warm up; and what
    differs."""
    from contraflow.config import Engine as EngineSection
    from contraflow.model.folder import load_folder
    from contraflow.rollout.native import NativeEngine
    from contraflow.types import Completion, Request, Version

    decoder = load_folder(folder)
    context = min(512, decoder.config.context)
    section = EngineSection(context_tokens=context, **settings)

    def asked(work: Work) -> list[Request]:
        return [
            Request(id=str(index), prompt=np.array(prompt, np.int32), seed=index, max_new_tokens=wanted)
            for index, (prompt, wanted) in enumerate(work)
        ]

    async def main() -> tuple[dict[str, float], list[Request], list[Completion]]:
        engine = NativeEngine(decoder, section, clock=time.perf_counter, version=Version(1, 0))
        found, requests, answers = dict[str, float](), list[Request](), list[Completion]()
        for name, works in workloads(decoder.config.vocab, context).items():
            rates = []
            for work in works:
                requests = asked(work)
                start = time.process_time()
                answers = await asyncio.gather(*map(engine.generate, requests))
                rates.append(sum(len(answer.tokens) for answer in answers) / (time.process_time() - start))
            found[f"generation, {name} lengths"] = statistics.median(rates[1:])
        again = [await engine.generate(request) for request in requests[:ALONE]]
        same = [
            a.tokens.tolist() == b.tokens.tolist() and a.logprobs.tolist() == b.logprobs.tolist()
            for a, b in zip(again, answers, strict=False)
        ]
        await engine.close()
        return found | {"the same alone": sum(same)}, requests, answers

    found, requests, answers = asyncio.run(main())
    return found | train(folder, requests, answers, bitwise=section.bitwise)


def train(folder: Path, requests: list[Any], answers: list[Any], *, bitwise: bool) -> dict[str, float]:
    """Trained tokens per second of steps over these answers, and the largest log-ratio of the tokens."""
    import torch

    from contraflow import config
    from contraflow.model.folder import load_folder
    from contraflow.model.invariant import open_invariant
    from contraflow.telemetry import Account
    from contraflow.train.batcher import pack
    from contraflow.train.forward import Reading, feed, score
    from contraflow.train.optimizer import Optimizer
    from contraflow.train.step import TrainStep
    from contraflow.types import Sample

    decoder = load_folder(folder)
    if bitwise:
        decoder.compute_with(open_invariant(decoder.config))
    samples = [
        Sample(
            tokens=np.concatenate((request.prompt, answer.tokens)),
            mask=(mask := np.arange(len(request.prompt) + len(answer.tokens)) >= len(request.prompt)),
            behaviour=np.concatenate((np.zeros(len(request.prompt), np.float32), answer.logprobs)),
            advantages=np.where(mask, (-1.0) ** index, 0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
        )
        for index, (request, answer) in enumerate(zip(requests, answers, strict=True))
    ]
    section = config.Train(**RATE)
    worst = 0.0
    for batch in pack(samples, tokens_per_batch=section.tokens_per_batch, reduction="token"):
        with torch.no_grad():
            logprobs = score(decoder, feed(batch, torch.device("cpu")), Reading()).logprobs_N.numpy()
        worst = max(worst, float(np.abs(logprobs.astype(np.float64) - batch.behaviour[batch.mask]).max()))
    step = TrainStep(
        decoder,
        Optimizer(decoder, section),
        Account(time.perf_counter),
        train=section,
        loss=config.Loss(),
        temperature=1.0,
    )
    tokens, rates = sum(int(sample.mask.sum()) for sample in samples), []
    for number in range(1 + REPEATS):
        start = time.process_time()
        outcome = step.run([samples], step=number, seed=0)
        rates.append(tokens / (time.process_time() - start))
        assert not outcome.fault
    return {"training": statistics.median(rates[1:]), "largest log-ratio": worst}


def start(side: str, folder: Path) -> dict[str, float]:
    """Measure one side in a process of its own."""
    command = [sys.executable, "-m", "bench.bitwise", "--folder", str(folder), "--side", side]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **ONE_THREAD})
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(folder: Path, starts: int) -> list[dict[str, Any]]:
    """Both sides in alternation: tokens per second, and the cost within each pair of starts; then what differs."""
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for index in range(starts):
        for side in SIDES:
            runs[side].append(start(side, folder))
            print(f"{index + 1}/{starts} {side}: {runs[side][-1]}", flush=True)
    rows: list[dict[str, Any]] = []
    for name in runs["ordinary"][0]:
        values = {side: [run[name] for run in runs[side]] for side in SIDES}
        if name == "largest log-ratio":
            rows.append({"what": name, **{side: max(found) for side, found in values.items()}})
        elif name == "the same alone":
            rows.append({"what": f"{name}, of {ALONE} answers", **{side: min(found) for side, found in values.items()}})
        else:
            cost = [a / b for a, b in zip(values["ordinary"], values["bitwise"], strict=True)]
            rates = {side: rounded(found, 0) for side, found in values.items()}
            rows.append({"what": name, **rates, "cost": {k: round(v, 2) for k, v in spread(cost).items()}})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--folder", default="builtin:tiny-moe", help="a Hugging Face folder, or builtin:NAME")
    parser.add_argument("--starts", type=int, default=5, help="processes of each side")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = model_folder(options.folder)
    if options.side:
        import torch

        torch.set_num_threads(1)
        torch.set_flush_denormal(True)  # as contraflow's worker processes do
        print(json.dumps(measure(folder, SIDES[options.side])))
        return
    rows = compare(folder, options.starts)
    print("wrote", write("bitwise", rows, unit="tokens per second of processor time"))
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
