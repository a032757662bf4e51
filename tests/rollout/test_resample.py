"""What a replay asks to be sampled again, and when it says that it came out alike."""

import asyncio
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contraflow.rollout.resample import TOLERANCE, How, compare, pieces
from contraflow.rollout.scripted import ScriptedEngine
from contraflow.types import Completion, Episode, Group, Probe, Request, Span, StopReason, Task, Ticket, Turn, Version

LINE = 3


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    """Turns of prompt, model and environment; each of the model's sampled by one version or several in order."""
    turns, spans, end, n = [Turn("prompt", 0, 4)], [], 4, 0
    for _ in range(draw(st.integers(0, 3))):
        start = end
        for length in draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)):
            n += draw(st.integers(0, 2))
            spans.append(Span(Version(draw(st.sampled_from([LINE, LINE, 1])), n), end, end + length))
            end += length
        turns.append(Turn("model", start, end))
        heard = draw(st.integers(0, 3))
        turns.append(Turn("env", end, end + heard))
        end += heard
    return Episode(
        seed=0,
        tokens=np.arange(end, dtype=np.int32),
        trained=np.zeros(end, np.bool_),
        logprobs=np.zeros(end, np.float32),
        spans=tuple(spans),
        turns=tuple(turns),
        stop=StopReason.STOP,
        reward=0.0,
    )


def group_of(*played: Episode) -> Group:
    task = Task(key="train/5", prompt="1+1=", reference="2")
    return Group(ticket=Ticket(group=5, attempt=1, line=LINE), task=task, episodes=played)


@given(st.lists(episodes(), max_size=3), st.integers(0, 4), st.booleans(), st.booleans())
def test_pieces_cover_each_sampled_token_once_and_say_what_can_come_again(
    played: list[Episode], first: int, whole: bool, keeps: bool
) -> None:
    how = How(seed=0, temperature=1.0, keeps_cache=keeps, first=first)
    found = list(pieces(group_of(*played), how, whole_turns=whole))
    for place, episode in enumerate(played):
        own = [piece for piece in found if piece.place == place]
        covered = list(itertools.chain.from_iterable(range(piece.start, piece.end) for piece in own))
        said = [turn for turn in episode.turns if turn.role == "model"]
        assert covered == list(itertools.chain.from_iterable(range(turn.start, turn.end) for turn in said))
        for piece in own:
            turn = said[piece.turn]
            at_hand = piece.version.line == LINE and piece.version.n >= first
            begins = piece.start == turn.start
            assert turn.start <= piece.start < piece.end <= turn.end
            assert (piece.fate != "gone") == at_hand
            assert (piece.fate == "kept") == (at_hand and (keeps or whole) and not begins)
            assert piece.begun == turn.start
            sampler = next(span.version for span in episode.spans if span.end > (turn.start if whole else piece.start))
            assert piece.version == sampler


WAS = Episode(
    seed=0,
    tokens=np.array([9, 9, 4, 5, 6], np.int32),
    trained=np.array([0, 0, 1, 1, 1], np.bool_),
    logprobs=np.array([0, 0, -1, -2, -3], np.float32),
    spans=(Span(Version(LINE, 1), 2, 5),),
    turns=(Turn("prompt", 0, 2), Turn("model", 2, 5)),
    stop=StopReason.STOP,
    reward=0.0,
)
SAME, NAN = (-1.0, -2.0, -3.0), float("nan")


@pytest.mark.parametrize(
    ("tokens", "logprobs", "alike", "said"),
    [
        ((4, 5, 6), SAME, 3, ""),
        ((4, 5, 6), (-1.0, -2.0 - TOLERANCE / 2, -3.0), 3, ""),
        ((4, 5, 6), (-1.0, -2.0 - TOLERANCE * 2, -3.0), 3, "log-probability of token 3 was -2.000000, is -2.000200"),
        ((4, 5, 6), (-1.0, NAN, -3.0), 3, "log-probability of token 3 was -2.000000, is nan"),
        ((4, 7, 6), SAME, 1, "token 3 was 5, is 7"),
        ((4, 7, 6), (-1.5, -2.0, -3.0), 1, "log-probability of token 2"),
        ((4, 5), SAME[:2], 2, "token 4 was 6, is none"),
        ((4, 5, 6, 7), (*SAME, -4.0), 3, "token 5 was none, is 7"),
        ((), (), 0, "token 2 was 4, is none"),
    ],
)
def test_alike_is_every_token_and_each_log_probability(
    tokens: tuple[int, ...], logprobs: tuple[float, ...], alike: int, said: str
) -> None:
    (piece,) = pieces(group_of(WAS), How(seed=0, temperature=1.0, keeps_cache=True, first=0), whole_turns=False)
    made = Completion(
        tokens=np.array(tokens, np.int32), logprobs=np.array(logprobs, np.float32), spans=(), stop=StopReason.LENGTH
    )
    count, difference = compare(WAS, piece, made)
    assert (count.alike, count.alike_tokens, count.tokens) == (int(not said), alike, 3)
    assert difference.endswith(said) if said.startswith("token") else said in difference
    assert bool(difference) == bool(said)


def test_the_version_that_a_script_was_asked_under_is_that_of_its_first_token() -> None:
    """A swap may fall before the first token: the record then names the new version, so that one has to answer."""
    engine = ScriptedEngine(
        lambda _: [engine.version.n if engine.version else 0, 1], vocab=9, clock=lambda: 0.0, version=Version(0, 4)
    )

    async def main() -> Completion:
        request = Request(id="a", prompt=np.array([2], np.int32), seed=0, max_new_tokens=4, stop_tokens=(1,))
        answering = asyncio.ensure_future(engine.generate(request))
        await asyncio.sleep(0)
        await engine.swap(Version(0, 5), {}, Probe((), (), 1.0))
        return await answering

    made = asyncio.run(main())
    assert (made.tokens.tolist(), made.spans) == ([5, 1], (Span(Version(0, 5), 0, 2),))
