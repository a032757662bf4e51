"""New weights in the native engine: what each token was sampled by, what is shared, what is rolled back."""

import asyncio
import math
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contraflow.config import Engine as EngineSection
from contraflow.errors import CarrierError
from contraflow.model.decoder import new_decoder
from contraflow.rollout.core import EngineCore
from contraflow.types import Request, Span, StopReason, Version

V1, V2 = Version(1, 1), Version(1, 2)


FORMS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "paged": {"max_sequences": 64},
    "chunked": {"prefill_tokens": 7},
    "tight": {"kv_tokens": 80, "max_sequences": 16},
}


@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize("form", ["roomy", "paged", "chunked", "tight"])
def test_tokens_of_each_version_have_that_versions_logprobs(native: Any, policy: str, form: str) -> None:
    async def body() -> None:
        old, new = (new_decoder(native.tiny(), seed=s, std=0.2) for s in (1, 2))
        engine = native.engine_of(new_decoder(native.tiny(), seed=1, std=0.2), on_refresh=policy, **FORMS[form])
        requests = native.crowd(16, want_routes=True, new=40)
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        while engine.report().tokens < 90:  # noqa: ASYNC110 - an engine says nothing between completions
            await asyncio.sleep(0)
        await engine.swap(V2, *native.release(new))
        caches = set()
        for request, answer in zip(requests, await asyncio.gather(*tasks), strict=True):
            count = len(answer.tokens)
            flip = next((s.start for s in answer.spans if s.version == V2), count)
            before, after = (native.packed(decoder, request, answer)[0] for decoder in (old, new))
            np.testing.assert_allclose(answer.logprobs[:flip], before[:flip], atol=native.tolerance, rtol=0)
            if answer.cache != "kept":
                np.testing.assert_allclose(answer.logprobs[flip:], after[flip:], atol=native.tolerance, rtol=0)
            if answer.cache == "unbroken":
                assert len(answer.spans) == 1
                native.assert_true_to(old if answer.spans[0].version == V1 else new, [request], [answer])
            caches.add(answer.cache)
        assert ("kept" if policy == "keep" else "recomputed") in caches
        assert ("kept" in caches) == (policy == "keep")
        await engine.close()

    native.run(body)


def test_after_a_refresh_no_prompt_is_taken_from_the_old_cache(native: Any) -> None:
    async def body() -> None:
        new = new_decoder(native.tiny(), seed=2, std=0.2)
        engine = native.engine_of(new_decoder(native.tiny(), seed=1, std=0.2))
        request = native.ask("a", range(21), new=4, want_routes=True)
        await engine.generate(request)
        await engine.swap(V2, *native.release(new))
        shared = engine.report().shared_tokens
        native.assert_true_to(new, [request], [await engine.generate(request)])
        assert engine.report().shared_tokens == shared
        await engine.close()

    native.run(body)


def test_what_a_sequence_with_a_kept_cache_leaves_behind_is_not_shared(native: Any) -> None:
    async def body() -> None:
        new = new_decoder(native.tiny(), seed=2, std=0.2)
        engine = native.engine_of(new_decoder(native.tiny(), seed=1, std=0.2), on_refresh="keep")
        flying = asyncio.create_task(engine.generate(native.ask("a", range(21), new=40)))
        for _ in range(12):
            await asyncio.sleep(0)
        await engine.swap(V2, *native.release(new))
        kept = await flying
        assert kept.cache == "kept"
        again = native.ask("b", [*range(21), *kept.tokens.tolist()], new=4, want_routes=True)
        native.assert_true_to(new, [again], [await engine.generate(again)])
        await engine.close()

    native.run(body)


def test_a_swap_copies_into_the_same_storage_within_50_ms_and_rolls_back_bit_for_bit(native: Any) -> None:
    async def body() -> None:
        config = native.tiny(dim=64, head_dim=16, expert_ffn=112)
        decoder = new_decoder(config, seed=1)
        assert 0.5e6 < sum(p.numel() for p in decoder.parameters()) < 0.8e6
        places = {name: tensor.data_ptr() for name, tensor in decoder.state_dict().items()}
        engine = native.engine_of(decoder)
        good = [native.release(new_decoder(config, seed=seed)) for seed in (2, 3)]
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

    native.run(body)


def test_a_version_of_another_model_is_refused_before_anything_is_touched(native: Any) -> None:
    async def body() -> None:
        decoder = new_decoder(native.tiny(), seed=1)
        engine = native.engine_of(decoder)
        tensors, probe = native.release(new_decoder(native.tiny(), seed=2))
        name = next(iter(tensors))
        before = {key: tensor.clone() for key, tensor in decoder.state_dict().items()}
        missing = {key: value for key, value in tensors.items() if key != name}
        for bad, text in (
            (missing, f"missing '{name}'"),
            ({**tensors, "extra": torch.zeros(1)}, "not known 'extra'"),
            ({**tensors, name: torch.zeros(2, 2)}, f"'{name}' has shape [2, 2]"),
        ):
            with pytest.raises(CarrierError) as caught:
                await engine.swap(V2, bad, probe)
            assert text in str(caught.value)
        assert engine.version == V1
        assert all(torch.equal(before[key], value) for key, value in decoder.state_dict().items())
        await engine.close()

    native.run(body)


def test_a_swap_of_tensors_of_another_dtype_converts_them(native: Any) -> None:
    async def body() -> None:
        new = new_decoder(native.tiny(), seed=2, std=0.2)
        engine = native.engine_of(new_decoder(native.tiny(), seed=1, std=0.2))
        tensors, probe = native.release(new, tolerance=0.5)
        await engine.swap(V2, {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, probe)
        assert (await engine.generate(native.ask("a", [1]))).spans == (Span(V2, 0, 12),)
        await engine.close()

    native.run(body)


KEYS = st.fixed_dictionaries(
    {
        "block_tokens": st.sampled_from([1, 3, 4, 16]),
        "kv_tokens": st.sampled_from([64, 96, 1024]),
        "context_tokens": st.sampled_from([48, 60]),
        "max_sequences": st.integers(1, 16),
        "prefill_tokens": st.integers(1, 40),
        "on_refresh": st.sampled_from(["keep", "recompute"]),
        "lookahead": st.sampled_from(["off", "on"]),
    }
)


@pytest.mark.parametrize("examples", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_whatever_happens_every_token_has_the_logprob_its_version_gives_it(native: Any, examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(seed=st.integers(0, 2**32), keys=KEYS)
    def holds(seed: int, keys: dict[str, Any]) -> None:
        live_through(native, seed, keys)

    holds()


def live_through(native: Any, seed: int, keys: dict[str, Any]) -> None:
    """Random sizes, shared prefixes, aborts and swaps, one step at a time."""
    draws = np.random.default_rng(seed)
    models = [new_decoder(native.tiny(layers=2), seed=s, std=0.2) for s in (1, 2)]
    releases = [native.release(model) for model in models]
    section = EngineSection(routes=True, **keys)
    core = EngineCore(new_decoder(native.tiny(layers=2), seed=1), section, clock=time.perf_counter, version=None)
    core.swap(Version(1, 0), *releases[0])
    stems = [draws.integers(0, native.vocab, 20).tolist() for _ in range(2)]
    asked: dict[str, Request] = {}
    for step in range(40):
        for _ in range(draws.integers(0, 3) if step < 25 else 0):
            prompt = stems[draws.integers(2)][: draws.integers(1, 21)] + [1] * int(draws.integers(0, 3))
            name = f"r{len(asked)}"
            request = native.ask(name, prompt, new=int(draws.integers(1, 20)), seed=len(asked), want_routes=True)
            asked[name] = request
            core.submit(request, name)
        if draws.random() < 0.1 and asked:
            core.abort([f"r{draws.integers(len(asked))}"])
        if draws.random() < 0.1:
            n = core.version.n + 1
            core.swap(Version(1, n), *releases[n % 2])
        if core.busy:
            core.step()
    while core.busy:
        core.step()
    outcomes = core.take_outcomes()
    assert sorted(name for name, _ in outcomes) == sorted(asked)
    for name, answer in outcomes:
        if not len(answer.tokens):
            assert answer.stop is StopReason.ABORTED
            continue
        expected = [native.packed(model, asked[name], answer) for model in models]
        for span in answer.spans[: 1 if answer.cache == "kept" else None]:
            part = slice(span.start, span.end)
            wanted = expected[span.version.n % 2][0][part]
            np.testing.assert_allclose(answer.logprobs[part], wanted, atol=native.tolerance, rtol=0)
        if answer.routes is not None and answer.cache != "kept":
            np.testing.assert_array_equal(answer.routes, expected[answer.spans[-1].version.n % 2][1])
    assert core.report().kv_tokens_held == 0
