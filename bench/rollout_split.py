"""Where a decode step's time goes: how busy the device is, which kernels it runs, and how that is to the bytes floor.

Takes an engine in the middle of a batch. The floor is what must be read once a step, weights and the keys and values
that the cache holds, over the memory's bandwidth: those of a shared prompt once, since its readers can meet in L2.
Experts that no token chose are counted too.
"""

import asyncio
import time
from typing import Any

from torch.profiler import ProfilerActivity, profile

from contraflow.model.decoder import Decoder
from contraflow.rollout.native import NativeEngine
from contraflow.types import Request

BYTES_S = 4.3e12  # that an H200's memory gives
WATCHED_S = 0.6
KERNELS = 16  # listed


async def split(engine: NativeEngine, decoder: Decoder, asked: list[Request]) -> None:
    """Print the split of steps around the middle of the batch, and leave the rest of it undone."""
    before, half = engine.report(), sum(request.max_new_tokens for request in asked) // 2
    tasks = [asyncio.create_task(engine.generate(request)) for request in asked]
    while engine.report().tokens - before.tokens < half:  # noqa: ASYNC110 - an engine says nothing between completions
        await asyncio.sleep(0.005)
    cuda = decoder.head.is_cuda
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as trace:
        first, begun = engine.report(), time.perf_counter()
        await asyncio.sleep(WATCHED_S)
        last, seconds = engine.report(), time.perf_counter() - begun
    await engine.abort([request.id for request in asked])
    await asyncio.gather(*tasks)
    steps = max(last.steps - first.steps, 1)
    sampled = last.tokens - before.tokens
    stored = sum({request.group: len(request.prompt) for request in asked}.values()) + sampled
    context = (sum(len(request.prompt) for request in asked) + sampled) / len(asked)
    told(trace, steps=steps, seconds=seconds, floor_ms=floor_ms(decoder, stored), context=context)


def floor_ms(decoder: Decoder, context_tokens: int) -> float:
    """Milliseconds to read the weights, and keys and values of so many tokens, once."""
    config, item = decoder.config, decoder.compute_dtype.itemsize
    weights = sum(weight.nbytes for weight in decoder.parameters())
    if decoder.lm_head is not None:
        weights -= decoder.embed.nbytes
    cached = context_tokens * 2 * config.kv_heads * config.head_dim * config.layers * item
    return 1000 * (weights + cached) / BYTES_S


def told(trace: Any, *, steps: int, seconds: float, floor_ms: float, context: float) -> None:
    """Print it, by kernel and as a whole."""
    kernels = [e for e in trace.key_averages() if e.self_device_time_total > 0]
    busy_us = sum(kernel.self_device_time_total for kernel in kernels)
    for kernel in sorted(kernels, key=lambda k: -k.self_device_time_total)[:KERNELS]:
        spent_ms = kernel.self_device_time_total / 1000 / steps
        print(f"{spent_ms:8.3f} ms {kernel.count / steps:8.1f} calls a step  {kernel.key[:90]}")
    step_ms = 1000 * seconds / steps
    print(
        f"SPLIT step {step_ms:.2f} ms under the profiler, device busy {busy_us / 1e6 / seconds:.1%} "
        f"({busy_us / 1000 / steps:.2f} ms a step), context {context:.0f}; floor {floor_ms:.2f} ms by bytes, "
        f"{floor_ms / step_ms:.2f} of the step",
        flush=True,
    )
