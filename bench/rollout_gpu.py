"""The native engine on one CUDA device: generated tokens a second on random weights of a published shape.

    python -m bench.rollout_gpu olmoe-1b-7b --cases 256,1024,lognormal --refresh-every 5 --split
    python -m bench.rollout_gpu tiny --device cpu --cases 16,lognormal --prompts 2 --episodes 2     # a rehearsal

The work is `rollout_work`'s: shared prompts, fixed or log-normal lengths, temperature 1, log-probabilities of sampled
tokens, bf16 weights with fp32 router and head. Seconds are of the whole batch: prefill, sampling and Python included,
after a warm-up in which every batch size comes up. A sample of sequences is recomputed by the packed forward, and the
difference of log-probabilities stands beside the speed. With `--refresh-every`, the last case runs once more while the
same weights are swapped in, and the share of tokens kept is given. `rollout_h200.sh` runs vLLM on the same work.
"""

import argparse
import asyncio
import dataclasses
import time
from typing import Any

import numpy as np
import torch

from bench import rollout_split, rollout_table
from bench.record import write
from bench.rollout_work import MOST, PROMPT_TOKENS, SHAPES, WARM_UP, Batch, batch
from contraflow.config import Engine
from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import Decoder
from contraflow.model.logprobs import token_logprobs
from contraflow.rollout.native import NativeEngine
from contraflow.types import Completion, Request, Version
from contraflow.weights.probe import make_probe, probe_prompts

CHECKED = 4  # sequences recomputed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--cases", default="256,1024,lognormal", help="of `rollout_work.batch`")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layers", type=int, help="fewer layers, for a rehearsal")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--graphs", default="auto", choices=["auto", "off"])
    parser.add_argument("--lookahead", default="auto", choices=["auto", "on", "off"])
    parser.add_argument("--refresh-every", type=float, help="seconds; needs room for a second copy of the weights")
    parser.add_argument("--split", action="store_true", help="print where a decode step's time goes")
    options = parser.parse_args()
    rows = asyncio.run(measure(options))
    facts: dict[str, Any] = {"gpu": torch.cuda.get_device_name()} if options.device == "cuda" else {}
    print("wrote", write(f"rollout_gpu_{options.shape}", rows, **facts))
    rollout_table.show(options.shape, rows, {})


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases on one engine."""
    decoder = random_decoder(options)
    work = {case: work_of(options, case) for case in (WARM_UP, *options.cases.split(","))}
    sequences = options.prompts * options.episodes
    most = max(batch.tokens for batch in work.values())
    section = Engine(
        context_tokens=PROMPT_TOKENS + MOST,
        kv_tokens=options.prompts * 2 * PROMPT_TOKENS + most + 48 * sequences,  # prompts are shared
        max_sequences=sequences,
        prefill_tokens=16384,
        graphs=options.graphs,
        lookahead=options.lookahead,
    )
    engine = NativeEngine(decoder, section, clock=time.perf_counter, version=Version(0, 0))
    begun = time.perf_counter()
    await generate(engine, work.pop(WARM_UP))
    print(f"warm-up {time.perf_counter() - begun:.1f} s: {engine.report().decoding}", flush=True)
    rows = []
    for case, wanted in work.items():
        rows.append(await timed(engine, decoder, case, wanted))
        print("RESULT ours", options.shape, rows[-1], flush=True)
    if options.refresh_every:
        rows.append(await refreshed(engine, decoder, options, rows[-1]))
        print("RESULT ours", options.shape, rows[-1], flush=True)
    if options.split:
        await rollout_split.split(engine, decoder, requests(work_of(options, "1024")))
    await engine.close()
    return rows


def work_of(options: argparse.Namespace, case: str) -> Batch:
    """A case's batch at the sizes asked for."""
    vocab = SHAPES[options.shape].vocab
    return batch(case, vocab=vocab, prompts=options.prompts, episodes=options.episodes, seed=options.seed)


def random_decoder(options: argparse.Namespace) -> Decoder:
    """Random weights made on the device, in place; norms 1."""
    config = SHAPES[options.shape]
    if options.layers:
        config = dataclasses.replace(config, layers=options.layers)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    decoder = Decoder(config, dtype=dtype, device=options.device).requires_grad_(False)
    noise = torch.Generator(options.device).manual_seed(0)
    for name, weight in decoder.named_parameters():
        weight.fill_(1.0) if name.endswith("norm") else weight.normal_(0.0, 0.02, generator=noise)
    return decoder


def requests(work: Batch) -> list[Request]:
    """The batch as our engine is asked for it."""
    return [
        Request(id=f"{p}/{e}", prompt=prompt, seed=1000 * p + e, max_new_tokens=length, group=str(p))
        for p, prompt in enumerate(work.prompts)
        for e, length in enumerate(work.lengths[p])
    ]


async def generate(engine: NativeEngine, work: Batch) -> tuple[list[Request], list[Completion]]:
    """Everything asked for at once."""
    asked = requests(work)
    answers = list(await asyncio.gather(*(engine.generate(request) for request in asked)))
    assert [len(answer.tokens) for answer in answers] == [request.max_new_tokens for request in asked]
    return asked, answers


async def timed(engine: NativeEngine, decoder: Decoder, case: str, work: Batch) -> dict[str, Any]:
    """One case's row."""
    before, begun = engine.report(), time.perf_counter()
    asked, answers = await generate(engine, work)
    seconds, after = time.perf_counter() - begun, engine.report()
    causes = {cause: spent - before.seconds.get(cause, 0) for cause, spent in after.seconds.items()}
    return {
        "case": case,
        "seconds": round(seconds, 2),
        "tokens_s": round(work.tokens / seconds),
        "step_ms": round(1000 * seconds / (after.steps - before.steps), 2),
        **work.described(),
        "shared_prompt_tokens": after.shared_tokens - before.shared_tokens,
        "preempted": after.preempted - before.preempted,
        **{f"share_{cause}": round(spent / seconds, 3) for cause, spent in causes.items()},
        **difference(decoder, asked, answers),
        "decoding": after.decoding,
    }


async def refreshed(
    engine: NativeEngine, decoder: Decoder, options: argparse.Namespace, plain: dict[str, Any]
) -> dict[str, Any]:
    """The case of `plain` once more, while the same weights, copied from the device, are swapped in now and then."""
    case, stalls, every_s = plain["case"], list[float](), options.refresh_every
    probe = make_probe(decoder, probe_prompts(decoder.config.vocab, prompts=4, tokens=64, seed=0), 0.1)
    tensors = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    await engine.swap(Version(0, 1), tensors, probe)  # the first keeps the weights that were there as well

    async def refresh() -> None:
        for version in range(2, 1 << 20):
            await asyncio.sleep(every_s)
            stalls.append(await engine.swap(Version(0, version), tensors, probe))

    refreshes = asyncio.create_task(refresh())
    row = await timed(engine, decoder, case, work_of(options, case))
    refreshes.cancel()
    await asyncio.gather(refreshes, return_exceptions=True)
    return row | {
        "case": f"{case}, refreshed every {every_s:g} s",
        "refreshes": len(stalls),
        "stall_ms": round(1000 * max(stalls, default=0.0), 1),
        "tokens_kept": round(row["tokens_s"] / plain["tokens_s"], 3),
    }


@torch.no_grad()
def difference(decoder: Decoder, asked: list[Request], answers: list[Completion]) -> dict[str, float]:
    """Between the engine's log-probabilities and those of one packed forward pass over the same tokens."""
    gaps = []
    for request, answer in list(zip(asked, answers, strict=True))[:CHECKED]:
        tokens = np.concatenate([request.prompt, answer.tokens])
        tokens_T = torch.from_numpy(tokens.astype(np.int64)).to(decoder.head.device)
        hidden = decoder(
            tokens_T, torch.arange(len(tokens), device=tokens_T.device), PackedPlan([0, len(tokens)], tokens_T.device)
        )
        logprobs, _ = token_logprobs(
            hidden[len(request.prompt) - 1 : -1], decoder.head, tokens_T[len(request.prompt) :]
        )
        gaps.append(np.abs(logprobs.float().cpu().numpy() - answer.logprobs))
    every = np.concatenate(gaps)
    return {"logprob_gap_mean": round(float(every.mean()), 5), "logprob_gap_largest": round(float(every.max()), 4)}


if __name__ == "__main__":
    main()
