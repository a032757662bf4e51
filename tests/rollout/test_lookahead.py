"""A decode pass begun before the last one's tokens are read: the same answers, and nothing lost that was under way."""

import asyncio
import math
import time
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from contraflow.config import Engine as EngineSection
from contraflow.errors import EngineError
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.rollout.core import EngineCore
from contraflow.types import Completion, Request, StopReason, Version

V1, V2 = Version(1, 1), Version(1, 2)
FORMS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunked": {"prefill_tokens": 7},
    "blocks of one": {"block_tokens": 1},
    "few rows": {"max_sequences": 3},
    "tight": {"kv_tokens": 80, "max_sequences": 16},
    "tight and chunked": {"kv_tokens": 72, "prefill_tokens": 5, "max_sequences": 16},
}


def core_of(decoder: Decoder, lookahead: str, **keys: Any) -> EngineCore:
    shape = {"block_tokens": 4, "kv_tokens": 4096, "context_tokens": 128, "max_sequences": 64, "routes": True}
    section = EngineSection(**{**shape, **keys, "lookahead": lookahead})
    core = EngineCore(decoder, section, clock=time.perf_counter, version=V1)
    assert core._passes.ahead == (lookahead == "on")
    return core


def run(core: EngineCore) -> dict[Any, Any]:
    while core.busy:
        core.step()
    assert core.report().kv_tokens_held == 0
    return dict(core.take_outcomes())


def crowd(native: Any, count: int, **keys: Any) -> list[Request]:
    """Requests in groups, some with stop tokens that come up soon."""
    draws = np.random.default_rng(3)
    stops = [tuple(draws.integers(0, native.vocab, draws.integers(0, 4)).tolist()) for _ in range(count)]
    requests = native.crowd(count, want_routes=True, **keys)
    return [replace(request, stop_tokens=theirs) for request, theirs in zip(requests, stops, strict=True)]


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_those_of_an_engine_that_reads_first(native: Any, form: str) -> None:
    decoder = new_decoder(native.tiny(), seed=1, std=0.2)
    given: list[dict[Any, Completion]] = []
    for lookahead in ("off", "on"):
        core = core_of(decoder, lookahead, **FORMS[form])
        for request in crowd(native, 30, new=32):
            core.check(request)
            core.submit(request, request.id)
        given.append(run(core))
        assert (core.report().preempted > 0) == ("tight" in form)
    plain, ahead = given
    assert {StopReason.STOP, StopReason.LENGTH} == {answer.stop for answer in plain.values()}
    for name, wanted in plain.items():
        got = ahead[name]
        assert got.tokens.tolist() == wanted.tokens.tolist()
        assert (got.stop, got.spans, got.cache) == (wanted.stop, wanted.spans, wanted.cache)
        np.testing.assert_allclose(got.logprobs, wanted.logprobs, atol=1e-5, rtol=0)
        np.testing.assert_array_equal(got.routes, wanted.routes)


def test_without_stops_the_same_passes_run_and_answers_are_equal_bit_for_bit(native: Any) -> None:
    decoder = new_decoder(native.tiny(), seed=1, std=0.2)
    given = []
    for lookahead in ("off", "on"):
        core = core_of(decoder, lookahead)
        for request in native.crowd(30, new=40):
            core.submit(request, request.id)
        given.append(run(core))
        given[-1]["steps"] = core.report().tokens
    plain, ahead = given
    assert plain.pop("steps") == ahead.pop("steps") == sum(len(answer.tokens) for answer in plain.values())
    for name, wanted in plain.items():
        assert ahead[name].tokens.tobytes() == wanted.tokens.tobytes()
        assert ahead[name].logprobs.tobytes() == wanted.logprobs.tobytes()


def test_an_abort_gives_all_tokens_that_were_under_way_and_true_ones(native: Any) -> None:
    decoder = new_decoder(native.tiny(), seed=1, std=0.2)
    core = core_of(decoder, "on")
    request = native.ask("a", range(9), new=100, want_routes=True)
    core.submit(request, "a")
    for _ in range(7):
        core.step()
    assert core.report().tokens == 6
    core.abort(["a"])
    ((_, answer),) = core.take_outcomes()
    assert (len(answer.tokens), answer.stop) == (7, StopReason.ABORTED)
    logprobs, _ = native.packed(decoder, request, answer)
    np.testing.assert_allclose(answer.logprobs, logprobs, atol=native.tolerance, rtol=0)
    assert core.report().kv_tokens_held == 0


def test_an_abort_that_finds_the_sequence_ended_gives_its_end(native: Any) -> None:
    core = core_of(new_decoder(native.tiny(), seed=1, std=0.2), "on")
    core.submit(native.ask("a", range(9), new=3), "a")
    for _ in range(3):
        core.step()
    assert core.busy
    core.abort(["a"])
    ((_, answer),) = core.take_outcomes()
    assert (len(answer.tokens), answer.stop) == (3, StopReason.LENGTH)
    assert not core.busy


def test_a_swap_lands_what_the_old_weights_sampled_and_the_rest_is_the_new_ones(native: Any) -> None:
    old, new = (new_decoder(native.tiny(), seed=s, std=0.2) for s in (1, 2))
    core = core_of(new_decoder(native.tiny(), seed=1, std=0.2), "on", on_refresh="recompute")
    requests = native.crowd(8, new=40)
    for request in requests:
        core.submit(request, request.id)
    for _ in range(5):
        core.step()
    core.swap(V2, *native.release(new))
    outcomes = run(core)
    flips = set()
    for request in requests:
        answer = outcomes[request.id]
        flip = next((s.start for s in answer.spans if s.version == V2), len(answer.tokens))
        before, after = (native.packed(decoder, request, answer)[0] for decoder in (old, new))
        np.testing.assert_allclose(answer.logprobs[:flip], before[:flip], atol=native.tolerance, rtol=0)
        np.testing.assert_allclose(answer.logprobs[flip:], after[flip:], atol=native.tolerance, rtol=0)
        flips.add(flip)
    assert 5 in flips  # all five passes count


@pytest.mark.parametrize(
    ("lookahead", "keys"),
    [
        ("off", {"max_sequences": 24, "kv_tokens": 4096}),  # rows beside the blocks
        ("off", {"kv_tokens": 128}),
        ("on", {"kv_tokens": 128}),
        ("on", {"kv_tokens": 4096}),
    ],
)
def test_a_token_that_gives_no_numbers_ends_only_its_own_sequence(
    native: Any, lookahead: str, keys: dict[str, Any]
) -> None:
    decoder = new_decoder(native.tiny(), seed=1, std=0.2)
    with torch.no_grad():
        decoder.head[5].zero_()
        decoder.embed[5].fill_(math.nan)
    core = core_of(decoder, lookahead, routes=False, **keys)
    ends = [5 if i % 3 == 0 else 6 for i in range(24)]
    requests = [native.ask(f"n{i}", [1, 2, 3, 4, i % 5, end], new=8 + i % 17, seed=i) for i, end in enumerate(ends)]
    for request in requests:
        core.submit(request, request.id)
    outcomes = run(core)
    failed = {name for name, outcome in outcomes.items() if isinstance(outcome, EngineError)}
    assert {request.id for request, end in zip(requests, ends, strict=True) if end == 5} <= failed
    for request, end in zip(requests, ends, strict=True):
        if request.id not in failed:
            wanted, _ = native.packed(decoder, request, outcomes[request.id])
            np.testing.assert_allclose(outcomes[request.id].logprobs, wanted, atol=native.tolerance, rtol=0)
        elif end != 5:  # it must have drawn the broken token itself
            alone = core_of(decoder, "off", routes=False)
            alone.submit(request, "alone")
            assert isinstance(run(alone)["alone"], EngineError)


def test_a_step_that_raises_forgets_what_was_under_way_and_the_engine_goes_on(native: Any) -> None:
    decoder = new_decoder(native.tiny(), seed=1, std=0.2)
    core = core_of(decoder, "on")
    for request in native.crowd(6):
        core.submit(request, request.id)
    for _ in range(3):
        core.step()
    whole, decoder.norm.data = decoder.norm.data, torch.ones(3)
    with pytest.raises(RuntimeError):
        core.step()
    core.fail(EngineError("a step failed"))
    decoder.norm.data = whole
    assert {str(outcome) for _, outcome in core.take_outcomes() if isinstance(outcome, Exception)} == {"a step failed"}
    requests = native.crowd(6, seed=4)
    for request in requests:
        core.submit(request, request.id)
    outcomes = run(core)
    native.assert_true_to(decoder, requests, [outcomes[request.id] for request in requests])


def test_what_computes_for_nobody_keeps_nobody_waiting(native: Any) -> None:
    async def body() -> None:
        engine = native.engine_of(new_decoder(native.tiny(), seed=1, std=0.2), lookahead="on", stepping="thread")
        free = await engine.generate(native.ask("a", range(5), new=30))
        stop = int(free.tokens[4])
        first = free.tokens.tolist().index(stop)
        for i in range(20):  # each ends with one pass under way
            answer = await engine.generate(native.ask(f"s{i}", range(5), new=30, stop_tokens=(stop,)))
            assert answer.tokens.tolist() == free.tokens.tolist()[: first + 1]
        await asyncio.sleep(0)
        report = engine.report()
        assert (report.running, report.kv_tokens_held) == (0, 0)
        assert report.tokens == 30 + 20 * (first + 1)
        await engine.close()

    native.run(body)


def test_nothing_is_kept_of_sequences_that_have_ended(native: Any) -> None:
    core = core_of(new_decoder(native.tiny(layers=1), seed=1, std=0.2), "on")
    for turn in range(6):
        for request in crowd(native, 20, new=12):
            core.submit(request, request.id)
        run(core)
        rows, scheduler = core._rows, core._scheduler
        held = (core._sequences, core._launched, rows.sequences, rows._home, rows._row, scheduler.waiting)
        assert [len(table) for table in (*held, scheduler.prefilling, scheduler.decoding, scheduler._queue)] == [0] * 9
        assert len(rows._homes) == rows.numbers.shape[1], turn
