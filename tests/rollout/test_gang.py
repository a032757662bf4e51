"""The engine over ranks gives what the engine of one gives, whatever happens, and names the rank that fails it."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from contraflow.config import Engine as EngineSection
from contraflow.config import Parallel
from contraflow.errors import CarrierError, ConfigError, EngineError
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.kinds import Latent
from contraflow.rollout.gang import GangEngine
from contraflow.rollout.rank import led_engine
from contraflow.types import Request, StopReason, Version
from tests.rollout.gangs import Gang, Spec

V1, V2 = Version(1, 1), Version(1, 2)
ROOMY: dict[str, Any] = {}
TIGHT = {"kv_tokens": 80, "prefill_tokens": 11, "max_sequences": 16}
DENSE = {"family": "qwen3", "experts": 0, "top_k": 0, "expert_ffn": 0, "ffn": 48, "renormalise": False}
SIGMOID = {"dense_layers": (0,), "ffn": 24, "shared_experts": 1, "groups": 4, "top_groups": 2}
LATENT = Latent(q_rank=8, kv_rank=8, nope_dim=8, rope_dim=4, value_dim=6)
DEEPSEEK = {"family": "deepseek_v3", **SIGMOID, "kv_heads": 4, "head_dim": 12, "latent": LATENT}
OSS = {"family": "gpt_oss", "window": 5, "window_layers": (0, 2), "swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    ranks = Gang()
    yield ranks
    ranks.close()


def spec_of(
    config: Any, parallel: dict[str, Any], *, version: Version | None = V1, turned: int = -1, **keys: Any
) -> Spec:
    shape: dict[str, Any] = {"block_tokens": 4, "kv_tokens": 4096, "context_tokens": 128, "max_sequences": 32}
    section = EngineSection(**{**shape, "routes": bool(config.experts), **keys}, parallel=Parallel(**parallel))
    return Spec(config, section, version=version, turned=turned)


async def tokens_flow(engine: GangEngine, count: int) -> None:
    goal = engine.report().tokens + count
    while engine.report().tokens < goal:  # noqa: ASYNC110 - an engine says nothing between completions
        await asyncio.sleep(0.001)


def form(parallel: dict[str, Any], changes: dict[str, Any] | None = None, keys: dict[str, Any] | None = None) -> Any:
    """One case of the default suite, or with both settings a slow one."""
    marks = [] if keys is not None else [pytest.mark.slow]
    words = [f"{k}={v}" for k, v in (parallel | (changes or {})).items()]
    name = "-".join([*words, "tight" if keys is TIGHT else "roomy" if keys is ROOMY else "both"])
    return pytest.param(parallel, changes or {}, [ROOMY, TIGHT] if keys is None else [keys], marks=marks, id=name)


@pytest.mark.parametrize(
    ("parallel", "changes", "settings"),
    [
        form({"dp": 2, "ep": 2}, keys=ROOMY),
        form({"dp": 2, "ep": 2}, keys=TIGHT),
        form({"tp": 2}, keys=TIGHT),
        form({"dp": 2, "tp": 2, "ep": 4}, keys=TIGHT),
        form({"dp": 2}),
        form({"tp": 2, "ep": 2}),
        form({"tp": 2, "ep": 2}, {"family": "olmoe", "renormalise": False, "kv_heads": 4}),
        form({"dp": 2, "ep": 2}, {"dense_layers": (1,), "ffn": 24}),
        form({"dp": 2, "ep": 2}, {"experts": 300, "expert_ffn": 8}),
        form({"dp": 2, "tp": 2}, DENSE),
        form({"dp": 4, "ep": 4}),
        form({"dp": 4, "ep": 2}),
        form({"dp": 4, "ep": 4, "dispatch": "hierarchical", "domain_ranks": 2}),
        form({"dp": 2, "tp": 2, "ep": 2}),
        form({"dp": 2, "tp": 2, "ep": 4}),
        form({"tp": 4, "ep": 4}, {"kv_heads": 4}),
    ],
)
def test_tokens_logprobs_and_experts_are_those_of_one_rank(
    native: Any, gang: Gang, parallel: dict[str, Any], changes: dict[str, Any], settings: list[dict[str, Any]]
) -> None:
    async def body() -> None:
        config = native.tiny(**changes)
        decoder = new_decoder(config, seed=1, std=0.2)
        requests = native.crowd(16, want_routes=bool(config.experts))
        for keys in settings:
            alone = native.engine_of(new_decoder(config, seed=1, std=0.2), routes=bool(config.experts), **keys)
            wanted = await native.answers(alone, requests)
            await alone.close()
            engine = gang.engine(spec_of(config, parallel, **keys))
            got = await native.answers(engine, requests)
            report = engine.report()
            await engine.close()
            native.assert_true_to(decoder, requests, got)
            for mine, theirs in zip(got, wanted, strict=True):
                assert mine.tokens.tolist() == theirs.tokens.tolist()
                np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=native.tolerance, rtol=0)
            assert report.tokens == sum(len(c.tokens) for c in got)
            assert (report.running, report.waiting, report.kv_tokens_held) == (0, 0, 0)
            assert report.kv_tokens == engine._gang._core.section.kv_tokens * parallel.get("dp", 1)
            assert report.shared_tokens > 0
            assert (report.preempted > 0) == (keys is TIGHT)

    native.run(body)


@pytest.mark.parametrize("parallel", [{"dp": 2, "ep": 2}, slow({"tp": 2, "ep": 2}), slow({"dp": 2, "tp": 2, "ep": 4})])
@pytest.mark.parametrize("seed", [1, slow(2), slow(3), slow(4)])
def test_whatever_happens_every_token_has_the_logprob_its_version_gives_it(
    native: Any, gang: Gang, parallel: dict[str, Any], seed: int
) -> None:
    """Random lengths, shared prefixes, preemptions, aborts, refreshes of both policies and idle ranks, by steps."""
    draws = np.random.default_rng(seed)
    models = [new_decoder(native.tiny(), seed=s, std=0.2) for s in (1, 2)]
    releases = [native.release(model) for model in models]
    policy = ("keep", "recompute")[seed % 2]
    rank = gang.lead(spec_of(native.tiny(), parallel, version=None, kv_tokens=96, prefill_tokens=17, on_refresh=policy))
    core = gang.core(rank)
    core.swap(Version(1, 0), *releases[0])
    stems = [draws.integers(0, native.vocab, 20).tolist() for _ in range(2)]
    asked: dict[str, Request] = {}
    for step in range(50):
        for _ in range(draws.integers(0, 3) if step < 35 else 0):
            stem, name = int(draws.integers(2)), f"r{len(asked)}"
            prompt = stems[stem][: draws.integers(1, 21)] + [1] * int(draws.integers(0, 3))
            length = int(draws.integers(1, 20))
            asked[name] = native.ask(name, prompt, new=length, seed=len(asked), want_routes=True, group=f"g{stem}")
            core.submit(asked[name], name)
        if draws.random() < 0.1 and asked:
            core.abort([f"r{draws.integers(len(asked))}", "nobody"])
        if draws.random() < 0.1:
            assert core.version is not None
            core.swap(Version(1, core.version.n + 1), *releases[(core.version.n + 1) % 2])
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
            np.testing.assert_allclose(
                answer.logprobs[part], expected[span.version.n % 2][0][part], atol=native.tolerance, rtol=0
            )
        if answer.routes is not None and answer.cache != "kept":
            np.testing.assert_array_equal(answer.routes, expected[answer.spans[-1].version.n % 2][1])
    assert core.report().swaps > 1
    assert core.report().kv_tokens_held == 0
    core.close()
    rank.leave()


def test_a_version_that_one_rank_cannot_prove_is_refused_by_all_and_all_serve_the_old_one(
    native: Any, gang: Gang
) -> None:
    async def body() -> None:
        engine = gang.engine(spec_of(native.tiny(), {"dp": 2}, turned=1))
        requests = [native.ask(name, range(5), new=9, seed=3) for name in "ab"]  # one for each rank
        before = await native.answers(engine, requests)
        assert before[0].tokens.tolist() != before[1].tokens.tolist()  # rank 1 is odd
        tensors, probe = native.release(new_decoder(native.tiny(), seed=2, std=0.2))
        with pytest.raises(CarrierError, match="rank 1: the probe failed"):
            await engine.swap(V2, tensors, probe)
        assert engine.version == V1
        after = await native.answers(engine, requests)
        for was, now in zip(before, after, strict=True):
            assert (was.tokens.tobytes(), was.logprobs.tobytes()) == (now.tokens.tobytes(), now.logprobs.tobytes())
            assert was.spans == now.spans
        name = next(iter(tensors))
        with pytest.raises(CarrierError, match=f"missing '{name}'"):
            await engine.swap(V2, {key: value for key, value in tensors.items() if key != name}, probe)
        with pytest.raises(CarrierError, match=rf"{name!r} has shape \[2, 2\]"):
            await engine.swap(V2, {**tensors, name: tensors[name].new_zeros(2, 2)}, probe)
        await native.answers(engine, requests)
        await engine.close()

    native.run(body)


def test_ranks_that_compute_in_bf16_prove_and_serve_a_version_of_fp32(native: Any, gang: Gang) -> None:
    async def body() -> None:
        config = native.tiny()
        whole, half = new_decoder(config, seed=2), Decoder(config, compute_dtype=torch.bfloat16)
        half.load_state_dict(whole.state_dict())
        rank = gang.lead(spec_of(config, {"dp": 2, "ep": 2}, compute="bfloat16"))
        dtypes = {name.rpartition(".")[2]: weight.dtype for name, weight in rank.core.weights.items()}
        assert (dtypes["gate_up"], dtypes["weight"], dtypes["lm_head"]) == (torch.bfloat16, *2 * [torch.float32])
        engine = led_engine(rank, clock=time.perf_counter, on_broken=gang.broken.append)
        with whole.computing_in(torch.bfloat16):
            tensors, probe = native.release(whole)
        await engine.swap(V2, tensors, probe)
        requests = native.crowd(6)
        for request, answer in zip(requests, await native.answers(engine, requests), strict=True):
            wanted, _ = native.packed(half, request, answer)
            np.testing.assert_allclose(answer.logprobs, wanted, atol=0.05, rtol=0)  # paged attention rounds elsewhere
        await engine.close()

    native.run(body)


@pytest.mark.slow
def test_a_version_too_large_for_one_message_arrives_whole(native: Any, gang: Gang) -> None:
    async def body() -> None:
        config = native.tiny(vocab=4096, dim=512, head_dim=64, expert_ffn=128)
        new = new_decoder(config, seed=2)
        assert sum(p.nbytes for p in new.parameters()) > 32 << 20
        engine = gang.engine(spec_of(config, {"tp": 2, "ep": 2}))
        await engine.swap(V2, *native.release(new))
        requests = native.crowd(6, want_routes=True)
        native.assert_true_to(new, requests, await native.answers(engine, requests))
        await engine.close()

    native.run(body)


def test_a_model_that_cannot_be_shared_out_is_refused_on_every_rank(native: Any, gang: Gang) -> None:
    with pytest.raises(ConfigError, match="ep = 2 must divide the model's 7 experts"):
        gang.engine(spec_of(native.tiny(experts=7), {"dp": 2, "ep": 2}))


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("parallel", [{"dp": 2, "ep": 2}, slow({"tp": 2}), slow({"dp": 2})])
def test_a_rank_that_dies_or_hangs_fails_every_request_with_its_name(
    native: Any, gang: Gang, blow: signal.Signals, parallel: dict[str, Any]
) -> None:
    deadline_s = 5.0

    async def body() -> None:
        gang.broken.clear()
        victim = 2 if blow is signal.SIGKILL else 3  # a process as good as any, which was started before
        engine = gang.engine(spec_of(native.tiny(), {**parallel, "deadline_s": deadline_s}), first=victim)
        flying = [asyncio.create_task(engine.generate(native.ask(f"a{i}", [1, 2], new=120))) for i in range(4)]
        await tokens_flow(engine, 20)
        began = time.monotonic()
        os.kill(gang.followers[victim].pid or 0, blow)
        outcomes = await asyncio.gather(*flying, return_exceptions=True)
        took_s = time.monotonic() - began
        assert all(isinstance(o, EngineError) and "rank 1" in str(o) for o in outcomes), outcomes
        # A process group gives up at twice the deadline. An all-reduce over tp has no deadline but that.
        assert took_s < (deadline_s if blow is signal.SIGKILL else (2 * deadline_s if "ep" in parallel else 30))
        assert gang.broken == [str(outcomes[0])]
        with pytest.raises(EngineError, match="rank 1"):
            await engine.generate(native.ask("b", [1]))
        with pytest.raises(EngineError, match="rank 1"):
            await engine.swap(V2, *native.release(new_decoder(native.tiny(), seed=2)))
        gang.followers[victim].kill()
        gang.followers[victim].join(30)
        await engine.close()

    native.run(body)


def test_followers_end_when_the_leader_is_gone(native: Any, gang: Gang) -> None:
    rank = gang.lead(spec_of(native.tiny(), {"dp": 2, "ep": 2}))
    rank.star.close()
    gang.followers[1].join(30)
    assert gang.followers[1].exitcode not in (0, None)
    rank.leave()


@pytest.mark.slow
def test_an_idle_engine_shows_signs_of_life_and_notices_a_death(native: Any, gang: Gang) -> None:
    async def body() -> None:
        gang.broken.clear()
        engine = gang.engine(spec_of(native.tiny(), {"dp": 2, "ep": 2, "deadline_s": 3.0}))
        await engine.generate(native.ask("a", [1]))
        await asyncio.sleep(5)
        await engine.generate(native.ask("a", [1]))
        gang.followers[1].kill()
        await asyncio.sleep(2)
        assert len(gang.broken) == 1
        with pytest.raises(EngineError, match="rank 1"):
            await engine.generate(native.ask("b", [1]))
        await engine.close()

    native.run(body)
