"""The SGLang dialect held to exchanges of its documented API.

`exchanges/sglang/*.json` were written from SGLang's documentation and source, which each of them names; none was
recorded from a server, since SGLang does not run on the machines these tests are made for. A small real HTTP server
plays them: it answers only the very request that is written there, field by field.
"""

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contraflow.config import Engine as EngineSection
from contraflow.errors import ConfigError, ServerError
from contraflow.model.families import ModelConfig
from contraflow.rollout.dialect import Chunk, Piece
from contraflow.rollout.http import HttpClient
from contraflow.rollout.http_server import Ask, HttpServer, Reply
from contraflow.rollout.sglang import Sglang
from contraflow.types import StopReason

EXCHANGES = Path(__file__).parent / "exchanges" / "sglang"
CONFIG = ModelConfig(
    family="qwen3_moe", vocab=24, dim=16, layers=2, heads=2, kv_heads=1, head_dim=8, experts=4, top_k=2, expert_ffn=16
)
SECTION = EngineSection(kind="sglang", context_tokens=256, routes=True)


class Player:
    """Answers the exchanges of one file, in order, and nothing else. `left`: those not asked for yet."""

    def __init__(self, name: str) -> None:
        tree = json.loads((EXCHANGES / f"{name}.json").read_text(encoding="utf-8"))
        assert tree["source"], "where it is written"
        self.left: list[dict[str, Any]] = tree["exchanges"]
        self.surprises: list[Ask] = []

    async def handle(self, ask: Ask) -> Reply:
        wanted = self.left[0]["request"] if self.left else None
        if {"method": ask.method, "path": ask.path, "body": ask.body} != wanted or ask.query:
            self.surprises.append(ask)
            return Reply(400, {"error": {"message": f"asked {ask}, written {wanted}"}})
        response = self.left.pop(0)["response"]
        if "events" not in response:
            return Reply(response["status"], response["body"])
        return Reply(response["status"], events=self._events(response["events"]))

    async def _events(self, events: list[Any]) -> Any:
        for event in events:
            yield event
            await asyncio.sleep(0)


def play(
    name: str,
    body: Callable[[Sglang], Awaitable[Any]],
    change: Callable[[Any], None] = lambda tree: None,
    config: ModelConfig = CONFIG,
) -> Any:
    """What `body` gives against a player of one file, which must have been played to its end."""

    async def bounded() -> Any:
        player = Player(name)
        change(player.left)
        server = HttpServer(player.handle)
        url = await server.open()
        try:
            async with asyncio.timeout(20):
                given = await body(Sglang(HttpClient(url, deadline_s=5), config, load_deadline_s=5))
        finally:
            await server.close()
            assert not player.surprises
        assert not player.left
        return given

    return asyncio.run(bounded())


def piece(**other: Any) -> Piece:
    keys: dict[str, Any] = {"id": "a/1", "prompt": np.array([1, 2, 3], np.int32), "seed": 11, "max_new_tokens": 4}
    keys |= {"temperature": 0.5, "stop_tokens": (7,), "salt": "version 1.4", "routes": False, **other}
    return Piece(**keys)


async def chunks_of(dialect: Sglang, asked: Piece) -> list[Chunk]:
    return [chunk async for chunk in dialect.generate(asked)]


def generated(name: str, change: Callable[[Any], None] = lambda tree: None, **other: Any) -> list[Chunk]:
    given: list[Chunk] = play(name, lambda dialect: chunks_of(dialect, piece(**other)), change)
    return given


@pytest.mark.parametrize("name", ["generate_incremental", "generate_cumulative"])
def test_a_stream_gives_each_token_once_whether_events_are_new_tokens_or_all(name: str) -> None:
    chunks = generated(name)
    assert [token for chunk in chunks for token in chunk.tokens] == [4, 9, 7]
    assert [value for chunk in chunks for value in chunk.logprobs] == [-0.5, -1.25, -2.0]
    assert [chunk.stop for chunk in chunks] == [None] * (len(chunks) - 1) + [StopReason.STOP]
    assert {chunk.stamp for chunk in chunks} == {"1.4"}


def test_a_piece_without_stop_tokens_ignores_the_models_own_and_ends_by_length() -> None:
    chunks = generated("generate_by_length", stop_tokens=(), max_new_tokens=3)
    assert (chunks[-1].stop, chunks[-1].tokens) == (StopReason.LENGTH, [4, 9, 7])


def test_at_an_end_token_that_nobody_asked_for_a_piece_goes_on_in_another_request() -> None:
    chunks = generated("generate_ended_by_eos_unasked")
    assert [chunk.tokens for chunk in chunks] == [[4, 9], [7]]
    assert [chunk.stop for chunk in chunks] == [None, StopReason.STOP]
    assert chunks[-1].stamp == "1.4"


def test_a_piece_of_two_requests_is_stamped_with_the_weights_of_both() -> None:
    def change(tree: Any) -> None:
        last_event(tree[1:])["meta_info"]["weight_version"] = "1.5"

    assert generated("generate_ended_by_eos_unasked", change)[-1].stamp == "1.4 and 1.5"


def test_an_end_token_that_nobody_asked_for_at_the_last_place_ends_a_piece_by_its_length() -> None:
    def change(tree: Any) -> None:
        tree[0]["request"]["body"]["sampling_params"]["max_new_tokens"] = 2
        del tree[1:]

    assert generated("generate_ended_by_eos_unasked", change, max_new_tokens=2)[-1].stop is StopReason.LENGTH


def test_a_stream_that_ends_without_a_reason_is_a_failure_of_the_server() -> None:
    def change(tree: Any) -> None:
        last_event(tree)["meta_info"]["finish_reason"] = None

    with pytest.raises(ServerError, match="without a reason") as fault:
        generated("generate_by_length", change, stop_tokens=(), max_new_tokens=3)
    assert fault.value.kind == "failed"


def test_what_the_server_ends_itself_is_told() -> None:
    chunks = generated("generate_aborted_by_server")
    assert [(chunk.tokens, chunk.stop) for chunk in chunks] == [([4], None), ([], StopReason.ABORTED)]


def test_experts_come_as_layers_of_the_model_that_have_them() -> None:
    (chunk,) = generated("generate_routes", routes=True)
    assert chunk.routes is not None
    assert chunk.routes.dtype == np.uint8
    assert chunk.routes.tolist() == (np.arange(20) % 4).reshape(5, 2, 2).tolist()


@pytest.mark.parametrize("told", [(0, 1, 2), (1, 2)], ids=["all layers", "those with experts"])
def test_layers_without_experts_are_left_out_whether_the_server_tells_of_them_or_not(told: tuple[int, ...]) -> None:
    config = replace(CONFIG, layers=3, dense_layers=(0,), ffn=16)
    routes_LMK = np.random.default_rng(3).integers(0, 4, (5, 3, 2), dtype=np.int32)
    text = base64.b64encode(routes_LMK[:, list(told)].tobytes()).decode()

    def change(tree: Any) -> None:
        last_event(tree)["meta_info"]["routed_experts"] = text

    (chunk,) = play("generate_routes", lambda dialect: chunks_of(dialect, piece(routes=True)), change, config)
    assert chunk.routes.tolist() == routes_LMK[:, 1:].tolist()


def test_tokens_of_two_versions_are_stamped_with_both_and_so_with_none_that_is_served() -> None:
    assert generated("generate_of_two_versions")[-1].stamp == "1.4 and 1.5"


def test_leaving_a_stream_early_aborts_the_request_in_the_server() -> None:
    async def body(dialect: Sglang) -> list[int]:
        async with aclosing(dialect.generate(piece())) as chunks:
            async for chunk in chunks:
                return chunk.tokens
        return []

    assert play("generate_left_early", body) == [4]


def test_cancelling_a_stream_aborts_the_request_in_the_server() -> None:
    async def body(dialect: Sglang) -> None:
        begun, never = asyncio.Event(), asyncio.Event()

        async def read() -> None:
            async with aclosing(dialect.generate(piece())) as chunks:
                async for _ in chunks:
                    begun.set()
                    await never.wait()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    play("generate_left_early", body)


def test_no_request_id_begins_another_since_a_server_aborts_all_that_begin_alike() -> None:
    ids: list[str] = []

    def note(tree: list[dict[str, Any]]) -> None:
        ids.append(tree[0]["request"]["body"]["rid"])

    generated("generate_incremental", note)

    async def asked(name: str) -> str:
        seen: list[str] = []

        async def handle(ask: Ask) -> Reply:
            seen.append(ask.body["rid"])
            return Reply(500)

        server = HttpServer(handle)
        dialect = Sglang(HttpClient(await server.open(), deadline_s=5), CONFIG, load_deadline_s=5)
        with pytest.raises(ServerError):
            await chunks_of(dialect, piece(id=name))
        await server.close()
        return seen[0]

    ids += [asyncio.run(asked(name)) for name in ("a/10", "a/1/1", "a", "")]
    assert len(set(ids)) == 5
    assert {len(name) for name in ids} == {32}


def test_a_refusal_in_a_stream_is_the_servers() -> None:
    with pytest.raises(ServerError, match="longer than the model's context") as fault:
        generated("generate_refused_in_a_stream")
    assert fault.value.kind == "refused"


def last_event(tree: list[dict[str, Any]]) -> dict[str, Any]:
    event: dict[str, Any] = tree[0]["response"]["events"][-1]
    return event


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: last_event(tree)["meta_info"]["output_token_logprobs"].pop(),
        lambda tree: last_event(tree)["meta_info"]["output_token_logprobs"].append([-1.0, 3, None]),
        lambda tree: last_event(tree)["meta_info"].update(completion_tokens=5),
        lambda tree: last_event(tree)["meta_info"].update(completion_tokens="many"),
        lambda tree: last_event(tree)["meta_info"].update(finish_reason={"type": "tired"}),
        lambda tree: last_event(tree)["meta_info"].update(finish_reason={"kind": "stop"}),
        lambda tree: last_event(tree)["meta_info"].update(output_token_logprobs=[[None, 9, None], [-1.0, 7, None]]),
        lambda tree: last_event(tree)["meta_info"].pop("weight_version"),
        lambda tree: last_event(tree).pop("meta_info"),
        lambda tree: last_event(tree).update(meta_info=None),
        lambda tree: last_event(tree)["meta_info"]["output_token_logprobs"][0].__setitem__(0, 10**400),
        lambda tree: tree[0]["response"].update(events=[["what"]]),
    ],
)
def test_an_event_that_cannot_be_is_malformed_whatever_is_wrong_with_it(change: Callable[[Any], None]) -> None:
    with pytest.raises(ServerError) as fault:
        generated("generate_incremental", change)
    assert fault.value.kind == "malformed"


@pytest.mark.parametrize(
    "routes",
    ["", "AAAA", "no base64!", None, "/////w==" * 20, ["AAAA"]],
    ids=["none", "few", "text", "null", "ids", "list"],
)
def test_experts_that_cannot_be_are_malformed(routes: Any) -> None:
    with pytest.raises(ServerError) as fault:
        generated("generate_routes", lambda t: last_event(t)["meta_info"].update(routed_experts=routes), routes=True)
    assert fault.value.kind == "malformed"


def test_scores_are_of_each_token_but_the_first() -> None:
    (scores,) = play("score", lambda dialect: dialect.score([np.array([5, 6, 8], np.int32)], "probe 1.4"))
    assert scores.dtype == np.float32
    assert scores.tolist() == [-0.75, -3.5]


def test_scores_of_other_tokens_are_malformed() -> None:
    with pytest.raises(ServerError, match=r"scored the tokens \[5, 6, 9\]") as fault:
        play("score_of_other_tokens", lambda dialect: dialect.score([np.array([5, 6, 8], np.int32)], "probe 1.4"))
    assert fault.value.kind == "malformed"


def test_pause_load_and_resume_are_what_the_documentation_says() -> None:
    play("pause", lambda dialect: dialect.pause())
    play("load", lambda dialect: dialect.load(Path("/versions/1.5"), "1.5"))
    play("resume", lambda dialect: dialect.resume())


@pytest.mark.parametrize(("name", "says"), [("load_failed", "Failed to get weights"), ("load_not_done", "Another")])
def test_a_load_that_fails_is_an_error_whether_its_status_says_so_or_its_body(name: str, says: str) -> None:
    with pytest.raises(ServerError, match=says) as fault:
        play(name, lambda dialect: dialect.load(Path("/versions/1.5"), "1.5"))
    assert fault.value.kind == "refused"


def test_weights_may_come_through_a_process_group() -> None:
    play("join_group", lambda dialect: dialect.join_group("policy", "10.0.0.1", 29600, first_rank=2, ranks=10))
    tensors = {"model.norm.weight": ("bfloat16", (16,)), "lm_head.weight": ("float32", (24, 16))}
    play("receive", lambda dialect: dialect.receive("policy", tensors, "1.5"))
    play("leave_group", lambda dialect: dialect.leave_group("policy"))


def test_a_stamp_is_the_servers_weight_version_and_none_if_it_was_told_none() -> None:
    assert play("stamp", lambda dialect: dialect.stamp()) == "1.4"
    assert play("stamp_of_a_fresh_server", lambda dialect: dialect.stamp()) == ""
    play("alive", lambda dialect: dialect.alive())


def with_info(**changed: Any) -> Callable[[Any], None]:
    return lambda tree: tree[0]["response"]["body"].update(changed)


def test_a_server_that_fits_says_what_it_is() -> None:
    assert play("check", lambda dialect: dialect.check(SECTION)) == "SGLang 0.5.21"
    for version in ("0.5.15", "0.5.15.post2", "0.5.99.dev3+g12"):
        play("check", lambda dialect: dialect.check(SECTION), with_info(version=version))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"version": "0.5.14"}, "is SGLang 0.5.14; this adapter is written for 0.5.15 to 0.6"),
        ({"version": "0.6.0"}, "is SGLang 0.6.0"),
        ({"version": None}, "is SGLang None"),
        ({"max_req_input_len": 255}, "takes prompts below 255 tokens, engine.context_tokens = 256; start it with "),
        ({"max_req_input_len": None}, "--context-length 262"),
        ({"enable_return_routed_experts": False}, "--enable-return-routed-experts"),
        ({"disable_radix_cache": True}, "set engine.on_refresh = 'recompute'"),
        ({"speculative_algorithm": "EAGLE"}, "speculative_algorithm = 'EAGLE'"),
        ({"disaggregation_mode": "decode"}, "disaggregation_mode = 'decode'"),
        ({"enable_eplb": True}, "enable_eplb = True"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_with_what_to_do(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as fault:
        play("check", lambda dialect: dialect.check(SECTION), with_info(**changed))
    assert says in str(fault.value)


def test_what_is_not_needed_is_not_asked_for() -> None:
    section = EngineSection(kind="sglang", context_tokens=256, on_refresh="recompute")
    changed = with_info(enable_return_routed_experts=False, disable_radix_cache=True)
    play("check", lambda dialect: dialect.check(section), changed)
