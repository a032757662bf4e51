"""Going on with an episode that was broken off: in the same version it ends as if it had never been moved."""

import asyncio
import itertools
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contraflow.envs.base import Observation
from contraflow.errors import EngineError
from contraflow.model.decoder import new_decoder
from contraflow.model.tokenizer import build_char_tokenizer
from contraflow.rewards.registry import make_mix
from contraflow.rollout.draft import Draft, joined
from contraflow.rollout.episode import Limits, Stage, play
from contraflow.rollout.guard import make_guard
from contraflow.rollout.scripted import ScriptedEngine
from contraflow.types import Completion, Episode, Span, StopReason, Task, Version

TASK = Task(key="train/0", prompt="12+34=", reference="46")
LIMITS = Limits(max_new_tokens=40, max_turns=4, context_tokens=96, temperature=1.0, routes=True)
MOODS = {"a": "+", "b": "-"}
V = [Version(1, n) for n in range(9)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return build_char_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Echo:
    """An environment that answers a turn with a number and the turn's length, and is done after `turns` of them."""

    name = "echo"
    bounded = True

    def __init__(self, turns, *, mood="a"):
        self._turns, self._mood = turns, MOODS[mood]

    def task(self, split, index):
        return TASK

    def open(self, task):
        return _Session(self._turns, self._mood)


class _Session:
    def __init__(self, left, mood):
        self._left, self._mood = left, mood

    def step(self, action):
        self._left -= 1
        return Observation(f"[{self._mood}{self._left}{len(action)}]", self._left == 0)


def stage_of(tokenizer, engine, env, limits=LIMITS):
    guard = make_guard(env, make_mix({"partial": 1.0}), deadline_s=5.0, context_tokens=limits.context_tokens)
    return Stage(engine=engine, tokenizer=tokenizer, guard=guard, limits=limits)


def scripted(tokenizer, *, version=V[0], limits=LIMITS):
    """Answers are a function of the request's seed: digits, now and then an end."""

    def answer(request):
        draws = np.random.default_rng(request.seed % 2**63)
        return [*draws.choice(tokenizer.encode("0123456789"), draws.integers(0, 30)).tolist(), tokenizer.eos]

    return ScriptedEngine(
        answer,
        vocab=tokenizer.size,
        clock=time.monotonic,
        context_tokens=limits.context_tokens,
        routes=(2, 2),
        version=version,
    )


async def broken_off(stage, draft, turns_of_loop, *, abort=True):
    """Play for so many turns of the loop, then break off: with what the engine has, or by cancelling."""
    playing = asyncio.ensure_future(play(TASK, stage, draft, key="k", group="k"))
    for _ in range(turns_of_loop):
        await asyncio.sleep(0)
    draft.halt()
    if abort and draft.asked:
        await stage.engine.abort([draft.asked])
        await asyncio.wait([playing], timeout=5)
    playing.cancel()
    await asyncio.wait([playing], timeout=5)
    if playing.cancelled() or playing.result().stop is StopReason.ABORTED:
        return draft.unfinished()
    return playing.result()


def same(a: Episode, b: Episode) -> bool:
    return msgspec.json.encode(told(a)) == msgspec.json.encode(told(b))


def told(episode):
    fields = msgspec.structs.asdict(episode)
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in fields.items()}


async def moved(stages, seed, breaks, **how):
    """Play with one stage after the other, broken off at each of `breaks`; gives the episode and its last draft."""
    left = None
    for stage, after in zip(stages, breaks, strict=False):
        draft = Draft(seed, left)
        left = await broken_off(stage, draft, after, **how)
        if left.stop is not StopReason.ABORTED:
            return left, draft
    draft = Draft(seed, left)
    return await play(TASK, stages[-1], draft, key="k", group="k"), draft


@settings(deadline=None, max_examples=120)
@given(
    seed=st.integers(0, 10**6),
    breaks=st.lists(st.integers(0, 60), max_size=4),
    turns=st.integers(1, 4),
    most=st.integers(1, 60),
    context=st.integers(10, 90),
    abort=st.booleans(),
)
def test_an_episode_moved_within_one_version_is_what_it_would_have_been(
    tokenizer, seed, breaks, turns, most, context, abort
):
    limits = msgspec.structs.replace(LIMITS, max_new_tokens=most, context_tokens=context)
    stages = [stage_of(tokenizer, scripted(tokenizer, limits=limits), Echo(turns), limits) for _ in range(5)]

    async def main():
        whole = await play(TASK, stages[0], Draft(seed), key="k", group="k")
        again, draft = await moved(stages, seed, breaks, abort=abort)
        assert same(whole, again)
        assert draft.recalled <= whole.trained.sum()

    asyncio.run(main())


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), breaks=st.lists(st.integers(3, 30), min_size=1, max_size=4))
def test_moved_to_newer_versions_each_token_keeps_the_version_that_sampled_it(tokenizer, seed, breaks):
    stages = [stage_of(tokenizer, scripted(tokenizer, version=version), Echo(3)) for version in V[:5]]

    async def main():
        whole = await play(TASK, stages[0], Draft(seed), key="k", group="k")
        counts, left = [], None
        for stage, after in zip(stages, breaks, strict=False):
            draft = Draft(seed, left)
            left = await broken_off(stage, draft, after)
            counts.append(int(left.trained.sum()))
            if left.stop is not StopReason.ABORTED:
                break
        else:
            left = await play(TASK, stages[len(breaks)], Draft(seed, left), key="k", group="k")
            counts.append(int(left.trained.sum()))
        samplers = [span.version.n for span in left.spans for _ in range(span.start, span.end)]
        assert samplers == [n for n, new in enumerate(np.diff([0, *counts])) for _ in range(new)]
        assert left.tokens.tolist() == whole.tokens.tolist()  # the script does not look at versions

    asyncio.run(main())


@pytest.mark.parametrize("mood", ["a", "b"])
def test_what_another_session_answers_otherwise_ends_what_is_recalled(tokenizer, mood):
    async def main():
        for after in itertools.count(10):  # until it is broken off in its second turn
            left = await broken_off(stage_of(tokenizer, scripted(tokenizer), Echo(3, mood="a")), Draft(4), after)
            if [turn.role for turn in left.turns].count("model") == 2:
                break
        draft = Draft(4, left)
        stage = stage_of(tokenizer, scripted(tokenizer), Echo(3, mood=mood))
        return left, draft, await play(TASK, stage, draft, key="k", group="k")

    left, draft, episode = asyncio.run(main())
    first = left.turns[1]
    assert left.stop is StopReason.ABORTED
    assert draft.recalled == (left.trained.sum() if mood == "a" else first.end - first.start)
    env = episode.turns[2]
    assert tokenizer.decode(episode.tokens[env.start : env.end]).startswith(f"[{MOODS[mood]}")
    assert not episode.failed


def part(tokens, version, *, stop=StopReason.LENGTH, routes=None):
    count = len(tokens)
    return Completion(
        tokens=np.array(tokens, np.int32),
        logprobs=-np.ones(count, np.float32),
        spans=(Span(version, 0, count),) if count else (),
        stop=stop,
        routes=routes,
    )


def test_two_parts_of_a_turn_are_one_with_the_experts_that_each_was_sampled_with():
    old, new = np.zeros((4, 1, 2), np.uint8), np.ones((7, 1, 2), np.uint8)
    both = joined(part([1, 2, 3], V[0], routes=old), part([4, 5], V[1], routes=new))
    assert both.tokens.tolist() == [1, 2, 3, 4, 5]
    assert both.spans == (Span(V[0], 0, 3), Span(V[1], 3, 5))
    assert both.routes[:, 0, 0].tolist() == [0] * 4 + [1] * 3
    assert joined(part([1], V[0]), part([2], V[0])).spans == (Span(V[0], 0, 2),)
    assert joined(part([1], V[0]), part([], V[1])).spans == (Span(V[0], 0, 1),)
    with pytest.raises(EngineError, match="do not cover"):
        joined(part([1], V[0]), msgspec.structs.replace(part([2], V[0]), spans=()))


@pytest.mark.parametrize("on_refresh", ["keep", "recompute"])
def test_the_native_engine_goes_on_with_the_tokens_it_would_have_sampled(native, on_refresh):
    """Broken off at random places, on an engine that is busy with others; its experts and log-probabilities as well."""
    decoder = new_decoder(native.tiny(), seed=5, std=0.3)
    rng = np.random.default_rng(0)

    async def main():
        engines = [native.engine_of(decoder, on_refresh=on_refresh) for _ in range(2)]
        requests = native.crowd(12, seed=3, new=40, want_routes=True)
        whole, moved = await native.answers(engines[0], requests), 0
        for request, answer in zip(requests, whole, strict=True):
            cut = int(rng.integers(0, len(answer.tokens) + 1))
            going = [asyncio.ensure_future(engines[0].generate(request))]
            for _ in range(cut + 2):
                await asyncio.sleep(0)
            await engines[0].abort([request.id])
            (begun,) = await asyncio.gather(*going)
            done = len(begun.tokens)
            assert begun.routes is None or len(begun.routes) == len(request.prompt) + done - 1
            if begun.stop is not StopReason.ABORTED:
                continue
            rest = msgspec.structs.replace(
                request,
                prompt=np.concatenate([request.prompt, begun.tokens]),
                done=done,
                max_new_tokens=request.max_new_tokens - done,
            )
            others = [native.ask(f"other{n}", rng.integers(0, native.vocab, 9).tolist(), seed=n) for n in range(3)]
            end, *_ = await native.answers(engines[1], [rest, *others])
            both = joined(begun, end) if done else end
            moved += done > 0
            assert both.tokens.tolist() == answer.tokens.tolist()
            assert both.logprobs[:done].tolist() == begun.logprobs.tolist()
            np.testing.assert_allclose(both.logprobs, answer.logprobs, atol=1e-5)
            assert both.spans == answer.spans
            native.assert_true_to(decoder, [request], [both])
        assert moved > 5

    native.run(main)


@pytest.mark.parametrize("done", [-1, 3, 4])
def test_more_than_the_prompt_cannot_be_done(native, done):
    decoder = new_decoder(native.tiny(), seed=5, std=0.3)

    async def main():
        with pytest.raises(EngineError, match=f"done = {done} of a prompt of 3 tokens"):
            await native.engine_of(decoder).generate(native.ask("a", [1, 2, 3], done=done))

    native.run(main)
