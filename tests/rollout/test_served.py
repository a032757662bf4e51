"""The served engine when servers die, lie, stall or forget: over twins, with real sockets and real weights."""

import asyncio
import base64
import io
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contraflow.errors import CarrierError, EngineError, ServerError
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.folder import save_folder
from contraflow.rollout import vllm
from contraflow.rollout.fleet import choose
from contraflow.rollout.http import HttpClient
from contraflow.rollout.scaled import prove_scaled
from contraflow.rollout.served import ServedEngine
from contraflow.rollout.twin import TwinModel
from contraflow.rollout.vllm_twin import VllmTwin
from contraflow.types import Completion, Int32, Request, Span, StopReason, Version
from tests.rollout.served_lab import CONFIG, VOCAB, Twins, over_twins, release, served_section

V1, V2, V3 = Version(1, 1), Version(1, 2), Version(1, 3)


def ask(name: str = "a", *, new: int = 12, seed: int = 5, **rest: Any) -> Request:
    return Request(id=name, prompt=np.array([1, 2, 3], np.int32), seed=seed, max_new_tokens=new, **rest)


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(body(), 60)

    asyncio.run(bounded())


@asynccontextmanager
async def opened(place: Path, **options: Any) -> AsyncIterator[Twins]:
    twins = over_twins(CONFIG, place, version=options.pop("version", V1), **options)
    try:
        yield twins
    finally:
        await twins.engine.close()


async def undisturbed(place: Path, *requests: Request) -> list[list[int]]:
    """The tokens of these requests where nothing goes wrong."""
    async with opened(place / "calm") as twins:
        return [(await twins.engine.generate(request)).tokens.tolist() for request in requests]


async def tokens_flow(engine: ServedEngine, count: int) -> None:
    goal = engine.report().tokens + count
    while engine.report().tokens < goal:  # noqa: ASYNC110 - an engine says nothing between completions
        await asyncio.sleep(0)


def logprobs_of(decoder: Decoder, prompt: Int32, tokens: Int32, temperature: float) -> np.ndarray[Any, Any]:
    """The independent oracle: float64 log-softmax of the decoder's own logits, scaled."""
    from contraflow.model.attention import PackedPlan

    whole = torch.tensor([*prompt.tolist(), *tokens.tolist()])
    plan = PackedPlan.of([0, len(whole)], torch.device("cpu"))
    with torch.no_grad():
        hidden = decoder(whole, torch.arange(len(whole)), plan)
        scaled = torch.log_softmax((hidden @ decoder.head.T).double() / temperature, -1)
    rows = torch.arange(len(prompt) - 1, len(whole) - 1)
    return scaled[rows, whole[len(prompt) :]].numpy()


def routes_as_text(
    shape: tuple[int, ...] = (14, 2, 2), dtype: str = "uint8", *, first: int = 0, experts: int = 1 << 8
) -> str:
    """As vLLM sends them: a numpy file in base 64. Of type "O" it would be unpickled by whoever lets that happen."""
    file = io.BytesIO()
    ids = first + np.arange(math.prod(shape)).reshape(shape) % experts
    np.save(file, ids.astype(dtype), allow_pickle=True)
    return base64.b64encode(file.getvalue()).decode()


def huge_routes() -> str:
    """An array of 400 GB, as its head says."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (10**11, 2, 2)})
    return base64.b64encode(file.getvalue() + b"1").decode()


def short(event: Any) -> Any:
    event["choices"][0]["logprobs"]["content"].pop()
    return event


class Once:
    """Alters the first answer that `alter` gives something for."""

    def __init__(self, path: str, alter: Callable[[Any], Any], times: int = 1) -> None:
        self._path, self._alter, self._left = path, alter, times

    def __call__(self, path: str, answer: Any) -> Any:
        if path != self._path or not self._left:
            return answer
        altered = self._alter(answer)
        if altered is None:
            return answer
        self._left -= 1
        return altered


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_log_probabilities_are_those_of_the_temperature_scaled_softmax(tmp_path: Path, temperature: float) -> None:
    async def body() -> None:
        async with opened(tmp_path) as twins:
            answer = await twins.engine.generate(ask(new=20, temperature=temperature))
            decoder = new_decoder(CONFIG, seed=0, std=0.3)
            wanted = logprobs_of(decoder, ask().prompt, answer.tokens, temperature)
            assert np.abs(answer.logprobs - wanted).max() < 1e-4

    run(body)


def test_a_server_that_reports_log_probabilities_of_temperature_1_may_only_sample_at_1(tmp_path: Path) -> None:
    async def body() -> None:
        async with opened(tmp_path, raw_logprobs=True) as twins:
            await twins.engine.generate(ask())
            await twins.engine.generate(ask(temperature=0.0))
            with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
                await twins.engine.generate(ask(temperature=0.7))

    run(body)


@pytest.mark.parametrize("raw", [False, True])
def test_a_model_that_is_sure_of_its_tokens_shows_whose_log_probabilities_it_gives(tmp_path: Path, raw: bool) -> None:
    decoder = new_decoder(CONFIG, seed=6, std=0.3)
    with torch.no_grad():
        decoder.head.mul_(40)
    save_folder(decoder, tmp_path / "sure")

    async def body() -> None:
        twin = VllmTwin(tmp_path / "sure", context_tokens=256, raw_logprobs=raw)
        dialect = vllm.Vllm(HttpClient(await twin.open(tmp_path / "s")))
        with pytest.raises(EngineError) if raw else nullcontext():
            await prove_scaled(dialect, VOCAB)
        await twin.close()

    run(body)


@pytest.mark.parametrize("alter", [short, lambda event: {"choices": [{"token_ids": [], "finish_reason": "length"}]}])
def test_too_few_tokens_to_judge_the_temperature_by_are_the_servers_fault(
    tmp_path: Path, alter: Callable[[Any], Any]
) -> None:
    async def body() -> None:
        async with opened(tmp_path, tamper=Once("/inference/v1/generate", alter)) as twins:
            assert len((await twins.engine.generate(ask(temperature=0.7))).tokens) == 12
            assert twins.engine.report().faults == {"malformed": 1}

    run(body)


def test_a_server_that_dies_in_mid_generation_is_started_anew_and_every_request_ends_as_if_it_had_not(
    tmp_path: Path,
) -> None:
    async def body() -> None:
        requests = [ask(f"r{i}", new=30, seed=i) for i in range(4)]
        calm = await undisturbed(tmp_path, *requests)
        async with opened(tmp_path) as twins:
            tasks = [asyncio.create_task(twins.engine.generate(request)) for request in requests]
            await tokens_flow(twins.engine, 20)
            twin = twins.processes[0].twin
            assert twin is not None
            await twin.close()
            answers = await asyncio.gather(*tasks)
            assert [answer.tokens.tolist() for answer in answers] == calm
            assert all(answer.spans == (Span(V1, 0, 30),) for answer in answers)
            assert twins.engine.report().faults == {"unreachable": 1}
            assert twins.processes[0].starts == 2

    run(body)


def test_a_server_that_was_silently_replaced_by_one_with_old_weights_is_found_out(tmp_path: Path) -> None:
    async def body() -> None:
        async with opened(tmp_path) as twins:
            await twins.engine.swap(V2, *release(7))
            wanted = (await twins.engine.generate(ask())).tokens.tolist()
            process = twins.processes[0]
            await process.stop()
            process.twin = VllmTwin(process.folder, context_tokens=256, routes=True)
            await process.twin.open(process.socket)
            answer = await twins.engine.generate(ask())
            assert answer.tokens.tolist() == wanted
            assert answer.spans == (Span(V2, 0, 12),)
            assert twins.engine.report().faults == {"stale": 1}
            assert process.starts == 1  # it answered, so it was given its weights and not started anew

    run(body)


def test_a_server_that_dies_in_mid_refresh_is_brought_to_the_new_weights(tmp_path: Path) -> None:
    async def body() -> None:
        async with opened(tmp_path) as twins:
            await twins.engine.generate(ask())
            dying = list[asyncio.Task[None]]()

            def die(answer: Any) -> Any:
                twin = twins.processes[0].twin
                assert twin is not None
                dying.append(asyncio.create_task(twin.close()))
                return answer

            twin = twins.processes[0].twin
            assert twin is not None
            twin.http.tamper = Once("/pause", die)
            flying = asyncio.create_task(twins.engine.generate(ask("b", new=200)))
            await tokens_flow(twins.engine, 5)
            await twins.engine.swap(V2, *release(7))
            assert dying
            assert twins.engine.version == V2
            assert [span.version for span in (await flying).spans] == [V1, V2]
            assert twins.engine.report().faults == {"unreachable": 1}

    run(body)


def crooked(bad: Callable[[int], bool]) -> type[TwinModel]:
    """For twins that answer 200 to load number n and load wrongly if `bad(n)`: as vLLM reloads a mixture on CPU."""

    class Crooked(TwinModel):
        async def load(self, fresh: Decoder) -> None:
            if bad(self._loads):
                with torch.no_grad():
                    fresh.get_parameter("layers.0.mlp.gate_up").mul_(-1)
            await super().load(fresh)

    return Crooked


def test_a_reload_that_answers_200_and_is_wrong_is_caught_and_undone(tmp_path: Path) -> None:
    async def body() -> None:
        async with opened(tmp_path, behind=crooked(lambda load: load == 2)) as twins:
            await twins.engine.swap(V2, *release(6))
            before = (await twins.engine.generate(ask(new=30))).tokens.tolist()
            with pytest.raises(CarrierError, match="the probe failed"):
                await twins.engine.swap(V3, *release(7))
            assert twins.engine.version == V2
            answer = await twins.engine.generate(ask(new=30))
            assert answer.tokens.tolist() == before
            assert answer.spans == (Span(V2, 0, 30),)
            assert twins.engine.report().swaps == 1
            assert twins.engine.report().faults == {}

    run(body)


def test_a_server_that_cannot_be_proven_again_is_started_anew_and_then_given_up(tmp_path: Path) -> None:
    async def body() -> None:
        told = list[str]()
        spoilt = False
        async with opened(tmp_path, behind=crooked(lambda load: spoilt), on_broken=told.append) as twins:
            await twins.engine.swap(V2, *release(7))
            spoilt = True
            with pytest.raises(CarrierError, match="the probe failed"):
                await twins.engine.swap(V3, *release(8))
            with pytest.raises(EngineError, match=r"given up: the probe failed"):
                await twins.engine.generate(ask())
            assert len(told) == 1

    run(body)


def alter(**fields: Any) -> Callable[[Any], Any]:
    def altered(event: Any) -> Any:
        if event["choices"][0]["token_ids"]:
            event["choices"][0] |= fields
            return event
        return None

    return altered


def scored(logprob: float) -> Callable[[Any], Any]:
    return alter(logprobs={"content": [{"token_id": 1, "logprob": logprob}]})


MALFORMED: dict[str, Callable[[Any], Any]] = {
    "a log-probability short": short,
    "a token beyond the vocabulary": alter(token_ids=[VOCAB]),
    "a negative token": alter(token_ids=[-1]),
    "a token that is no number": alter(token_ids=["x"]),
    "not a number": scored(math.nan),
    "a probability above 1": scored(0.5),
    "a stop without a stop token": alter(finish_reason="stop"),
    "an end before its length": alter(finish_reason="length"),
    "a reason nobody knows": alter(finish_reason="bored"),
    "an end that nobody asked for": alter(finish_reason="abort"),
    "no choices": lambda event: {"choice": []},
    "an error in the stream": lambda event: {"error": {"message": "out of memory"}},
    "an event that is no object": lambda event: 7,
}


@pytest.mark.parametrize("name", MALFORMED)
def test_an_answer_that_cannot_be_is_thrown_away_counted_and_asked_for_again(tmp_path: Path, name: str) -> None:
    async def body() -> None:
        (calm,) = await undisturbed(tmp_path, ask())
        tamper = Once("/inference/v1/generate", MALFORMED[name])
        async with opened(tmp_path, tamper=tamper) as twins:
            answer = await twins.engine.generate(ask())
            assert answer.tokens.tolist() == calm
            assert sum(twins.engine.report().faults.values()) == 1

    run(body)


@pytest.mark.parametrize(
    "routed",
    [
        *(None, "no base64!", "", base64.b64encode(b"PK\x03\x04").decode(), huge_routes()),
        *(routes_as_text((5, 2, 2)), routes_as_text((3 + 12 - 1, 4)), routes_as_text(dtype="O")),
        *(routes_as_text((3 + 12 - 1, 2, 3), experts=4), routes_as_text((3 + 12 - 1, 3, 2), experts=4)),
        *(routes_as_text(experts=5), routes_as_text(dtype="int32", first=-1, experts=4)),
        routes_as_text(dtype="int32", first=1 << 16, experts=4),
    ],
)
def test_routes_that_cannot_be_are_thrown_away_counted_and_asked_for_again(tmp_path: Path, routed: str | None) -> None:
    def spoil(event: Any) -> Any:
        if event["choices"][0]["finish_reason"] is None:
            return None
        event["choices"][0]["routed_experts"] = routed
        return event

    async def body() -> None:
        async with opened(tmp_path, tamper=Once("/inference/v1/generate", spoil)) as twins:
            answer = await twins.engine.generate(ask(want_routes=True))
            assert answer.routes is not None
            assert answer.routes.shape == (3 + 12 - 1, 2, 2)
            assert twins.engine.report().faults == {"malformed": 1}

    run(body)


def test_routes_of_dense_layers_are_left_out() -> None:
    found = vllm._routes(routes_as_text((4, 5, 2)), [1, 3])
    assert found.tolist() == np.arange(40).reshape(4, 5, 2)[:, [1, 3]].tolist()
    assert vllm._routes(routes_as_text((4, 2, 2)), [1, 3]).shape == (4, 2, 2)


def test_closing_in_mid_refresh_fails_the_refresh(tmp_path: Path) -> None:
    async def body() -> None:
        async with opened(tmp_path) as twins:
            await twins.engine.generate(ask())
            swap = asyncio.create_task(twins.engine.swap(V2, *release(7)))
            while twins.engine.report().doing != "swap":  # noqa: ASYNC110 - it says so nowhere else
                await asyncio.sleep(0)
            await twins.engine.close()
            with pytest.raises(EngineError, match="closed"):
                await swap

    run(body)


@pytest.mark.parametrize("logprob", [10**400, "x", None, [], {}, True])
def test_a_log_probability_that_is_none_is_the_servers_fault(tmp_path: Path, logprob: Any) -> None:
    async def body() -> None:
        async with opened(tmp_path, tamper=Once("/inference/v1/generate", scored(logprob))) as twins:
            assert len((await twins.engine.generate(ask())).tokens) == 12
            assert sum(twins.engine.report().faults.values()) == 1

    run(body)


def test_a_server_that_cannot_be_begun_for_whatever_reason_is_given_up_and_not_waited_for(tmp_path: Path) -> None:
    async def body() -> None:
        twins = over_twins(CONFIG, tmp_path, version=V1)

        async def start(answers: Any) -> None:
            raise RuntimeError("nobody thought of this")

        twins.processes[0].start = start  # type: ignore[method-assign]
        with pytest.raises(EngineError, match=r"given up: nobody thought of this"):
            await twins.engine._fleet.ready()  # a request would go round and round, and leave no time for a deadline
        await twins.engine.close()

    run(body)


def test_a_server_that_never_answers_right_costs_the_request_and_then_itself(tmp_path: Path) -> None:
    async def body() -> None:
        told = list[str]()
        tamper = Once("/inference/v1/generate", short, times=10_000)
        async with opened(tmp_path, tamper=tamper, on_broken=told.append) as twins:
            with pytest.raises(ServerError, match="1 tokens with 0 log-probabilities") as caught:
                await twins.engine.generate(ask())
            assert caught.value.kind == "malformed"
            with pytest.raises(EngineError):
                await twins.engine.generate(ask())
            with pytest.raises(EngineError, match="given up"):
                await twins.engine.generate(ask())
            assert len(told) == 1

    run(body)


class Mute(TwinModel):
    """Says nothing more after a few tokens."""

    async def next(self, prompt: Int32, **sampling: Any) -> Completion:
        if len(prompt) > 6:
            await asyncio.Event().wait()
        return await super().next(prompt, **sampling)


def test_a_server_that_falls_silent_is_named_after_its_deadline(tmp_path: Path) -> None:
    async def body() -> None:
        section = served_section()
        server = section.server.model_copy(update={"request_deadline_s": 0.2})
        section = section.model_copy(update={"server": server})
        async with opened(tmp_path, behind=Mute, section=section) as twins:
            with pytest.raises(ServerError, match=r"late: .*no answer within 0.2 s") as caught:
                await twins.engine.generate(ask())
            assert twins.processes[0].socket.name in caught.value.server
            assert twins.engine.report().faults["late"] >= 2

    run(body)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"version": "0.23.1"}, "is vLLM 0.23.1; 0.24 to 0.32 were tested"),
        ({"version": "0.33.0rc1"}, "is vLLM 0.33.0rc1"),
        ({"version": "unknown"}, "is vLLM unknown"),
        ({"key": "sesame"}, "refused: GET /v1/models gave 401"),
        ({"tamper": Once("/version", lambda answer: [])}, "malformed: /version"),
        ({"tamper": Once("/collective_rpc", lambda answer: {"results": []})}, "contraflow_stamp gave"),
    ],
)
def test_a_server_that_will_not_do_is_refused_before_it_is_asked_for_a_token(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    async def body() -> None:
        told = list[str]()
        twins = over_twins(CONFIG, tmp_path, version=V1, on_broken=told.append)
        twins.processes[0].options |= options
        with pytest.raises(EngineError) as caught:
            await twins.engine.generate(ask())
        assert says in str(caught.value)
        assert told == [str(caught.value)]
        await twins.engine.close()

    run(body)


def test_a_server_of_a_shorter_context_is_refused(tmp_path: Path) -> None:
    async def body() -> None:
        twins = over_twins(CONFIG, tmp_path, version=V1)
        twins.processes[0].context_tokens = 100
        with pytest.raises(EngineError, match="takes sequences of 100 tokens"):
            await twins.engine.generate(ask())
        await twins.engine.close()

    run(body)


def test_the_key_opens_the_server_and_a_wrong_one_is_in_no_error(tmp_path: Path) -> None:
    async def body() -> None:
        twins = over_twins(CONFIG, tmp_path / "right", version=V1, key="sesame")
        twins.processes[0].options["key"] = "sesame"
        await twins.engine.generate(ask())
        await twins.engine.close()
        twins = over_twins(CONFIG, tmp_path / "wrong", version=V1, key="tahini")
        twins.processes[0].options["key"] = "sesame"
        with pytest.raises(EngineError, match="401") as caught:
            await twins.engine.generate(ask())
        assert "tahini" not in str(caught.value)
        await twins.engine.close()

    run(body)


@pytest.mark.parametrize("fault", ["missing", "surplus", "misshapen"])
def test_a_version_of_other_tensors_is_refused_before_a_server_hears_of_it(tmp_path: Path, fault: str) -> None:
    async def body() -> None:
        tensors, probe = release(7)
        name = "layers.1.mlp.down"
        altered = dict(tensors)
        if fault == "missing":
            del altered[name]
        elif fault == "surplus":
            altered["layers.9.mlp.down"] = tensors[name]
        else:
            altered[name] = tensors[name][:, :-1]
        async with opened(tmp_path) as twins:
            await twins.engine.generate(ask())
            with pytest.raises(CarrierError, match=r"layers\.[19]\.mlp\.down"):
                await twins.engine.swap(V2, altered, probe)
            twin = twins.processes[0].twin
            assert twin is not None
            assert twin._stamp == str(V1)

    run(body)


def test_a_cancelled_swap_still_ends_with_a_proven_version(tmp_path: Path) -> None:
    async def body() -> None:
        async with opened(tmp_path) as twins:
            await twins.engine.generate(ask())
            task = asyncio.create_task(twins.engine.swap(V2, *release(7)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await twins.engine.swap(V3, *release(8))  # waits for the other's end
            assert twins.engine.version == V3
            assert twins.engine.report().swaps == 2
            assert (await twins.engine.generate(ask())).spans == (Span(V3, 0, 12),)

    run(body)


def test_a_crowd_over_two_servers_outlives_the_death_of_one_and_groups_stay_together(tmp_path: Path) -> None:
    async def body() -> None:
        requests = [ask(f"{g}/{i}", new=20, seed=10 * g + i, group=f"g{g}") for g in range(5) for i in range(2)]
        calm = await undisturbed(tmp_path, *requests)
        async with opened(tmp_path, count=2) as twins:
            tasks = [asyncio.create_task(twins.engine.generate(request)) for request in requests]
            await tokens_flow(twins.engine, 30)
            first, second = (process.twin for process in twins.processes)
            assert first is not None
            assert second is not None
            assert first.model.given
            assert second.model.given
            await first.close()
            answers = await asyncio.gather(*tasks)
            assert [answer.tokens.tolist() for answer in answers] == calm
            await twins.engine.swap(V2, *release(7))
            await asyncio.gather(*(twins.engine.generate(request) for request in requests))
            assert twins.engine.report().faults == {"unreachable": 1}

    run(body)


def test_what_a_completion_is_handed_out_for_was_asked_of_the_server_after_its_last_token(tmp_path: Path) -> None:
    async def body() -> None:
        stamps = 0

        def count(path: str, answer: Any) -> Any:
            nonlocal stamps
            stamps += path == "/collective_rpc"
            return answer

        async with opened(tmp_path, tamper=count) as twins:
            await twins.engine.generate(ask())
            stamps = 0
            await asyncio.gather(*(twins.engine.generate(ask(f"r{i}", new=8, seed=i)) for i in range(20)))
            assert 1 <= stamps <= 20  # one answer may vouch for many, none for what came after it was asked

    run(body)


def test_a_request_aborted_while_it_waits_gives_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        async with opened(tmp_path) as twins:
            await twins.engine.generate(ask())
            swap = asyncio.create_task(twins.engine.swap(V2, *release(7)))
            while twins.engine.report().doing != "swap":  # noqa: ASYNC110 - it says so nowhere else
                await asyncio.sleep(0)
            waiting = asyncio.create_task(twins.engine.generate(ask()))
            await asyncio.sleep(0)
            assert twins.engine.report().waiting == 1
            await twins.engine.abort(["a"])
            await swap
            answer = await waiting
            assert (answer.stop, len(answer.tokens), answer.spans) == (StopReason.ABORTED, 0, ())

    run(body)


NAMES = st.lists(st.text("abc123", min_size=1, max_size=5), min_size=1, max_size=6, unique=True)


@given(NAMES, st.text(max_size=8), st.data())
def test_a_group_keeps_its_server_when_another_goes(names: list[str], group: str, data: st.DataObject) -> None:
    home = choose(group, [0] * len(names), names)
    if len(names) > 1 and group:
        gone = data.draw(st.sampled_from([i for i in range(len(names)) if i != home]))
        rest = [name for i, name in enumerate(names) if i != gone]
        assert rest[choose(group, [0] * len(rest), rest)] == names[home]


@given(NAMES, st.text(max_size=8), st.data())
def test_no_server_is_given_far_more_than_the_idlest(names: list[str], group: str, data: st.DataObject) -> None:
    taken = data.draw(st.lists(st.integers(0, 100), min_size=len(names), max_size=len(names)))
    assert taken[choose(group, taken, names)] <= min(taken) + 8
