"""The native engine on one CUDA device: generated tokens a second on random weights of a published shape.

    python -m bench.rollout_gpu olmoe-1b-7b --outputs 256,1024 [--profile]

The work of a GRPO rollout: PROMPTS prompts of random ids, G episodes each (sharing the prompt), a fixed output length,
temperature 1, log-probabilities of sampled tokens, bf16 weights with fp32 router and head. Seconds are of the whole
batch: prefill, sampling and Python included, after a warm-up. A sample of sequences is then recomputed by
the packed forward, and the largest and mean difference of log-probabilities is printed beside the speed.
"""

import argparse
import asyncio
import time

import numpy as np
import torch

from bench.record import write
from contraflow.config import Engine
from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import Decoder
from contraflow.model.families import ModelConfig
from contraflow.model.logprobs import token_logprobs
from contraflow.rollout.native import NativeEngine
from contraflow.types import Completion, Int32, Request, Version

SHAPES = {
    "olmoe-1b-7b": ModelConfig(
        family="olmoe", vocab=50304, dim=2048, layers=16, heads=16, kv_heads=16, head_dim=128,
        experts=64, top_k=8, expert_ffn=1024, rope_theta=1e4, context=4096,
    ),
    "qwen3-30b-a3b": ModelConfig(
        family="qwen3_moe", vocab=151936, dim=2048, layers=48, heads=32, kv_heads=4, head_dim=128,
        experts=128, top_k=8, expert_ffn=768, renormalise=True, rope_theta=1e6, norm_eps=1e-6, context=4096,
    ),
}  # fmt: skip
PROMPT_TOKENS = 256
CHECKED = 4  # sequences recomputed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--outputs", default="256,1024", help="output lengths, one case each")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--layers", type=int, help="fewer layers, for a rehearsal")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true", help="print where one decode step's time goes")
    options = parser.parse_args()
    rows = asyncio.run(measure(options))
    facts = {"gpu": torch.cuda.get_device_name()} if options.device == "cuda" else {}
    print("wrote", write(f"rollout_gpu_{options.shape}", rows, **facts))


async def measure(options: argparse.Namespace) -> list[dict[str, float]]:
    """All cases on one engine."""
    decoder = random_decoder(options)
    sequences, longest = options.prompts * options.episodes, max(int(n) for n in options.outputs.split(","))
    section = Engine(
        context_tokens=PROMPT_TOKENS + longest,
        kv_tokens=sequences * (PROMPT_TOKENS + longest + 16),
        max_sequences=sequences,
        prefill_tokens=16384,
    )
    engine = NativeEngine(decoder, section, clock=time.perf_counter, version=Version(0, 0))
    rng = np.random.default_rng(1)
    await generate(engine, options, min(64, longest), rng)  # the warm-up
    rows = []
    for output in (int(n) for n in options.outputs.split(",")):
        before = engine.report()
        start = time.perf_counter()
        asked, answers = await generate(engine, options, output, rng)
        seconds = time.perf_counter() - start
        after = engine.report()
        row = {
            "output": output,
            "seconds": round(seconds, 2),
            "tokens_s": round(sequences * output / seconds),
            "step_ms": round(1000 * seconds / (after.steps - before.steps), 2),
            "shared_prompt_tokens": after.shared_tokens - before.shared_tokens,
            **{
                f"share_{cause}": round((s - before.seconds.get(cause, 0)) / seconds, 3)
                for cause, s in after.seconds.items()
            },
            **difference(decoder, asked, answers),
        }
        print("RESULT ours", options.shape, row, flush=True)
        rows.append(row)
    if options.profile:
        await profile(engine, options, rng)
    await engine.close()
    return rows


def random_decoder(options: argparse.Namespace) -> Decoder:
    """Random weights made on the device; norms 1."""
    import dataclasses

    config = SHAPES[options.shape]
    if options.layers:
        config = dataclasses.replace(config, layers=options.layers)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    decoder = Decoder(config, dtype=dtype, device=options.device).requires_grad_(False)
    noise = torch.Generator(options.device).manual_seed(0)
    for name, weight in decoder.named_parameters():
        weight.fill_(1.0) if name.endswith("norm") else weight.normal_(0.0, 0.02, generator=noise)
    return decoder


async def generate(
    engine: NativeEngine, options: argparse.Namespace, output: int, rng: np.random.Generator
) -> tuple[list[Request], list[Completion]]:
    """Fresh prompts, all asked for at once."""
    prompts: list[Int32] = [
        rng.integers(1000, SHAPES[options.shape].vocab - 1000, PROMPT_TOKENS, dtype=np.int32)
        for _ in range(options.prompts)
    ]
    salt = int(rng.integers(1 << 30))
    asked = [
        Request(
            id=f"{salt}/{p}/{e}",
            prompt=prompt,
            seed=salt + p * options.episodes + e,
            max_new_tokens=output,
            group=f"{salt}/{p}",
        )
        for p, prompt in enumerate(prompts)
        for e in range(options.episodes)
    ]
    answers = await asyncio.gather(*(engine.generate(request) for request in asked))
    assert all(len(answer.tokens) == output for answer in answers)
    return asked, list(answers)


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


async def profile(engine: NativeEngine, options: argparse.Namespace, rng: np.random.Generator) -> None:
    """Device time by kernel, and how much of the wall clock the device was idle."""
    with torch.profiler.profile() as trace:
        await generate(engine, options, 16, rng)
    print(trace.key_averages().table(sort_by="self_device_time_total", row_limit=14, max_name_column_width=60))


if __name__ == "__main__":
    main()
