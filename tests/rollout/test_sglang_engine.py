"""A served engine over twins of SGLang servers, and what becomes of a request when they fail or lie."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contraflow.config import Engine as EngineSection
from contraflow.config import Server as ServerSection
from contraflow.errors import CarrierError, ConfigError, EngineError, ServerError
from contraflow.model.decoder import new_decoder
from contraflow.rollout.engine import Engine
from contraflow.rollout.http_server import Reply
from contraflow.rollout.native import NativeEngine
from contraflow.rollout.open_served import open_servers
from contraflow.rollout.sglang import Sglang
from contraflow.rollout.sglang_twin import SglangTwin
from contraflow.types import Request, Span, StopReason, Version
from tests.rollout.served_lab import CONFIG, VOCAB, Twins, model_folder, over_twins, release, served_section

V1, V2 = Version(1, 1), Version(1, 2)


def ask(name: str = "a", **other: Any) -> Request:
    keys: dict[str, Any] = {"prompt": np.array([1, 2, 3], np.int32), "seed": 5, "max_new_tokens": 20, **other}
    return Request(id=name, **keys)


def run(place: Path, body: Callable[[Twins], Awaitable[None]], **options: Any) -> None:
    async def bounded() -> None:
        section = served_section("recompute", kind="sglang")
        twins = over_twins(CONFIG, place, section=section, version=V1, kind=SglangTwin, **options)
        try:
            async with asyncio.timeout(60):
                await body(twins)
        finally:
            await twins.engine.close()

    asyncio.run(bounded())


async def tokens_flow(engine: Engine, count: int) -> None:
    goal = engine.report().tokens + count
    while engine.report().tokens < goal:  # noqa: ASYNC110 - an engine says nothing between completions
        await asyncio.sleep(0)


def test_tokens_and_log_probabilities_are_those_of_the_same_weights_without_a_server(tmp_path: Path) -> None:
    async def body(twins: Twins) -> None:
        section = EngineSection(context_tokens=256, routes=True)
        decoder = new_decoder(CONFIG, seed=0, std=0.3)
        native = NativeEngine(decoder, section, clock=time.perf_counter, stepping="inline", version=V1)
        for temperature in (1.0, 0.6, 1.7, 0.0):
            request = ask(f"t{temperature}", temperature=temperature, want_routes=True)
            wanted, given = await native.generate(request), await twins.engine.generate(request)
            assert given.tokens.tolist() == wanted.tokens.tolist()
            assert np.abs(given.logprobs - wanted.logprobs).max() < 1e-4
            assert given.routes is not None
            assert wanted.routes is not None
            assert given.routes.tolist() == wanted.routes.tolist()
        await native.close()

    run(tmp_path, body)


@pytest.mark.parametrize("incremental", [True, False])
def test_servers_that_repeat_all_tokens_in_each_event_give_the_same(tmp_path: Path, incremental: bool) -> None:
    async def body(twins: Twins) -> None:
        answer = await twins.engine.generate(ask())
        assert (len(answer.tokens), answer.spans) == (20, (Span(V1, 0, 20),))

    run(tmp_path, body, incremental=incremental)


def test_log_probabilities_of_temperature_1_are_found_out_and_refused_at_another(tmp_path: Path) -> None:
    async def body(twins: Twins) -> None:
        await twins.engine.generate(ask(temperature=1.0))
        with pytest.raises(EngineError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
            await twins.engine.generate(ask(temperature=0.7))

    run(tmp_path, body, raw_logprobs=True)


def test_an_end_token_of_the_model_that_is_not_asked_for_does_not_end_a_completion(tmp_path: Path) -> None:
    async def body(twins: Twins) -> None:
        answer = await twins.engine.generate(ask(max_new_tokens=60, stop_tokens=(VOCAB - 1,)))
        ends = [token for token in answer.tokens.tolist() if token < VOCAB // 2]
        assert ends
        assert answer.stop is (StopReason.STOP if VOCAB - 1 in answer.tokens else StopReason.LENGTH)
        assert len(answer.tokens) == 60 or answer.tokens[-1] == VOCAB - 1
        assert answer.spans == (Span(V1, 0, len(answer.tokens)),)

    run(tmp_path, body, eos=tuple(range(VOCAB // 2)))


def test_a_server_that_dies_is_started_anew_and_the_request_goes_on(tmp_path: Path) -> None:
    async def body(twins: Twins) -> None:
        (process,) = twins.processes
        await twins.engine.swap(V2, *release(7))
        task = asyncio.create_task(twins.engine.generate(ask(max_new_tokens=200)))
        await tokens_flow(twins.engine, 5)
        assert process.twin is not None
        await process.twin.close()
        process.socket.unlink()
        answer = await task
        assert (len(answer.tokens), answer.spans) == (200, (Span(V2, 0, 200),))
        assert process.starts == 2
        assert twins.engine.report().faults == {"unreachable": 1}

    run(tmp_path, body)


def test_a_server_that_was_started_anew_behind_our_back_serves_no_token_of_its_old_weights(tmp_path: Path) -> None:
    async def body(twins: Twins) -> None:
        (process,) = twins.processes
        await twins.engine.swap(V2, *release(7))
        before = await twins.engine.generate(ask())
        assert process.twin is not None
        await process.twin.close()
        process.socket.unlink()
        process.twin = SglangTwin(process.folder, context_tokens=256)
        await process.twin.open(process.socket)
        after = await twins.engine.generate(ask())
        assert after.tokens.tolist() == before.tokens.tolist()
        assert after.spans == (Span(V2, 0, 20),)
        assert twins.engine.report().faults == {"stale": 1}

    run(tmp_path, body)


class Forgetful(SglangTwin):
    """Says that it has loaded weights, and has not."""

    async def _load(self, body: dict[str, Any]) -> Reply:
        self._stamp = body["weight_version"]
        return Reply(body={"success": True, "message": "Succeeded to update model weights."})


def test_weights_that_were_said_to_be_loaded_and_were_not_are_caught_by_the_probe(tmp_path: Path) -> None:
    async def body(twins: Twins) -> None:
        (process,) = twins.processes
        process.kind = Forgetful
        with pytest.raises(CarrierError, match="the probe failed"):
            await twins.engine.swap(V2, *release(7))
        assert twins.engine.version == V1
        answer = await twins.engine.generate(ask())
        assert answer.spans == (Span(V1, 0, 20),)

    run(tmp_path, body)


def other_length(path: str, answer: Any) -> Any:
    if path == "/generate" and answer.get("meta_info", {}).get("finish_reason"):
        answer["meta_info"]["output_token_logprobs"] = []
    return answer


def test_answers_of_the_wrong_length_are_counted_and_end_a_request_that_gets_nothing_else(tmp_path: Path) -> None:
    async def body(twins: Twins) -> None:
        with pytest.raises(ServerError, match="log-probabilities after"):
            await twins.engine.generate(ask())
        assert twins.engine.report().faults["malformed"] == 3

    run(tmp_path, body, tamper=other_length)


def test_a_server_of_another_kind_ends_the_engine_with_what_to_do(tmp_path: Path) -> None:
    told: list[str] = []

    async def body(twins: Twins) -> None:
        with pytest.raises(EngineError, match="speculative_algorithm = 'EAGLE'"):
            await twins.engine.generate(ask())
        assert told

    run(tmp_path, body, info={"speculative_algorithm": "EAGLE"}, on_broken=told.append)


def test_servers_are_attached_to_by_address_and_never_started(tmp_path: Path) -> None:
    folder = model_folder(CONFIG, tmp_path / "model")
    section = EngineSection(kind="sglang", server=ServerSection(urls=("http://node-0:8000", "unix:/run/two")))
    servers = open_servers(section, folder, lambda index: tmp_path / "log", {})
    assert [(type(server.dialect), server.dialect.url) for server in servers] == [
        (Sglang, "http://node-0:8000"),
        (Sglang, "unix:/run/two"),
    ]
    with pytest.raises(ConfigError, match="contraflow plan-engine"):
        open_servers(EngineSection(kind="sglang"), folder, lambda index: tmp_path / "log", {})
