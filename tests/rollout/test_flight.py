"""A request's pieces add up to one completion, whatever versions and servers they came from."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contraflow.errors import ServerError
from contraflow.rollout.dialect import Chunk
from contraflow.rollout.flight import Flight, Received
from contraflow.types import Request, StopReason, Version
from tests.rollout.served_lab import CONFIG

VOCAB, CONTEXT, STOP = 50, 40, 7
MODEL = replace(CONFIG, vocab=VOCAB)


def flight(new: int = 20, policy: Literal["keep", "recompute"] = "keep", **rest: Any) -> Flight:
    prompt = np.array([1, 2, 3], np.int32)
    request = Request(id="a", prompt=prompt, seed=5, max_new_tokens=new, stop_tokens=(STOP,), **rest)
    return Flight(request, CONTEXT, policy)


def give(one: Flight, version: Version, tokens: list[int]) -> None:
    """A piece under `version` that brings `tokens`, one chunk each."""
    received = Received("here", one.piece(version), MODEL)
    for token in tokens:
        received.add(Chunk(tokens=[token], logprobs=[-0.5 - token]))
    one.add(received, version)


# What pieces bring, and by how much the version has grown since the one before: some are parked with nothing.
PIECES = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(8, VOCAB - 1), max_size=4)), max_size=5)


@given(PIECES, st.sampled_from(["keep", "recompute"]))
def test_every_token_keeps_its_place_its_log_probability_and_its_version(
    pieces: list[tuple[int, list[int]]], policy: Literal["keep", "recompute"]
) -> None:
    one, wanted, n = flight(policy=policy), list[tuple[int, int]](), 1
    for grown, tokens in pieces:
        n += grown
        give(one, Version(1, n), tokens)
        wanted += [(token, n) for token in tokens]
    if not pieces:
        return
    done = one.completion(StopReason.ABORTED)
    assert done.tokens.tolist() == [token for token, _ in wanted]
    assert done.logprobs.tolist() == [-0.5 - token for token, _ in wanted]
    versions = [span.version.n for span in done.spans for _ in range(span.start, span.end)]
    assert versions == [version for _, version in wanted]
    assert [span.start for span in done.spans] == [0, *(span.end for span in done.spans)][: len(done.spans)]
    broken = len({version for _, version in wanted}) > 1
    assert (done.cache != "unbroken") >= broken


def test_a_piece_asks_for_what_is_left_and_repeats_no_noise() -> None:
    one = flight(new=20)
    first = one.piece(Version(1, 1))
    give(one, Version(1, 1), [11, 12])
    second = one.piece(Version(1, 2))
    assert (first.prompt.tolist(), first.max_new_tokens, first.seed) == ([1, 2, 3], 20, 5)
    assert (second.prompt.tolist(), second.max_new_tokens) == ([1, 2, 3, 11, 12], 18)
    assert second.seed not in (first.seed, one.piece(Version(1, 2)).seed + 1)
    assert first.id != second.id


@pytest.mark.parametrize(("policy", "salt"), [("keep", "version 1.1"), ("recompute", "version 1.2")])
def test_only_a_request_that_began_before_a_refresh_may_find_the_old_cache(
    policy: Literal["keep", "recompute"], salt: str
) -> None:
    one = flight(policy=policy)
    assert one.piece(Version(1, 1)).salt == "version 1.1"
    assert one.piece(Version(1, 2)).salt == salt
    assert flight(policy=policy).piece(Version(1, 2)).salt == "version 1.2"


def test_the_end_is_a_stop_token_the_length_asked_for_or_the_context() -> None:
    for new, tokens, ended in [
        (20, [11, STOP], StopReason.STOP),
        (2, [11, 12], StopReason.LENGTH),
        (2, [11, STOP], StopReason.STOP),
        (99, [11] * (CONTEXT - 3), StopReason.LENGTH),
        (20, [11, 12], None),
        (20, [], None),
    ]:
        one = flight(new=new)
        give(one, Version(1, 1), tokens)
        assert one.ended == ended


@given(st.lists(st.lists(st.sampled_from([STOP, 8, 9]), max_size=3), max_size=5))
def test_nothing_may_come_behind_a_stop_token_however_tokens_are_cut_into_chunks(chunks: list[list[int]]) -> None:
    received, tokens = Received("here", flight().piece(Version(1, 1)), MODEL), list[int]()
    for chunk in chunks:
        tokens += chunk
        if STOP in tokens[:-1]:
            with pytest.raises(ServerError, match="a stop token end it"):
                received.add(Chunk(tokens=chunk, logprobs=[-1.0] * len(chunk)))
            return
        received.add(Chunk(tokens=chunk, logprobs=[-1.0] * len(chunk)))
    assert received.tokens == tokens
