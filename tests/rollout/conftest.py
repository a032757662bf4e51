"""What the native engine's tests share: a tiny model, engines on it, and the packed forward as the oracle."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from contraflow.config import Engine as EngineSection
from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import Decoder
from contraflow.model.families import ModelConfig
from contraflow.model.router import RouterTape
from contraflow.rollout.native import NativeEngine
from contraflow.types import Completion, Probe, Request, Version
from contraflow.weights.probe import make_probe, probe_prompts

V1 = Version(1, 1)
VOCAB = 32
TOLERANCE = 1e-4


@pytest.fixture(scope="session")
def native() -> Any:
    """The functions below, by name."""
    return SimpleNamespace(
        vocab=VOCAB,
        tolerance=TOLERANCE,
        tiny=tiny,
        engine_of=engine_of,
        run=run,
        ask=ask,
        crowd=crowd,
        answers=answers,
        packed=packed,
        assert_true_to=assert_true_to,
        release=release,
    )


def tiny(**changes: Any) -> ModelConfig:
    shape: dict[str, Any] = {
        "family": "qwen3_moe",
        "vocab": VOCAB,
        "dim": 32,
        "layers": 3,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "experts": 8,
        "top_k": 2,
        "expert_ffn": 16,
        "renormalise": True,
        "context": 512,
    }
    return ModelConfig(**{**shape, **changes})


def engine_of(
    decoder: Decoder,
    *,
    stepping: Any = "inline",
    version: Version | None = V1,
    clock: Any = time.perf_counter,
    **keys: Any,
) -> NativeEngine:
    shape = {"block_tokens": 4, "kv_tokens": 4096, "context_tokens": 128, "max_sequences": 32, "routes": True}
    section = EngineSection(**{**shape, **keys})
    return NativeEngine(decoder, section, clock=clock, stepping=stepping, version=version)


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(body(), 60)

    asyncio.run(bounded())


def ask(name: str, prompt: Sequence[int], *, new: int = 12, seed: int = 1, **rest: Any) -> Request:
    return Request(id=name, prompt=np.array(prompt, np.int32), seed=seed, max_new_tokens=new, **rest)


def crowd(count: int, *, seed: int = 0, longest: int = 40, group: int = 4, new: int = 24, **rest: Any) -> list[Request]:
    """Requests in groups that share a prompt, of random lengths."""
    draws = np.random.default_rng(seed)
    requests = []
    for index in range(count):
        if index % group == 0:
            prompt = draws.integers(0, VOCAB, draws.integers(1, longest)).tolist()
        temperature = (1.0, 0.6, 0.0, 1.7)[index % 4]
        length = int(draws.integers(1, new + 1))
        requests.append(ask(f"q{index}", prompt, new=length, seed=index, temperature=temperature, **rest))
    return requests


async def answers(engine: NativeEngine, requests: Sequence[Request]) -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(request) for request in requests)))


@torch.no_grad()
def packed(decoder: Decoder, request: Request, answer: Completion) -> tuple[np.ndarray, np.ndarray | None]:
    """Log-probabilities of the new tokens and the experts of all fed ones, from one packed forward pass."""
    tokens = torch.from_numpy(np.concatenate((request.prompt, answer.tokens)).astype(np.int64))
    tape = RouterTape()
    hidden = decoder(tokens[:-1], torch.arange(len(tokens) - 1), PackedPlan.of([0, len(tokens) - 1]), tape=tape)
    logits = decoder.logits(hidden).double() / (request.temperature or 1.0)
    logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0]
    return logprobs[len(request.prompt) - 1 :].numpy(), tape.routes().numpy() if tape.used else None


def assert_true_to(decoder: Decoder, requests: Sequence[Request], completions: Sequence[Completion]) -> None:
    for request, answer in zip(requests, completions, strict=True):
        logprobs, routes = packed(decoder, request, answer)
        np.testing.assert_allclose(answer.logprobs, logprobs, atol=TOLERANCE, rtol=0)
        if request.want_routes:
            assert answer.routes is not None
            assert routes is not None
            assert answer.routes.dtype == routes.dtype
            np.testing.assert_array_equal(answer.routes, routes)


def release(decoder: Decoder, tolerance: float = 1e-3) -> tuple[dict[str, torch.Tensor], Probe]:
    prompts = probe_prompts(VOCAB, prompts=4, tokens=16, seed=1)
    return dict(decoder.state_dict()), make_probe(decoder, prompts, tolerance)
