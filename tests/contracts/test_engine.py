"""What every engine does, held against each: the native one (both ways of stepping, and over ranks), the scripted twin,
and a served one over the twin of its server."""

import asyncio
import itertools
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from contraflow.config import Engine as EngineSection
from contraflow.config import Parallel
from contraflow.errors import CarrierError, EngineError
from contraflow.model.decoder import new_decoder
from contraflow.model.families import ModelConfig
from contraflow.rollout.engine import Engine
from contraflow.rollout.native import NativeEngine
from contraflow.rollout.scripted import ScriptedEngine
from contraflow.rollout.sglang_twin import SglangTwin
from contraflow.rollout.vllm_twin import VllmTwin
from contraflow.types import Probe, Request, Span, StopReason, Version
from tests.rollout.gangs import Gang, Spec
from tests.rollout.served_lab import (
    CONFIG,
    VLLM_CONTEXT,
    VLLM_MODEL,
    VLLM_PYTHON,
    VOCAB,
    model_folder,
    over_twins,
    over_url,
    release,
    served_section,
    vllm_section,
    vllm_server,
)

V1, V2, V3 = Version(1, 1), Version(1, 2), Version(1, 3)
CONTEXT = CONFIG.context
Policy = Literal["keep", "recompute"]
Release = tuple[Mapping[str, torch.Tensor], Probe]


@dataclass(frozen=True)
class Lab:
    """One kind of engine, and weights it can or can't prove."""

    make: Callable[[Policy, Version | None], Engine]
    good: Callable[[int], Release]  # weights of a seed, with their own probe
    torn: Callable[[int], Release]  # weights that the probe is not of
    routes: bool = True
    context: int = CONTEXT
    long: int = 240  # tokens that outlast two refreshes
    nap_s: float = 0  # between looks at a report: another program's server needs the cores


def section_of(policy: Policy, lookahead: Any = "auto", **parallel: Any) -> EngineSection:
    keys: dict[str, Any] = {"context_tokens": CONTEXT, "kv_tokens": 2048, "block_tokens": 8, "routes": True}
    return EngineSection(**keys, on_refresh=policy, lookahead=lookahead, parallel=Parallel(**parallel))


def native(stepping: Literal["thread", "inline"], lookahead: str = "auto") -> Lab:
    def make(policy: Policy, version: Version | None) -> Engine:
        decoder = new_decoder(CONFIG, seed=0, std=0.3)
        section = section_of(policy, lookahead)
        return NativeEngine(decoder, section, clock=time.perf_counter, stepping=stepping, version=version)

    return Lab(make, *releases())


def spread(gang: Gang, ep: int) -> Lab:
    def make(policy: Policy, version: Version | None) -> Engine:
        section = section_of(policy, dp=2, ep=ep)
        return gang.engine(Spec(CONFIG, section, seed=0, std=0.3, version=version))

    return Lab(make, *releases())


def served(place: Path, kind: Literal["vllm", "sglang"]) -> Lab:
    made = itertools.count()

    def make(policy: Policy, version: Version | None) -> Engine:
        section = served_section(policy, kind=kind)
        twin = VllmTwin if kind == "vllm" else SglangTwin
        return over_twins(CONFIG, place / str(next(made)), section=section, version=version, kind=twin).engine

    return Lab(make, *releases())


@pytest.fixture(scope="module")
def vllm_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One real server for all tests of this file; each attaches an engine of its own to it."""
    if VLLM_PYTHON not in os.environ:
        pytest.skip(f"{VLLM_PYTHON} names no interpreter that has vLLM")
    place, gpu = tmp_path_factory.mktemp("vllm"), torch.cuda.is_available()
    folder = model_folder(VLLM_MODEL, place / "model")
    with vllm_server(vllm_section(gpu=gpu), folder, place / "log") as url:

        def make(policy: Policy, version: Version | None) -> Engine:
            return over_url(url, vllm_section(policy, gpu=gpu), VLLM_MODEL, folder, version)

        yield Lab(make, *releases(VLLM_MODEL), routes=gpu, context=VLLM_CONTEXT, long=1000, nap_s=0.002)


def releases(config: ModelConfig = CONFIG) -> tuple[Callable[[int], Release], Callable[[int], Release]]:
    def good(seed: int) -> Release:
        return release(seed, config)

    return good, lambda seed: (good(seed)[0], good(seed + 1)[1])


def scripted() -> Lab:
    def answer(request: Request) -> list[int]:
        draws = np.random.default_rng([request.seed, *request.prompt.tolist()])
        return draws.integers(0, VOCAB, CONTEXT).tolist()

    def prove(tensors: Mapping[str, torch.Tensor], probe: Probe) -> None:
        if tensors["w"].item() != probe.tolerance:
            raise CarrierError("the probe failed")

    def make(policy: Policy, version: Version | None) -> Engine:
        return ScriptedEngine(
            answer,
            vocab=VOCAB,
            clock=time.perf_counter,
            context_tokens=CONTEXT,
            on_refresh=policy,
            routes=(2, 2),
            prove=prove,
            version=version,
        )

    def weighed(weight: float, wanted: float) -> Release:
        return {"w": torch.tensor(weight)}, Probe((), (), wanted)

    return Lab(make, lambda seed: weighed(seed, seed), lambda seed: weighed(seed, seed + 1))


LATER = [
    pytest.param("native-gang-ep", marks=pytest.mark.slow),
    pytest.param("served-vllm", marks=[pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(400)]),
]
LABS = {
    "native-thread": native("thread"),
    "native-inline": native("inline"),
    "native-ahead": native("thread", "on"),
    "scripted": scripted(),
}


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    two = Gang()
    yield two
    two.close()


@pytest.fixture(params=[*LABS, "served", "served-sglang", "native-gang", *LATER])
def lab(request: pytest.FixtureRequest) -> Lab:
    if request.param in LABS:
        return LABS[request.param]
    if request.param == "served-vllm":
        real: Lab = request.getfixturevalue("vllm_lab")
        return real
    if request.param in ("served", "served-sglang"):
        kind: Literal["vllm", "sglang"] = "vllm" if request.param == "served" else "sglang"
        return served(request.getfixturevalue("tmp_path"), kind)
    return spread(request.getfixturevalue("gang"), ep=2 if request.param.endswith("ep") else 1)


@asynccontextmanager
async def opened(lab: Lab, policy: Policy = "keep", version: Version | None = V1) -> AsyncIterator[Engine]:
    engine = lab.make(policy, version)
    try:
        yield engine
    finally:
        await engine.close()


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(body(), 90)

    asyncio.run(bounded())


def ask(name: str = "a", *, prompt: tuple[int, ...] = (1, 2, 3), new: int = 8, seed: int = 5, **rest: Any) -> Request:
    return Request(id=name, prompt=np.array(prompt, np.int32), seed=seed, max_new_tokens=new, **rest)


async def tokens_flow(lab: Lab, engine: Engine, count: int) -> None:
    """Wait until the engine has sampled `count` more tokens."""
    goal = engine.report().tokens + count
    while engine.report().tokens < goal:  # noqa: ASYNC110 - an engine says nothing between completions
        await asyncio.sleep(lab.nap_s)


def test_a_completion_has_tokens_fp32_logprobs_and_a_span_of_the_version_served(lab: Lab) -> None:
    async def body() -> None:
        async with opened(lab) as engine:
            answer = await engine.generate(ask(new=8))
            assert answer.tokens.dtype == np.int32
            assert answer.logprobs.dtype == np.float32
            assert answer.tokens.shape == answer.logprobs.shape == (8,)
            assert ((answer.tokens >= 0) & (answer.tokens < VOCAB)).all()
            assert (answer.logprobs <= 0).all()
            assert answer.spans == (Span(V1, 0, 8),)
            assert (answer.stop, answer.cache, answer.routes) == (StopReason.LENGTH, "unbroken", None)

    run(body)


def test_generation_ends_with_the_first_stop_token_and_keeps_it(lab: Lab) -> None:
    async def body() -> None:
        async with opened(lab) as engine:
            free = (await engine.generate(ask(new=30))).tokens.tolist()
            stops = (free[12], free[4], VOCAB - 1)
            first = min(free.index(s) for s in stops if s in free)
            answer = await engine.generate(ask(new=30, stop_tokens=stops))
            assert answer.tokens.tolist() == free[: first + 1]
            assert answer.stop is StopReason.STOP
            again = await engine.generate(ask(new=30))  # a request without stops, after one with: none is left over
            assert again.tokens.tolist() == free

    run(body)


def test_each_request_of_a_crowd_has_its_own_stops_and_length(lab: Lab) -> None:
    async def body() -> None:
        async with opened(lab) as engine:
            lengths = [30, 3, 25, 9, 40, 17, 22, 5]
            free = [(await engine.generate(ask(new=n, seed=n))).tokens.tolist() for n in lengths]
            stops = [tuple(tokens[i::7][1:3]) for i, tokens in enumerate(free)]
            crowd = [ask(f"c{i}", new=n, seed=n, stop_tokens=stops[i]) for i, n in enumerate(lengths)]
            for i, answer in enumerate(await asyncio.gather(*(engine.generate(r) for r in crowd))):
                end = min((free[i].index(s) + 1 for s in stops[i] if s in free[i]), default=lengths[i])
                assert answer.tokens.tolist() == free[i][:end]
                assert (answer.stop is StopReason.STOP) == bool(stops[i])

    run(body)


def test_a_stop_token_on_the_last_allowed_place_counts_as_a_stop(lab: Lab) -> None:
    async def body() -> None:
        async with opened(lab) as engine:
            free = (await engine.generate(ask(new=1))).tokens.tolist()
            answer = await engine.generate(ask(new=1, stop_tokens=tuple(free)))
            assert (answer.tokens.tolist(), answer.stop) == (free, StopReason.STOP)

    run(body)


def test_the_context_ends_a_completion_and_refuses_a_prompt_that_fills_it(lab: Lab) -> None:
    async def body() -> None:
        async with opened(lab) as engine:
            answer = await engine.generate(ask(prompt=(1,) * (lab.context - 3), new=50))
            assert (len(answer.tokens), answer.stop) == (3, StopReason.LENGTH)
            with pytest.raises(EngineError, match=f"prompt of {lab.context} tokens .* context of {lab.context}"):
                await engine.generate(ask(prompt=(1,) * lab.context))

    run(body)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (ask(prompt=()), "at least one token"),
        (ask(prompt=(1, VOCAB)), f"from 1 to {VOCAB}; the vocabulary is 0 to {VOCAB - 1}"),
        (ask(prompt=(-1, 3)), "from -1 to 3"),
        (ask(new=0), "max_new_tokens = 0"),
        (ask(temperature=-1.0), "temperature = -1.0"),
        (ask(temperature=math.nan), "temperature = nan"),
    ],
)
def test_a_request_out_of_range_is_refused_by_name_and_the_engine_goes_on(
    lab: Lab, request_: Request, text: str
) -> None:
    async def body() -> None:
        async with opened(lab) as engine:
            with pytest.raises(EngineError, match="request 'a'") as caught:
                await engine.generate(request_)
            assert text in str(caught.value)
            await engine.generate(ask())

    run(body)


def test_an_id_in_flight_is_refused_and_free_again_afterwards(lab: Lab) -> None:
    async def body() -> None:
        async with opened(lab) as engine:
            first = asyncio.create_task(engine.generate(ask(new=200)))
            await tokens_flow(lab, engine, 1)
            with pytest.raises(EngineError, match="already in flight"):
                await engine.generate(ask())
            assert len((await first).tokens) == 200
            await engine.generate(ask())

    run(body)


def test_the_same_seed_gives_the_same_tokens_alone_or_in_a_crowd_and_another_seed_others(lab: Lab) -> None:
    async def body() -> None:
        async with opened(lab) as engine:
            alone = await engine.generate(ask(new=20, seed=3))
            names = [f"c{i}" for i in range(12)]
            crowd = await asyncio.gather(*(engine.generate(ask(n, new=20, seed=i)) for i, n in enumerate(names)))
            assert crowd[3].tokens.tolist() == alone.tokens.tolist()
            assert len({tuple(c.tokens.tolist()) for c in crowd}) == 12

    run(body)


def test_experts_are_given_for_every_token_but_the_last_when_asked(lab: Lab) -> None:
    if not lab.routes:
        pytest.skip("this server records no routes")

    async def body() -> None:
        async with opened(lab) as engine:
            answer = await engine.generate(ask(prompt=(1, 2, 3, 4, 5), new=7, want_routes=True))
            assert answer.routes is not None
            assert answer.routes.shape == (5 + 7 - 1, 2, 2)
            assert answer.routes.dtype == np.uint8
            assert (answer.routes < 4).all()

    run(body)


def test_abort_gives_what_there_is_and_unknown_ids_pass(lab: Lab) -> None:
    async def body() -> None:
        async with opened(lab) as engine:
            names = ("a", "b", "c")
            tasks = [asyncio.create_task(engine.generate(ask(n, new=240, want_routes=lab.routes))) for n in names]
            await tokens_flow(lab, engine, 30)
            await engine.abort(["a", "nobody", "c"])
            for task in (tasks[0], tasks[2]):
                answer = await task
                count = len(answer.tokens)
                assert answer.stop is StopReason.ABORTED
                assert 0 < count < 240
                assert len(answer.logprobs) == count
                assert answer.spans == (Span(V1, 0, count),)
            assert (await tasks[1]).stop is StopReason.LENGTH

    run(body)


def test_cancelling_a_call_aborts_its_request(lab: Lab) -> None:
    async def body() -> None:
        async with opened(lab) as engine:
            task = asyncio.create_task(engine.generate(ask(new=240)))
            await tokens_flow(lab, engine, 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await engine.generate(ask(new=2))  # the id is free, and the engine goes on
            report = engine.report()
            assert (report.running, report.waiting) == (0, 0)
            assert report.tokens < 240

    run(body)


def test_close_fails_what_is_in_flight_refuses_what_comes_after_and_may_be_repeated(lab: Lab) -> None:
    async def body() -> None:
        engine = lab.make("keep", V1)
        tasks = [asyncio.create_task(engine.generate(ask(n, new=240))) for n in ("a", "b")]
        await tokens_flow(lab, engine, 1)
        await engine.close()
        for task in tasks:
            with pytest.raises(EngineError, match="closed"):
                await task
        await engine.close()
        for call in (engine.generate(ask()), engine.abort(["a"]), engine.swap(V2, *lab.good(1))):
            with pytest.raises(EngineError, match="closed"):
                await call

    run(body)


def test_an_engine_that_was_never_used_closes(lab: Lab) -> None:
    run(lambda: lab.make("keep", V1).close())


def test_nothing_is_generated_before_a_version_is_served(lab: Lab) -> None:
    async def body() -> None:
        async with opened(lab, version=None) as engine:
            assert engine.version is None
            with pytest.raises(EngineError, match="serves no version yet"):
                await engine.generate(ask())
            with pytest.raises(CarrierError):
                await engine.swap(V1, *lab.torn(3))
            assert engine.version is None
            stall = await engine.swap(V1, *lab.good(3))
            assert stall >= 0
            assert engine.version == V1
            assert (await engine.generate(ask())).spans == (Span(V1, 0, 8),)

    run(body)


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_a_swap_in_mid_generation_is_recorded_token_by_token(lab: Lab, policy: Policy) -> None:
    async def body() -> None:
        second, third = lab.good(7), lab.good(8)  # made first: a server generates on while this process computes
        async with opened(lab, policy) as engine:
            tasks = [asyncio.create_task(engine.generate(ask(f"t{i}", new=lab.long, seed=i))) for i in range(3)]
            await tokens_flow(lab, engine, 60)
            await engine.swap(V2, *second)
            assert engine.version == V2
            await tokens_flow(lab, engine, 60)
            await engine.swap(V3, *third)
            for answer in await asyncio.gather(*tasks):
                assert [s.version for s in answer.spans] == [V1, V2, V3]
                assert [s.start for s in answer.spans] == [0, *(s.end for s in answer.spans[:-1])]
                assert answer.spans[-1].end == len(answer.tokens) == len(answer.logprobs) == lab.long
                assert answer.cache == {"keep": "kept", "recompute": "recomputed"}[policy]
            after = await engine.generate(ask(new=4))
            assert (after.spans, after.cache) == ((Span(V3, 0, 4),), "unbroken")
            assert engine.report().swaps == 2

    run(body)


def test_after_a_failed_proof_the_engine_serves_what_it_served(lab: Lab) -> None:
    async def body() -> None:
        async with opened(lab) as engine:
            await engine.swap(V2, *lab.good(7))
            before = await engine.generate(ask(new=40))
            flying = asyncio.create_task(engine.generate(ask("b", new=200)))
            await tokens_flow(lab, engine, 2)
            with pytest.raises(CarrierError):
                await engine.swap(V3, *lab.torn(9))
            assert engine.version == V2
            assert [s.version for s in (await flying).spans] == [V2]
            after = await engine.generate(ask(new=40))
            assert after.tokens.tolist() == before.tokens.tolist()
            assert after.spans == before.spans
            assert engine.report().swaps == 1
            await engine.swap(V3, *lab.good(9))
            assert engine.version == V3

    run(body)


def test_the_report_counts_tokens_and_its_seconds_sum_to_the_wall_clock(lab: Lab) -> None:
    async def body() -> None:
        before = time.perf_counter()
        engine = lab.make("keep", V1)
        made = time.perf_counter()
        await asyncio.gather(*(engine.generate(ask(f"r{i}", new=10 + i, seed=i)) for i in range(4)))
        await engine.swap(V2, *lab.good(1))
        asked = time.perf_counter()
        report = engine.report()
        answered = time.perf_counter()
        assert report.tokens == 10 + 11 + 12 + 13
        assert (report.version, report.running, report.waiting) == (V2, 0, 0)
        assert asked - made <= sum(report.seconds.values()) + 1e-3
        assert sum(report.seconds.values()) <= answered - before + 1e-3
        assert report.longest_stall_s <= report.seconds["swap"] + 1e-3
        assert report.doing
        await engine.close()

    run(body)
