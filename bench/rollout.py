"""Tokens per second of the native engine and of `transformers` generate, on one model, one thread, one machine.

Each side runs in fresh processes, in alternation. Two workloads of 64 sequences, 8 of each prompt: equal lengths, and
mixed lengths as RL has them (a static batch waits for its longest; only wanted tokens count). The engine steps on its
own thread and hands completions to an event loop, where each is worked on, as in a rollout worker.

    python -m bench.rollout [--folder builtin:tiny-moe] [--starts 5]
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
from contraflow.model.builtin import model_folder

SEQUENCES, EPISODES, REPEATS = 64, 8, 3
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
Work = list[tuple[list[int], int]]  # prompt, tokens wanted


def workloads(vocab: int, context: int) -> dict[str, list[Work]]:
    """The same for both sides, a warm-up and each repeat with prompts of its own: groups that share a prompt."""
    draws = np.random.default_rng(0)
    groups = SEQUENCES // EPISODES
    # Log-normal, as lengths of sampled answers are: the median is 26, the longest is cut.
    mixed = np.clip(np.exp(draws.normal(np.log(26), 1.0, SEQUENCES)).astype(int), 1, min(256, context - 48))
    lengths = {
        "equal": ([16] * groups, [min(64, context - 16)] * SEQUENCES),
        "mixed": (draws.integers(4, 49, groups).tolist(), mixed.tolist()),
    }
    works: dict[str, list[Work]] = {name: [] for name in lengths}
    for name, (prompt_lengths, wanted) in lengths.items():
        for _ in range(1 + REPEATS):
            prompts = [draws.integers(0, vocab, length).tolist() for length in prompt_lengths]
            works[name].append([(prompts[index // EPISODES], tokens) for index, tokens in enumerate(wanted)])
    return works


def measure_ours(folder: Path) -> dict[str, float]:
    """Tokens per second by workload, the median of a few runs after one to warm up."""
    from contraflow.config import Engine as EngineSection
    from contraflow.model.folder import load_folder
    from contraflow.rollout.native import NativeEngine
    from contraflow.types import Request, Version

    decoder = load_folder(folder)
    context = min(512, decoder.config.context)

    async def once(engine: NativeEngine, work: Work, label: str) -> float:
        async def one(index: int, prompt: list[int], wanted: int) -> int:
            name = f"{label}-{index}"
            row = np.array(prompt, np.int32)
            answer = await engine.generate(Request(id=name, prompt=row, seed=index, max_new_tokens=wanted))
            json.dumps({"tokens": answer.tokens.tolist(), "logprobs": answer.logprobs.tolist()})
            return len(answer.tokens)

        start = time.perf_counter()
        counts = await asyncio.gather(*(one(i, prompt, wanted) for i, (prompt, wanted) in enumerate(work)))
        seconds = time.perf_counter() - start
        assert counts == [wanted for _, wanted in work]
        return sum(counts) / seconds

    async def main() -> dict[str, float]:
        section = EngineSection(context_tokens=context)
        engine = NativeEngine(decoder, section, clock=time.perf_counter, version=Version(1, 0))
        results = {}
        for name, works in workloads(decoder.config.vocab, context).items():
            rates = [await once(engine, work, f"{name}{repeat}") for repeat, work in enumerate(works)]
            results[name] = statistics.median(rates[1:])
        await engine.close()
        return results

    return asyncio.run(main())


def measure_transformers(folder: Path) -> dict[str, float]:
    """The same for `generate`: one left-padded batch, full softmax, no scores kept."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    context = min(512, model.config.max_position_embeddings)
    return {
        name: statistics.median([generate(model, work) for work in works][1:])
        for name, works in workloads(model.config.vocab_size, context).items()
    }


def generate(model: Any, work: Work) -> float:
    """Tokens per second of one call of `generate`."""
    import torch

    longest, most = max(len(prompt) for prompt, _ in work), max(wanted for _, wanted in work)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in work])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in work])
    start = time.perf_counter()
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=most, do_sample=True, top_k=0, top_p=1.0, pad_token_id=0
    )
    seconds = time.perf_counter() - start
    assert out.shape == (SEQUENCES, longest + most)
    return sum(wanted for _, wanted in work) / seconds


SIDES = {"native": measure_ours, "transformers": measure_transformers}


def start(side: str, folder: Path) -> dict[str, float]:
    """Measure one side in a process of its own."""
    command = [sys.executable, "-m", "bench.rollout", "--folder", str(folder), "--side", side]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **ONE_THREAD})
    rates: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return rates


def compare(folder: Path, starts: int) -> list[dict[str, Any]]:
    """Both sides in alternation, `starts` times each: tokens per second, and the ratio within each pair of starts."""
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for index in range(starts):
        for side in SIDES:
            runs[side].append(start(side, folder))
            print(f"{index + 1}/{starts} {side}: {runs[side][-1]}", flush=True)
    rows = []
    for name in runs["native"][0]:
        pairs = zip(runs["native"], runs["transformers"], strict=True)
        rates = {side: rounded([run[name] for run in runs[side]], 0) for side in SIDES}
        rows.append(
            {"lengths": name, **rates, "ratio": rounded([ours[name] / theirs[name] for ours, theirs in pairs], 2)}
        )
    return rows


def rounded(values: list[float], digits: int) -> dict[str, float]:
    return {key: round(value, digits) for key, value in spread(values).items()}


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
        torch.set_flush_denormal(True)  # for both sides; contraflow's worker processes do so themselves
        print(json.dumps(SIDES[options.side](folder)))
        return
    import transformers

    rows = compare(folder, options.starts)
    print("wrote", write("rollout", rows, transformers=transformers.__version__, sequences=SEQUENCES, unit="tokens/s"))
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
