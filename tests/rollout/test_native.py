"""The native engine against independent answers: the packed forward pass, transformers, closed forms, the clock."""

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contraflow.config import Engine as EngineSection
from contraflow.errors import CarrierError, ConfigError, EngineError
from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.router import RouterTape
from contraflow.rollout.native import NativeEngine
from contraflow.rollout.passes import bucket
from contraflow.rollout.sampling import stream_key, uniforms
from contraflow.types import Completion, Probe, Request, Span, Version
from contraflow.weights.probe import make_probe, probe_prompts

V1, V2, V3 = Version(1, 1), Version(1, 2), Version(1, 3)
VOCAB = 32
TOLERANCE = 1e-4


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


FORMS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "paged": {"max_sequences": 64},  # rows of this many could not all be kept side by side
    "paged and chunked": {"max_sequences": 64, "prefill_tokens": 7},
    "blocks of one": {"block_tokens": 1},
    "blocks of sixteen": {"block_tokens": 16},
    "chunked": {"prefill_tokens": 7},
    "few rows": {"max_sequences": 3},
    "tight": {"kv_tokens": 80, "max_sequences": 16},
    "tight and chunked": {"kv_tokens": 72, "prefill_tokens": 5, "max_sequences": 16},
}


@pytest.mark.parametrize("form", FORMS)
def test_logprobs_and_experts_equal_those_of_a_packed_forward(form: str) -> None:
    async def body() -> None:
        decoder = new_decoder(tiny(), seed=1, std=0.2)
        engine = engine_of(decoder, **FORMS[form])
        requests = crowd(28, want_routes=True)
        completions = await answers(engine, requests)
        assert_true_to(decoder, requests, completions)
        assert [len(c.tokens) for c in completions] == [r.max_new_tokens for r in requests]
        report = engine.report()
        assert report.shared_tokens > 0
        assert report.kv_tokens_held == 0
        assert (report.preempted > 0) == ("tight" in form)
        assert (engine._core._passes.near is None) == ("tight" in form or "paged" in form)
        await engine.close()

    run(body)


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "olmoe", "renormalise": False, "kv_heads": 4},
        {"family": "mixtral"},
        {"family": "qwen3", "experts": 0, "top_k": 0, "expert_ffn": 0, "ffn": 48, "renormalise": False},
        {"family": "llama", "experts": 0, "top_k": 0, "expert_ffn": 0, "ffn": 48, "renormalise": False, "tied": True},
        {"dense_layers": (1,), "ffn": 24},
        {"experts": 300, "expert_ffn": 8},
    ],
    ids=lambda changes: "-".join(f"{k}={v}" for k, v in changes.items())[:30],
)
def test_every_family_samples_with_the_logprobs_its_packed_forward_gives(changes: dict[str, Any]) -> None:
    async def body() -> None:
        config = tiny(**changes)
        decoder = new_decoder(config, seed=2, std=0.2)
        engine = engine_of(decoder)
        requests = crowd(8, want_routes=bool(config.experts))
        completions = await answers(engine, requests)
        assert_true_to(decoder, requests, completions)
        for answer in completions:
            if answer.routes is not None:
                assert answer.routes.shape[1:] == (len(config.moe_layers), config.top_k)
                assert answer.routes.dtype == (np.uint8 if config.experts <= 256 else np.uint16)
        await engine.close()

    run(body)


def test_a_full_cache_preempts_and_loses_nothing() -> None:
    async def body() -> None:
        requests = crowd(24, new=30)
        results = []
        for kv_tokens in (4096, 72):
            engine = engine_of(new_decoder(tiny(), seed=1, std=0.2), kv_tokens=kv_tokens)
            results.append(await answers(engine, requests))
            report = engine.report()
            assert (report.preempted > 0) == (kv_tokens == 72)
            await engine.close()
        for roomy, tight in zip(*results, strict=True):
            assert roomy.tokens.tolist() == tight.tokens.tolist()
            np.testing.assert_allclose(roomy.logprobs, tight.logprobs, atol=TOLERANCE, rtol=0)

    run(body)


def test_a_sequence_that_could_never_fit_is_refused_at_once_and_one_that_just_fits_is_not() -> None:
    async def body() -> None:
        engine = engine_of(new_decoder(tiny(), seed=1), kv_tokens=40)
        with pytest.raises(EngineError, match=r"41 tokens \(prompt 30\) do not fit a KV cache of 40"):
            await engine.generate(ask("a", range(30), new=12))
        both = await answers(engine, [ask("b", range(30), new=11), ask("c", range(30), new=11, seed=2)])
        assert [len(c.tokens) for c in both] == [11, 11]
        await engine.close()

    run(body)


@pytest.mark.parametrize("form", ["roomy", "paged"])
def test_the_next_turn_of_an_episode_finds_its_past_in_the_cache(form: str) -> None:
    async def body() -> None:
        decoder = new_decoder(tiny(), seed=1, std=0.2)
        engine = engine_of(decoder, **FORMS[form])
        first = ask("a", range(9), new=8, want_routes=True)
        answer = await engine.generate(first)
        fed = engine.report().fed_tokens
        second = ask("b", [*range(9), *answer.tokens.tolist(), 3, 4], new=8, want_routes=True)
        assert_true_to(decoder, [second], [await engine.generate(second)])
        assert engine.report().fed_tokens - fed == 9 + 8 + 2 - 1 - 16
        await engine.close()

    run(body)


def test_greedy_equals_transformers_generate(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from contraflow.model.folder import save_folder

    async def body() -> None:
        decoder = new_decoder(tiny(), seed=3, std=0.2)
        save_folder(decoder, tmp_path)
        oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        engine = engine_of(decoder)
        prompts = [np.random.default_rng(i).integers(0, VOCAB, 3 + 5 * i).tolist() for i in range(5)]
        requests = [ask(f"g{i}", prompt, new=30, temperature=0.0) for i, prompt in enumerate(prompts)]
        for prompt, answer in zip(prompts, await answers(engine, requests), strict=True):
            given = torch.tensor([prompt])
            theirs = oracle.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=30, min_new_tokens=30, do_sample=False
            )
            assert answer.tokens.tolist() == theirs[0, len(prompt) :].tolist()
        await engine.close()

    run(body)


def test_what_is_sampled_first_follows_the_model_by_chi_square() -> None:
    async def body() -> None:
        decoder = new_decoder(tiny(), seed=4, std=0.3)
        engine = engine_of(decoder, routes=False)
        count, prompt = 6000, [3, 1, 4, 1, 5]
        requests = [ask(f"s{i}", prompt, new=1, seed=i, temperature=0.8) for i in range(count)]
        seen = np.bincount([int(c.tokens[0]) for c in await answers(engine, requests)], minlength=VOCAB)
        with torch.no_grad():
            hidden = decoder(torch.tensor(prompt), torch.arange(5), PackedPlan.of([0, 5]))[-1:]
            expected = count * torch.softmax(decoder.logits(hidden)[0].double() / 0.8, -1).numpy()
        common = expected > 5
        chi_square = ((seen - expected)[common] ** 2 / expected[common]).sum()
        degrees = common.sum() - 1
        assert chi_square < degrees + 4.5 * math.sqrt(2 * degrees)
        await engine.close()

    run(body)


def test_the_noise_of_a_token_is_that_of_its_seed_and_its_place_in_the_sequence() -> None:
    async def body() -> None:
        decoder = new_decoder(tiny(), seed=1)
        with torch.no_grad():
            decoder.head.zero_()  # every token has probability 1/32, so the token is the uniform's first five bits
        engine = engine_of(decoder)
        requests = [ask(f"u{i}", range(1 + i), new=20, seed=i // 2) for i in range(10)]
        for request, answer in zip(requests, await answers(engine, requests), strict=True):
            places = np.arange(len(request.prompt), len(request.prompt) + 20)
            noise = uniforms(np.full(20, stream_key(request.seed)), places)
            assert answer.tokens.tolist() == (noise * VOCAB).astype(int).tolist()
        await engine.close()

    run(body)


@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize("form", ["roomy", "paged", "chunked", "tight"])
def test_tokens_of_each_version_have_that_versions_logprobs(policy: str, form: str) -> None:
    async def body() -> None:
        old, new = (new_decoder(tiny(), seed=s, std=0.2) for s in (1, 2))
        engine = engine_of(new_decoder(tiny(), seed=1, std=0.2), on_refresh=policy, **FORMS[form])
        requests = crowd(16, want_routes=True, new=40)
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        while engine.report().tokens < 90:  # noqa: ASYNC110 - an engine says nothing between completions
            await asyncio.sleep(0)
        await engine.swap(V2, *release(new))
        caches = set()
        for request, answer in zip(requests, await asyncio.gather(*tasks), strict=True):
            count = len(answer.tokens)
            flip = next((s.start for s in answer.spans if s.version == V2), count)
            before, after = (packed(decoder, request, answer)[0] for decoder in (old, new))
            np.testing.assert_allclose(answer.logprobs[:flip], before[:flip], atol=TOLERANCE, rtol=0)
            if answer.cache != "kept":
                np.testing.assert_allclose(answer.logprobs[flip:], after[flip:], atol=TOLERANCE, rtol=0)
            if answer.cache == "unbroken":
                assert len(answer.spans) == 1
                assert_true_to(old if answer.spans[0].version == V1 else new, [request], [answer])
            caches.add(answer.cache)
        assert ("kept" if policy == "keep" else "recomputed") in caches
        assert ("kept" in caches) == (policy == "keep")
        await engine.close()

    run(body)


def test_after_a_refresh_no_prompt_is_taken_from_the_old_cache() -> None:
    async def body() -> None:
        new = new_decoder(tiny(), seed=2, std=0.2)
        engine = engine_of(new_decoder(tiny(), seed=1, std=0.2))
        request = ask("a", range(21), new=4, want_routes=True)
        await engine.generate(request)
        await engine.swap(V2, *release(new))
        shared = engine.report().shared_tokens
        assert_true_to(new, [request], [await engine.generate(request)])
        assert engine.report().shared_tokens == shared
        await engine.close()

    run(body)


def test_what_a_sequence_with_a_kept_cache_leaves_behind_is_not_shared() -> None:
    async def body() -> None:
        new = new_decoder(tiny(), seed=2, std=0.2)
        engine = engine_of(new_decoder(tiny(), seed=1, std=0.2), on_refresh="keep")
        flying = asyncio.create_task(engine.generate(ask("a", range(21), new=40)))
        for _ in range(12):
            await asyncio.sleep(0)
        await engine.swap(V2, *release(new))
        kept = await flying
        assert kept.cache == "kept"
        again = ask("b", [*range(21), *kept.tokens.tolist()], new=4, want_routes=True)
        assert_true_to(new, [again], [await engine.generate(again)])
        await engine.close()

    run(body)


def test_a_swap_copies_into_the_same_storage_within_50_ms_and_rolls_back_bit_for_bit() -> None:
    async def body() -> None:
        config = tiny(dim=64, head_dim=16, expert_ffn=112)
        decoder = new_decoder(config, seed=1)
        assert 0.5e6 < sum(p.numel() for p in decoder.parameters()) < 0.8e6
        places = {name: tensor.data_ptr() for name, tensor in decoder.state_dict().items()}
        engine = engine_of(decoder)
        good = [release(new_decoder(config, seed=seed)) for seed in (2, 3)]
        stalls = [await engine.swap(Version(1, n), *good[n % 2]) for n in range(2, 9)]
        assert sorted(stalls)[3] <= 0.050
        served = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
        with pytest.raises(CarrierError, match="probe"):
            await engine.swap(Version(1, 9), good[1][0], good[0][1])
        broken = {name: torch.full_like(tensor, math.nan) for name, tensor in good[1][0].items()}
        with pytest.raises(CarrierError, match="probe"):
            await engine.swap(Version(1, 9), broken, good[0][1])
        for name, tensor in decoder.state_dict().items():
            assert tensor.data_ptr() == places[name]
            assert torch.equal(tensor, served[name])
        await engine.close()

    run(body)


def test_a_version_of_another_model_is_refused_before_anything_is_touched() -> None:
    async def body() -> None:
        decoder = new_decoder(tiny(), seed=1)
        engine = engine_of(decoder)
        tensors, probe = release(new_decoder(tiny(), seed=2))
        name = next(iter(tensors))
        before = {key: tensor.clone() for key, tensor in decoder.state_dict().items()}
        missing = {key: value for key, value in tensors.items() if key != name}
        for bad, text in (
            (missing, f"missing ['{name}']"),
            ({**tensors, "extra": torch.zeros(1)}, "not of this model ['extra']"),
            ({**tensors, name: torch.zeros(2, 2)}, f"'{name}' has shape [2, 2]"),
        ):
            with pytest.raises(CarrierError) as caught:
                await engine.swap(V2, bad, probe)
            assert text in str(caught.value)
        assert engine.version == V1
        assert all(torch.equal(before[key], value) for key, value in decoder.state_dict().items())
        await engine.close()

    run(body)


def test_inline_runs_of_one_seed_are_bit_equal() -> None:
    runs = []

    async def body() -> None:
        engine = engine_of(new_decoder(tiny(), seed=1, std=0.2), kv_tokens=160, on_refresh="recompute")
        tasks = [asyncio.create_task(engine.generate(request)) for request in crowd(20)]
        for _ in range(12):
            await asyncio.sleep(0)
        await engine.swap(V2, *release(new_decoder(tiny(), seed=2, std=0.2)))
        runs.append([(c.tokens.tobytes(), c.logprobs.tobytes(), c.spans) for c in await asyncio.gather(*tasks)])
        await engine.close()

    run(body)
    run(body)
    assert runs[0] == runs[1]


def test_a_blocked_event_loop_does_not_stop_the_engines_thread() -> None:
    async def body() -> None:
        engine = engine_of(new_decoder(tiny(), seed=1), stepping="thread")
        task = asyncio.create_task(engine.generate(ask("a", [1, 2], new=120)))
        await asyncio.sleep(0.01)
        before = engine.report().steps
        assert before > 0
        time.sleep(0.05)  # noqa: ASYNC251 - a slow environment in the loop
        assert engine.report().steps > before + 5
        assert len((await task).tokens) == 120
        await engine.close()

    run(body)


def test_an_idle_engine_uses_no_processor_and_its_thread_ends_with_it() -> None:
    async def body() -> None:
        engine = engine_of(new_decoder(tiny(), seed=1), stepping="thread")
        await engine.generate(ask("a", [1], new=2))
        assert any(thread.name == "contraflow-engine" for thread in threading.enumerate())
        before = time.process_time()
        await asyncio.sleep(0.3)
        assert time.process_time() - before < 0.1
        assert engine.report().doing == "idle"
        await engine.close()
        assert not any(thread.name == "contraflow-engine" for thread in threading.enumerate())

    run(body)


@pytest.mark.parametrize("stepping", ["thread", "inline"])
def test_requests_of_one_turn_of_the_loop_start_in_one_step(stepping: str) -> None:
    async def body() -> None:
        engine = engine_of(new_decoder(tiny(), seed=1), stepping=stepping)
        requests = [ask(f"r{i}", range(1 + i % 7), new=9, seed=i) for i in range(20)]
        await answers(engine, requests)
        assert engine.report().steps == 9
        await engine.close()

    run(body)


@pytest.mark.parametrize("stepping", ["thread", "inline"])
def test_a_cancelled_swap_still_ends_one_way_or_the_other(stepping: str) -> None:
    async def body() -> None:
        new = new_decoder(tiny(), seed=2, std=0.2)
        engine = engine_of(new_decoder(tiny(), seed=1, std=0.2), stepping=stepping)
        swap = asyncio.create_task(engine.swap(V2, *release(new)))
        await asyncio.sleep(0)
        swap.cancel()
        await asyncio.gather(swap, return_exceptions=True)
        assert engine.version == V2
        request = ask("a", range(9), want_routes=True)
        assert_true_to(new, [request], [await engine.generate(request)])
        await engine.close()

    run(body)


@pytest.mark.parametrize("stepping", ["thread", "inline"])
def test_weights_that_give_no_numbers_fail_the_request_with_a_cause(stepping: str) -> None:
    async def body() -> None:
        decoder = new_decoder(tiny(), seed=1)
        engine = engine_of(decoder, stepping=stepping)
        with torch.no_grad():
            decoder.norm.fill_(math.nan)
        with pytest.raises(EngineError, match="no number"):
            await engine.generate(ask("a", [1, 2]))
        await engine.close()

    run(body)


@pytest.mark.parametrize("stepping", ["thread", "inline"])
def test_a_step_that_raises_fails_what_is_in_flight_and_the_engine_goes_on(stepping: str) -> None:
    async def body() -> None:
        decoder = new_decoder(tiny(), seed=1)
        engine = engine_of(decoder, stepping=stepping)
        whole = decoder.norm.data
        decoder.norm.data = torch.ones(3)
        requests = crowd(6)
        outcomes = await asyncio.gather(*(engine.generate(r) for r in requests), return_exceptions=True)
        assert all(isinstance(o, EngineError) and "a step of the engine failed" in str(o) for o in outcomes)
        decoder.norm.data = whole
        assert_true_to(decoder, requests, await answers(engine, requests))
        assert engine.report().kv_tokens_held == 0
        await engine.close()

    run(body)


def test_a_swap_of_tensors_of_another_dtype_converts_them() -> None:
    async def body() -> None:
        new = new_decoder(tiny(), seed=2, std=0.2)
        engine = engine_of(new_decoder(tiny(), seed=1, std=0.2))
        tensors, probe = release(new, tolerance=0.5)
        await engine.swap(V2, {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, probe)
        assert (await engine.generate(ask("a", [1]))).spans == (Span(V2, 0, 12),)
        await engine.close()

    run(body)


def test_settings_that_fit_no_model_or_no_block_are_refused() -> None:
    decoder = new_decoder(tiny(), seed=1)
    with pytest.raises(ConfigError, match=r"engine.kv_tokens = 3 holds no block of engine.block_tokens = 4"):
        engine_of(decoder, kv_tokens=3)
    with pytest.raises(ConfigError, match=r"engine.context_tokens = 600 is beyond the model's 512"):
        engine_of(decoder, context_tokens=600)


def test_routes_are_refused_by_an_engine_that_does_not_record_them() -> None:
    async def body() -> None:
        engine = engine_of(new_decoder(tiny(), seed=1), routes=False)
        with pytest.raises(EngineError, match=r"engine\.routes is false"):
            await engine.generate(ask("a", [1], want_routes=True))
        await engine.close()

    run(body)


def test_buckets_hold_their_count_and_are_few() -> None:
    sizes = {bucket(count) for count in range(1, 257)}
    assert len(sizes) == 19
    assert all(count <= bucket(count) < count + max(8, count / 4) for count in range(1, 3000))
    assert bucket(256) == 256
