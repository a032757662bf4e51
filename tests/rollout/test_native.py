"""What the native engine samples, against the packed forward pass, transformers and closed forms."""

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contraflow.errors import EngineError
from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.kernels_cpu import built
from contraflow.model.kinds import Latent, Yarn
from contraflow.rollout.sampling import stream_key, uniforms

IN_TORCH = {"kernels": "off"}
FORMS: dict[str, dict[str, Any]] = {
    "roomy": IN_TORCH,
    "paged": IN_TORCH | {"max_sequences": 64},  # rows of this many could not all be kept side by side
    "paged and chunked": IN_TORCH | {"max_sequences": 64, "prefill_tokens": 7},
    "blocks of one": IN_TORCH | {"block_tokens": 1},
    "blocks of sixteen": IN_TORCH | {"block_tokens": 16},
    "chunked": IN_TORCH | {"prefill_tokens": 7},
    "few rows": IN_TORCH | {"max_sequences": 3},
    "tight": IN_TORCH | {"kv_tokens": 80, "max_sequences": 16},
    "tight and chunked": IN_TORCH | {"kv_tokens": 72, "prefill_tokens": 5, "max_sequences": 16},
    "in C": {},
    "in C, blocks of one": {"block_tokens": 1},
    "in C, blocks of sixteen": {"block_tokens": 16},
    "in C, tight and chunked": {"kv_tokens": 72, "prefill_tokens": 5, "max_sequences": 16},
}


def in_rows(form: str) -> bool:
    """Whether decoding sequences are copied to rows: where they fit, and no kernel reads pages."""
    in_c = "in C" in form and not isinstance(built(), str)
    return not (in_c or "tight" in form or "paged" in form)


@pytest.mark.parametrize("form", FORMS)
def test_logprobs_and_experts_equal_those_of_a_packed_forward(native: Any, form: str) -> None:
    async def body() -> None:
        decoder = new_decoder(native.tiny(), seed=1, std=0.2)
        engine = native.engine_of(decoder, **FORMS[form])
        requests = native.crowd(28, want_routes=True)
        completions = await native.answers(engine, requests)
        native.assert_true_to(decoder, requests, completions)
        assert [len(c.tokens) for c in completions] == [r.max_new_tokens for r in requests]
        report = engine.report()
        assert report.shared_tokens > 0
        assert report.kv_tokens_held == 0
        assert (report.preempted > 0) == ("tight" in form)
        assert (engine._core._passes.near is not None) == in_rows(form)
        await engine.close()

    native.run(body)


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "olmoe", "renormalise": False, "kv_heads": 4},
        {"family": "mixtral"},
        {"family": "qwen3", "experts": 0, "top_k": 0, "expert_ffn": 0, "ffn": 48, "renormalise": False},
        {"family": "llama", "experts": 0, "top_k": 0, "expert_ffn": 0, "ffn": 48, "renormalise": False, "tied": True},
        {"dense_layers": (1,), "ffn": 24},
        {"family": "deepseek_v3", "dense_layers": (0,), "ffn": 24, "shared_experts": 1, "groups": 4, "top_groups": 2}
        | {"kv_heads": 4, "head_dim": 12, "routed_scale": 2.5}
        | {"latent": Latent(q_rank=8, kv_rank=8, nope_dim=8, rope_dim=4, value_dim=6)},
        {"family": "glm4_moe", "dense_layers": (0,), "ffn": 24, "shared_experts": 2, "rotary_dim": 4},
        {"family": "gpt_oss", "window": 5, "window_layers": (0, 2), "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
        | {"attention_bias": True, "rope_scaling": Yarn(factor=4.0, original_context=32, truncate=False)},
        {"experts": 300, "expert_ffn": 8},
    ],
    ids=lambda changes: "-".join(f"{k}={v}" for k, v in changes.items())[:30],
)
def test_every_family_samples_with_the_logprobs_its_packed_forward_gives(native: Any, changes: dict[str, Any]) -> None:
    async def body() -> None:
        config = native.tiny(**changes)
        decoder = new_decoder(config, seed=2, std=0.2)
        for form in ("paged and chunked", "roomy", "in C"):
            engine = native.engine_of(decoder, **FORMS[form])
            requests = native.crowd(8, want_routes=bool(config.experts))
            completions = await native.answers(engine, requests)
            native.assert_true_to(decoder, requests, completions)
            await engine.close()
        for answer in completions:
            if answer.routes is not None:
                assert answer.routes.shape[1:] == (len(config.moe_layers), config.top_k)
                assert answer.routes.dtype == (np.uint8 if config.experts <= 256 else np.uint16)

    native.run(body)


def test_a_full_cache_preempts_and_loses_nothing(native: Any) -> None:
    async def body() -> None:
        requests = native.crowd(24, new=30)
        results = []
        for kv_tokens in (4096, 72):
            engine = native.engine_of(new_decoder(native.tiny(), seed=1, std=0.2), kv_tokens=kv_tokens)
            results.append(await native.answers(engine, requests))
            report = engine.report()
            assert (report.preempted > 0) == (kv_tokens == 72)
            await engine.close()
        for roomy, tight in zip(*results, strict=True):
            assert roomy.tokens.tolist() == tight.tokens.tolist()
            np.testing.assert_allclose(roomy.logprobs, tight.logprobs, atol=native.tolerance, rtol=0)

    native.run(body)


def test_a_sequence_that_could_never_fit_is_refused_at_once_and_one_that_just_fits_is_not(native: Any) -> None:
    async def body() -> None:
        engine = native.engine_of(new_decoder(native.tiny(), seed=1), kv_tokens=40)
        with pytest.raises(EngineError, match=r"41 tokens \(prompt 30\) do not fit a KV cache of 40"):
            await engine.generate(native.ask("a", range(30), new=12))
        both = await native.answers(
            engine, [native.ask("b", range(30), new=11), native.ask("c", range(30), new=11, seed=2)]
        )
        assert [len(c.tokens) for c in both] == [11, 11]
        await engine.close()

    native.run(body)


@pytest.mark.parametrize("form", ["roomy", "paged"])
def test_the_next_turn_of_an_episode_finds_its_past_in_the_cache(native: Any, form: str) -> None:
    async def body() -> None:
        decoder = new_decoder(native.tiny(), seed=1, std=0.2)
        engine = native.engine_of(decoder, **FORMS[form])
        first = native.ask("a", range(9), new=8, want_routes=True)
        answer = await engine.generate(first)
        fed = engine.report().fed_tokens
        second = native.ask("b", [*range(9), *answer.tokens.tolist(), 3, 4], new=8, want_routes=True)
        native.assert_true_to(decoder, [second], [await engine.generate(second)])
        assert engine.report().fed_tokens - fed == 9 + 8 + 2 - 1 - 16
        await engine.close()

    native.run(body)


def test_greedy_equals_transformers_generate(native: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from contraflow.model.folder import save_folder

    async def body() -> None:
        decoder = new_decoder(native.tiny(), seed=3, std=0.2)
        save_folder(decoder, tmp_path)
        oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        engine = native.engine_of(decoder)
        prompts = [np.random.default_rng(i).integers(0, native.vocab, 3 + 5 * i).tolist() for i in range(5)]
        requests = [native.ask(f"g{i}", prompt, new=30, temperature=0.0) for i, prompt in enumerate(prompts)]
        for prompt, answer in zip(prompts, await native.answers(engine, requests), strict=True):
            given = torch.tensor([prompt])
            theirs = oracle.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=30, min_new_tokens=30, do_sample=False
            )
            assert answer.tokens.tolist() == theirs[0, len(prompt) :].tolist()
        await engine.close()

    native.run(body)


def test_what_is_sampled_first_follows_the_model_by_chi_square(native: Any) -> None:
    async def body() -> None:
        decoder = new_decoder(native.tiny(), seed=4, std=0.3)
        engine = native.engine_of(decoder, routes=False)
        count, prompt = 6000, [3, 1, 4, 1, 5]
        requests = [native.ask(f"s{i}", prompt, new=1, seed=i, temperature=0.8) for i in range(count)]
        seen = np.bincount([int(c.tokens[0]) for c in await native.answers(engine, requests)], minlength=native.vocab)
        with torch.no_grad():
            hidden = decoder(torch.tensor(prompt), torch.arange(5), PackedPlan.of([0, 5]))[-1:]
            expected = count * torch.softmax(decoder.logits(hidden)[0].double() / 0.8, -1).numpy()
        common = expected > 5
        chi_square = ((seen - expected)[common] ** 2 / expected[common]).sum()
        degrees = common.sum() - 1
        assert chi_square < degrees + 4.5 * math.sqrt(2 * degrees)
        await engine.close()

    native.run(body)


def test_the_noise_of_a_token_is_that_of_its_seed_and_its_place_in_the_sequence(native: Any) -> None:
    async def body() -> None:
        decoder = new_decoder(native.tiny(), seed=1)
        with torch.no_grad():
            decoder.head.zero_()  # every token has probability 1/32, so the token is the uniform's first five bits
        engine = native.engine_of(decoder)
        requests = [native.ask(f"u{i}", range(1 + i), new=20, seed=i // 2) for i in range(10)]
        for request, answer in zip(requests, await native.answers(engine, requests), strict=True):
            places = np.arange(len(request.prompt), len(request.prompt) + 20)
            noise = uniforms(np.full(20, stream_key(request.seed)), places)
            assert answer.tokens.tolist() == (noise * native.vocab).astype(int).tolist()
        await engine.close()

    native.run(body)


def test_the_report_says_whether_kernels_in_c_decode_and_why_not(native: Any) -> None:
    decoder = new_decoder(native.tiny(), seed=1)
    found = built()
    told = "; kernels in C" if not isinstance(found, str) else f"; no kernels in C: {found}"
    assert native.engine_of(decoder).report().decoding.endswith(told)
    assert "kernels" not in native.engine_of(decoder, kernels="off").report().decoding
    torch.set_num_threads(2)
    try:
        assert "no kernels in C: they are for one thread" in native.engine_of(decoder).report().decoding
    finally:
        torch.set_num_threads(1)
    half = Decoder(native.tiny(), compute_dtype=torch.bfloat16)
    assert "no kernels in C: they are for fp32" in native.engine_of(half).report().decoding


@pytest.mark.parametrize("form", FORMS)
def test_after_it_forgot_an_engine_computes_bit_for_bit_as_a_new_one(native: Any, form: str) -> None:
    """In what it did before, prompts are the same, rows were more, and tokens that padding saw were others."""

    async def body() -> None:
        decoder = new_decoder(native.tiny(), seed=1, std=0.5)
        used, new = [native.engine_of(decoder, **FORMS[form]) for _ in range(2)]
        requests = native.crowd(10, seed=3)
        await native.answers(used, native.crowd(28, seed=4, longest=60))
        await native.answers(used, requests)
        await used.forget()
        one, other = [await native.answers(engine, requests) for engine in (used, new)]
        assert [c.tokens.tolist() for c in one] == [c.tokens.tolist() for c in other]
        assert [c.logprobs.tolist() for c in one] == [c.logprobs.tolist() for c in other]
        await used.close()
        await new.close()

    native.run(body)


def test_an_engine_forgets_nothing_while_requests_are_in_flight(native: Any) -> None:
    async def body() -> None:
        engine = native.engine_of(new_decoder(native.tiny(), seed=1))
        going = asyncio.ensure_future(engine.generate(native.ask("q", [1, 2, 3])))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="1 requests are in flight; abort them"):
            await engine.forget()
        assert len((await going).tokens) == 12
        await engine.close()

    native.run(body)
