"""The native engine in bitwise mode: tokens, log-probabilities and experts are the trainer's bits, in any company."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.invariant import open_invariant
from contraflow.model.invariant_cpu import built_invariant
from contraflow.model.router import RouterTape
from contraflow.types import Completion, Request, Version

if isinstance(built_invariant(), str):
    pytest.skip(str(built_invariant()), allow_module_level=True)

BITWISE = {"bitwise": True, "on_refresh": "recompute"}
FORMS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunks of seven": {"prefill_tokens": 7},
    "blocks of one": {"block_tokens": 1},
    "blocks of sixteen": {"block_tokens": 16, "prefill_tokens": 50},
    "few rows": {"max_sequences": 3},
    "tight": {"kv_tokens": 72, "max_sequences": 16},
    "tight and chunked": {"kv_tokens": 80, "prefill_tokens": 5, "max_sequences": 16},
    "looking ahead": {"lookahead": "on"},
}
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "olmoe": {"family": "olmoe", "renormalise": False, "kv_heads": 4, "clip_qkv": 0.8},
    "mixtral": {"family": "mixtral", "dim": 40, "expert_ffn": 24},
    "llama": {
        "family": "llama", "experts": 0, "top_k": 0, "expert_ffn": 0, "ffn": 37, "renormalise": False, "tied": True,
        "dim": 27, "head_dim": 6, "attention_bias": True,
    },
    "many experts": {"experts": 300, "expert_ffn": 8},
}  # fmt: skip


def trained(decoder: Decoder, requests: list[Request], answers: list[Completion]) -> list[tuple[Any, Any]]:
    """Log-probabilities of new tokens, and experts of all fed ones, from one packed pass of a trainer over all."""
    twin = Decoder(decoder.config)
    twin.load_state_dict(decoder.state_dict())
    twin.compute_with(open_invariant(decoder.config))
    rows = [
        torch.from_numpy(np.concatenate((r.prompt, a.tokens)).astype(np.int64))
        for r, a in zip(requests, answers, strict=True)
    ]
    lengths = [len(row) - 1 for row in rows]
    tape = RouterTape()
    hidden = twin(
        torch.cat([row[:-1] for row in rows]),
        torch.cat([torch.arange(n) for n in lengths]),
        PackedPlan.of([0, *np.cumsum(lengths).tolist()]),
        tape=tape,
    )
    routes = tape.routes().split(lengths) if tape.used else [None] * len(rows)
    found = []
    for request, row, states, experts in zip(requests, rows, hidden.split(lengths), routes, strict=True):
        temperature, first = request.temperature or 1.0, len(request.prompt) - 1
        logprobs, _ = twin.arithmetic.token_logprobs(
            states[first:], twin.head, row[first + 1 :], temperature=temperature
        )
        found.append((logprobs.detach().numpy(), experts))
    return found


def assert_the_trainers(decoder: Decoder, requests: list[Request], answers: list[Completion]) -> None:
    for answer, (logprobs, routes) in zip(answers, trained(decoder, requests, answers), strict=True):
        np.testing.assert_array_equal(answer.logprobs, logprobs)
        if routes is not None:
            np.testing.assert_array_equal(answer.routes, routes.numpy())


@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_batch_gives_the_trainers_bits(native: Any, form: str) -> None:
    async def body() -> None:
        decoder = new_decoder(native.tiny(), seed=1, std=0.2)
        engine = native.engine_of(decoder, **BITWISE, **FORMS[form])
        requests = native.crowd(28, want_routes=True)
        answers = await native.answers(engine, requests)
        report = engine.report()
        assert (report.preempted > 0) == ("tight" in form)
        assert report.shared_tokens > 0
        assert report.decoding.endswith("; bitwise: batch-invariant kernels in C")
        await engine.close()
        assert_the_trainers(decoder, requests, answers)

    native.run(body)


@pytest.mark.parametrize("kind", CHANGES)
def test_every_family_gives_the_trainers_bits(native: Any, kind: str) -> None:
    async def body() -> None:
        decoder = new_decoder(native.tiny(**CHANGES[kind]), seed=2, std=0.2)
        engine = native.engine_of(decoder, **BITWISE, prefill_tokens=7)
        requests = native.crowd(16, want_routes=bool(decoder.config.experts))
        answers = await native.answers(engine, requests)
        await engine.close()
        assert_the_trainers(decoder, requests, answers)

    native.run(body)


def test_tokens_are_the_same_alone_and_among_sixty_four(native: Any) -> None:
    async def body() -> None:
        requests = native.crowd(64, new=40, want_routes=True)
        decoder = new_decoder(native.tiny(), seed=1, std=0.3)
        crowded = native.engine_of(decoder, **BITWISE, max_sequences=64)
        together = await native.answers(crowded, requests)
        await crowded.close()
        lonely = native.engine_of(decoder, **BITWISE, max_sequences=1, block_tokens=3, prefill_tokens=5)
        alone = [await lonely.generate(request) for request in requests]
        await lonely.close()
        assert sum(len(answer.tokens) for answer in alone) > 1000
        for one, other in zip(together, alone, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_array_equal(one.logprobs, other.logprobs)
            np.testing.assert_array_equal(one.routes, other.routes)

    native.run(body)


def test_the_ordinary_engine_does_not_give_the_same_bits(native: Any) -> None:
    """Or the tests above show nothing."""

    async def body() -> None:
        requests = native.crowd(64, new=40)
        engines = [
            native.engine_of(new_decoder(native.tiny(), seed=1, std=0.3), max_sequences=rows) for rows in (64, 3)
        ]
        one, other = [await native.answers(engine, requests) for engine in engines]
        assert any(a.logprobs.tolist() != b.logprobs.tolist() for a, b in zip(one, other, strict=True))
        for engine in engines:
            await engine.close()

    native.run(body)


def test_what_follows_a_refresh_is_the_new_versions_to_the_bit(native: Any) -> None:
    async def body() -> None:
        old, new = (new_decoder(native.tiny(), seed=seed, std=0.2) for seed in (1, 2))
        new.compute_with(open_invariant(new.config))
        served = Decoder(old.config)
        served.load_state_dict(old.state_dict())
        engine = native.engine_of(served, **BITWISE)
        tensors, probe = native.release(new, tolerance=1e-30)
        requests = [native.ask(f"r{i}", range(i + 1), new=40, seed=i) for i in range(6)]
        waiting = [asyncio.create_task(engine.generate(request)) for request in requests]
        while engine.report().tokens < 60:  # noqa: ASYNC110 - an engine says nothing between completions
            await asyncio.sleep(0)
        await engine.swap(Version(1, 2), tensors, probe)
        answers = [await one for one in waiting]
        await engine.close()
        assert all({span.version.n for span in answer.spans} == {1, 2} for answer in answers)
        by_version = {1: trained(old, requests, answers), 2: trained(new, requests, answers)}
        for place, answer in enumerate(answers):
            assert answer.cache == "recomputed"
            for span in answer.spans:
                wanted = by_version[span.version.n][place][0][span.start : span.end]
                np.testing.assert_array_equal(answer.logprobs[span.start : span.end], wanted)

    native.run(body)
