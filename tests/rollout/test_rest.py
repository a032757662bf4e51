"""An engine that gives its memory away in mid-generation goes on as if nothing had been."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from contraflow.errors import EngineError
from contraflow.model.decoder import new_decoder
from contraflow.rollout.native import NativeEngine
from contraflow.types import StopReason, Version

V2 = Version(1, 2)
FORMS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "paged": {"max_sequences": 64, "kv_tokens": 1024},  # no rows beside the pages
    "chunked": {"prefill_tokens": 7},
    "tight": {"kv_tokens": 80, "max_sequences": 16},
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


async def sampled(engine: NativeEngine, count: int) -> None:
    while engine.report().tokens < count:  # noqa: ASYNC110 - an engine says nothing between completions
        await asyncio.sleep(0)


def memory_of(engine: NativeEngine) -> int:
    core = engine._parts
    stores = [core._passes.cache.pool, core._passes.routes.blocks, *core.weights.values()]
    return sum(store.untyped_storage().nbytes() for store in stores if store is not None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stepping", ["inline", "thread"])
@pytest.mark.parametrize("form", list(FORMS))
def test_tokens_and_logprobs_do_not_know_of_it(native: Any, form: str, stepping: str, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs one CUDA device")

    async def body() -> None:
        requests = native.crowd(12, want_routes=True, new=30)
        wanted = None
        for rests in (False, True):
            decoder = new_decoder(native.tiny(), seed=1, std=0.2).to(device)
            engine = native.engine_of(decoder, stepping=stepping, **FORMS[form])
            tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
            for goal in (40, 150) if rests else ():
                await sampled(engine, goal)
                had = memory_of(engine)
                assert await engine.rest() == had
                assert memory_of(engine) == 0
                there = engine.report().tokens
                assert await engine.rest() == 0  # twice is once
                await asyncio.sleep(0.02)
                assert engine.report().tokens == there
                await engine.wake()
                assert memory_of(engine) == had
            answers = await asyncio.gather(*tasks)
            if rests:
                assert {"offload", "reload"} <= engine.report().seconds.keys()
            await engine.close()
            if wanted is None:
                wanted = answers
            for got, want in zip(answers, wanted, strict=True):
                assert got.tokens.tolist() == want.tokens.tolist()
                np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5, rtol=0)
                assert (got.spans, got.cache) == (want.spans, want.cache)
                assert got.routes.tobytes() == want.routes.tobytes()

    native.run(body)


def test_a_swap_waits_for_the_engine_to_wake_and_one_that_fails_rolls_back(native: Any) -> None:
    async def body() -> None:
        old, new = (new_decoder(native.tiny(), seed=s, std=0.2) for s in (1, 2))
        engine = native.engine_of(new_decoder(native.tiny(), seed=1, std=0.2))
        await engine.rest()
        swap = asyncio.create_task(engine.swap(V2, *native.release(new)))
        await asyncio.sleep(0.01)
        assert not swap.done()
        assert memory_of(engine) == 0
        await engine.wake()
        await swap
        requests = native.crowd(4)
        native.assert_true_to(new, requests, await native.answers(engine, requests))
        await engine.rest()
        await engine.wake()
        tensors, _ = native.release(old)
        with pytest.raises(Exception, match="the probe failed"):
            await engine.swap(Version(1, 3), tensors, native.release(new)[1])
        native.assert_true_to(new, requests, await native.answers(engine, requests))
        await engine.close()

    native.run(body)


def test_aborts_and_new_requests_are_heard_at_rest_and_closing_ends_them(native: Any) -> None:
    async def body() -> None:
        engine = native.engine_of(new_decoder(native.tiny(), seed=1, std=0.2))
        first, second, third = (
            asyncio.create_task(engine.generate(native.ask(name, range(5), new=50, seed=1))) for name in "abc"
        )
        await sampled(engine, 6)
        await engine.rest()
        await engine.abort(["a"])
        assert (await first).stop is StopReason.ABORTED
        late = asyncio.create_task(engine.generate(native.ask("late", range(9), new=3, seed=2)))
        await asyncio.sleep(0.01)
        assert not second.done()
        await engine.wake()
        assert len((await second).tokens) == 50
        assert len((await late).tokens) == 3
        await third
        doomed = asyncio.create_task(engine.generate(native.ask("d", range(5), new=100, seed=1)))
        await sampled(engine, engine.report().tokens + 3)
        await engine.rest()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await doomed

    native.run(body)
