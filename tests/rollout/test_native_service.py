"""The native engine at work: its thread and loop, what it refuses, and what it does when a step fails."""

import asyncio
import math
import threading
import time
from typing import Any

import pytest
import torch

from contraflow.errors import ConfigError, EngineError
from contraflow.model.decoder import new_decoder
from contraflow.rollout.passes import bucket
from contraflow.types import Version

V2 = Version(1, 2)


def test_inline_runs_of_one_seed_are_bit_equal(native: Any) -> None:
    runs = []

    async def body() -> None:
        engine = native.engine_of(new_decoder(native.tiny(), seed=1, std=0.2), kv_tokens=160, on_refresh="recompute")
        tasks = [asyncio.create_task(engine.generate(request)) for request in native.crowd(20)]
        for _ in range(12):
            await asyncio.sleep(0)
        await engine.swap(V2, *native.release(new_decoder(native.tiny(), seed=2, std=0.2)))
        runs.append([(c.tokens.tobytes(), c.logprobs.tobytes(), c.spans) for c in await asyncio.gather(*tasks)])
        await engine.close()

    native.run(body)
    native.run(body)
    assert runs[0] == runs[1]


def test_a_blocked_event_loop_does_not_stop_the_engines_thread(native: Any) -> None:
    async def body() -> None:
        engine = native.engine_of(new_decoder(native.tiny(), seed=1), stepping="thread")
        task = asyncio.create_task(engine.generate(native.ask("a", [1, 2], new=120)))
        await asyncio.sleep(0.01)
        before = engine.report().steps
        assert before > 0
        time.sleep(0.05)  # noqa: ASYNC251 - a slow environment in the loop
        assert engine.report().steps > before + 5
        assert len((await task).tokens) == 120
        await engine.close()

    native.run(body)


def test_an_idle_engine_uses_no_processor_and_its_thread_ends_with_it(native: Any) -> None:
    async def body() -> None:
        engine = native.engine_of(new_decoder(native.tiny(), seed=1), stepping="thread")
        await engine.generate(native.ask("a", [1], new=2))
        assert any(thread.name == "contraflow-engine" for thread in threading.enumerate())
        before = time.process_time()
        await asyncio.sleep(0.3)
        assert time.process_time() - before < 0.1
        assert engine.report().doing == "idle"
        await engine.close()
        assert not any(thread.name == "contraflow-engine" for thread in threading.enumerate())

    native.run(body)


@pytest.mark.parametrize("stepping", ["thread", "inline"])
def test_requests_of_one_turn_of_the_loop_start_in_one_step(native: Any, stepping: str) -> None:
    async def body() -> None:
        engine = native.engine_of(new_decoder(native.tiny(), seed=1), stepping=stepping)
        requests = [native.ask(f"r{i}", range(1 + i % 7), new=9, seed=i) for i in range(20)]
        await native.answers(engine, requests)
        assert engine.report().steps == 9
        await engine.close()

    native.run(body)


@pytest.mark.parametrize("stepping", ["thread", "inline"])
def test_a_cancelled_swap_still_ends_one_way_or_the_other(native: Any, stepping: str) -> None:
    async def body() -> None:
        new = new_decoder(native.tiny(), seed=2, std=0.2)
        engine = native.engine_of(new_decoder(native.tiny(), seed=1, std=0.2), stepping=stepping)
        swap = asyncio.create_task(engine.swap(V2, *native.release(new)))
        await asyncio.sleep(0)
        swap.cancel()
        await asyncio.gather(swap, return_exceptions=True)
        assert engine.version == V2
        request = native.ask("a", range(9), want_routes=True)
        native.assert_true_to(new, [request], [await engine.generate(request)])
        await engine.close()

    native.run(body)


@pytest.mark.parametrize("stepping", ["thread", "inline"])
def test_weights_that_give_no_numbers_fail_the_request_with_a_cause(native: Any, stepping: str) -> None:
    async def body() -> None:
        decoder = new_decoder(native.tiny(), seed=1)
        engine = native.engine_of(decoder, stepping=stepping)
        with torch.no_grad():
            decoder.norm.fill_(math.nan)
        with pytest.raises(EngineError, match="no number"):
            await engine.generate(native.ask("a", [1, 2]))
        await engine.close()

    native.run(body)


@pytest.mark.parametrize("stepping", ["thread", "inline"])
def test_a_step_that_raises_fails_what_is_in_flight_and_the_engine_goes_on(native: Any, stepping: str) -> None:
    async def body() -> None:
        decoder = new_decoder(native.tiny(), seed=1)
        engine = native.engine_of(decoder, stepping=stepping)
        whole = decoder.norm.data
        decoder.norm.data = torch.ones(3)
        requests = native.crowd(6)
        outcomes = await asyncio.gather(*(engine.generate(r) for r in requests), return_exceptions=True)
        assert all(isinstance(o, EngineError) and "a step of the engine failed" in str(o) for o in outcomes)
        decoder.norm.data = whole
        native.assert_true_to(decoder, requests, await native.answers(engine, requests))
        assert engine.report().kv_tokens_held == 0
        await engine.close()

    native.run(body)


def test_settings_that_fit_no_model_or_no_block_are_refused(native: Any) -> None:
    decoder = new_decoder(native.tiny(), seed=1)
    with pytest.raises(ConfigError, match=r"engine.kv_tokens = 3 holds no block of engine.block_tokens = 4"):
        native.engine_of(decoder, kv_tokens=3)
    with pytest.raises(ConfigError, match=r"engine.context_tokens = 600 is beyond the model's 512"):
        native.engine_of(decoder, context_tokens=600)


def test_routes_are_refused_by_an_engine_that_does_not_record_them(native: Any) -> None:
    async def body() -> None:
        engine = native.engine_of(new_decoder(native.tiny(), seed=1), routes=False)
        with pytest.raises(EngineError, match=r"engine\.routes is false"):
            await engine.generate(native.ask("a", [1], want_routes=True))
        await engine.close()

    native.run(body)


def test_buckets_hold_their_count_and_are_few(native: Any) -> None:
    sizes = {bucket(count) for count in range(1, 257)}
    assert len(sizes) == 19
    assert all(count <= bucket(count) < count + max(8, count / 4) for count in range(1, 3000))
    assert bucket(256) == 256
