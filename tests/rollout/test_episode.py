"""One episode: who wrote which token, what it is worth, and every way in which it can end."""

import asyncio
import dataclasses
import math
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contraflow.envs.base import Observation
from contraflow.envs.registry import make_env
from contraflow.model.tokenizer import ALPHABET, build_char_tokenizer
from contraflow.rewards.registry import make_mix
from contraflow.rollout.draft import Draft
from contraflow.rollout.episode import Limits, Stage, play
from contraflow.rollout.guard import make_guard
from contraflow.rollout.scripted import ScriptedEngine
from contraflow.types import Completion, Probe, Span, StopReason, Task, Version

TASK = Task(key="train/0", prompt="12+34=", reference="46", facts={"format": "[0-9]+"})
LIMITS = Limits(max_new_tokens=32, max_turns=4, context_tokens=64, temperature=1.0, routes=False)
NOTHING = Probe((), (), 0.0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return build_char_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Talk:
    """An environment that says the next of `lines` after each turn, and done after the last; it notes what it heard."""

    name = "talk"
    bounded = True

    def __init__(self, lines=()):
        self._lines = list(lines)
        self.heard = []

    def task(self, split, index):
        return TASK

    def open(self, task):
        return self

    def step(self, action):
        self.heard.append(action)
        if not self._lines:
            return Observation("", True)
        line = self._lines.pop(0)
        return line if not isinstance(line, str) else Observation(line, False)


class Turns:
    """A script: turn t of a request `KEY/t` is answered with `turns[t]`."""

    def __init__(self, tokenizer, turns):
        self._turns = [tokenizer.encode(turn, special=True) for turn in turns]
        self.requests = []

    def __call__(self, request):
        self.requests.append(request)
        return self._turns[int(request.id.rpartition("/")[2])]


def stage_of(tokenizer, turns, *, env=None, mix=None, limits=LIMITS, deadline_s=1.0, **engine):
    script = Turns(tokenizer, turns)
    twin = ScriptedEngine(
        script,
        vocab=tokenizer.size,
        clock=time.monotonic,
        context_tokens=limits.context_tokens,
        routes=(3, 2) if limits.routes else None,
        version=Version(1, 0),
        **engine,
    )
    guard = make_guard(
        env or Talk(), mix or make_mix({"correct": 1.0}), deadline_s=deadline_s, context_tokens=limits.context_tokens
    )
    return Stage(engine=twin, tokenizer=tokenizer, guard=guard, limits=limits), script


def played(stage, *, task=TASK, seed=1):
    return asyncio.run(play(task, stage, Draft(seed), key="1.0.1/0", group="1.0.1"))


def test_one_right_answer(tokenizer):
    episode = played(stage_of(tokenizer, ["46<eos>"])[0])
    assert tokenizer.pieces(episode.tokens) == [*"12+34=46", "<eos>"]
    assert episode.trained.tolist() == [False] * 6 + [True] * 3
    assert episode.logprobs.tolist() == pytest.approx([0.0] * 6 + [-math.log(tokenizer.size)] * 3)
    assert [(turn.role, turn.start, turn.end) for turn in episode.turns] == [("prompt", 0, 6), ("model", 6, 9)]
    assert episode.spans == (Span(Version(1, 0), 6, 9),)
    assert (episode.stop, episode.reward, episode.parts) == (StopReason.STOP, 1.0, {"correct": 1.0})
    assert not episode.failed
    assert episode.routes is None


def test_turns_alternate_and_what_the_environment_says_is_not_trained(tokenizer):
    env = Talk(["46=", "?"])
    stage, script = stage_of(tokenizer, ["[12+34]<eos>", "[]<eos>", "46<eos>"], env=env)
    episode = played(stage)
    text = "12+34=[12+34]|46=[]|?46|"
    assert "".join(tokenizer.pieces(episode.tokens)).replace("<eos>", "|") == text
    roles = [("prompt", 0, 6), ("model", 6, 14), ("env", 14, 17), ("model", 17, 20), ("env", 20, 21), ("model", 21, 24)]
    assert [(turn.role, turn.start, turn.end) for turn in episode.turns] == roles
    assert env.heard == ["[12+34]", "[]", "46"]
    assert episode.reward == 1.0
    # Token in, token out: each request's prompt is everything before it, and the turns share no noise.
    assert [request.prompt.tolist() for request in script.requests] == [
        episode.tokens[:end].tolist() for end in (6, 17, 21)
    ]
    assert len({request.seed for request in script.requests}) == 3
    assert [request.max_new_tokens for request in script.requests] == [32, 24, 21]
    assert {request.group for request in script.requests} == {"1.0.1"}


@pytest.mark.parametrize("answer", ["4<pad>6<eos>", "46<pad><eos>", "<pad>46<eos>"])
def test_special_tokens_inside_an_answer_are_part_of_it(tokenizer, answer):
    env = Talk()
    episode = played(stage_of(tokenizer, [answer], env=env)[0])
    assert env.heard == [answer.removesuffix("<eos>")]
    assert episode.reward == 0.0


def test_the_noise_of_a_turn_is_a_function_of_the_episodes_seed(tokenizer):
    def seeds(seed):
        stage, script = stage_of(tokenizer, ["1<eos>", "2<eos>"], env=Talk(["="]))
        played(stage, seed=seed)
        return [request.seed for request in script.requests]

    assert seeds(5) == seeds(5)
    assert not set(seeds(5)) & set(seeds(6))


@pytest.mark.parametrize(
    ("turns", "lines", "limits", "length"),
    [
        (["464646"], [], {"max_new_tokens": 4}, 10),  # tokens of one turn
        (["[1]<eos>", "464646"], ["1="], {"max_new_tokens": 8}, 16),  # tokens over all turns
        (["[1]<eos>"], ["1="], {"max_new_tokens": 4}, 10),  # nothing left for another turn
        (["[1]<eos>", "[1]<eos>"], ["1=", "1=", "1="], {"max_turns": 2}, 16),  # turns
        (["[1]<eos>", "46<eos>"], ["1="], {"context_tokens": 12}, 10),  # the observation fills the context
        (["464646"], [], {"context_tokens": 9}, 9),  # the answer fills the context
    ],
)
def test_a_budget_that_runs_out_ends_the_episode_unfinished(tokenizer, turns, lines, limits, length):
    stage, _ = stage_of(tokenizer, turns, env=Talk(lines), limits=msgspec.structs.replace(LIMITS, **limits))
    episode = played(stage)
    assert (episode.stop, episode.reward, episode.error, len(episode.tokens)) == (StopReason.LENGTH, 0.0, "", length)
    assert episode.turns[-1].role == "model"


# The text of an end token would be one: what a turn says is not to end it, only what follows.
TEXT = st.text(alphabet=ALPHABET, max_size=8).filter(lambda text: "<eos>" not in text)
TURN = st.tuples(TEXT, st.booleans())


@settings(deadline=None, max_examples=150)
@given(
    turns=st.lists(TURN, min_size=6, max_size=6),
    lines=st.lists(TEXT, max_size=5),
    max_new_tokens=st.integers(1, 40),
    max_turns=st.integers(1, 6),
    context_tokens=st.integers(8, 80),
    swaps=st.lists(st.integers(1, 9), max_size=5),
)
def test_masks_turns_spans_logprobs_and_routes_line_up(
    tokenizer, turns, lines, max_new_tokens, max_turns, context_tokens, swaps
):
    limits = Limits(
        max_new_tokens=max_new_tokens,
        max_turns=max_turns,
        context_tokens=context_tokens,
        temperature=1.0,
        routes=True,
    )
    env = Talk(lines)
    spoken = [text + ("<eos>" if ended else "x" * 90) for text, ended in turns]  # the x's never end by themselves
    stage, script = stage_of(tokenizer, spoken, env=env, limits=limits)

    async def main():
        playing = asyncio.ensure_future(play(TASK, stage, Draft(3), key="k", group="k"))
        for n, ticks in enumerate(swaps):
            for _ in range(ticks):
                await asyncio.sleep(0)
            await stage.engine.swap(Version(1, n + 1), {}, NOTHING)
        return await playing

    episode = asyncio.run(main())
    length = len(episode.tokens)
    assert not episode.failed
    assert length <= context_tokens
    assert episode.trained.sum() <= max_new_tokens
    # Turns cover the episode in order and alternate; it begins with the prompt and ends with the model.
    bounds = [0, *(turn.end for turn in episode.turns)]
    assert [turn.start for turn in episode.turns] == bounds[:-1]
    assert bounds[-1] == length
    roles = [turn.role for turn in episode.turns]
    assert roles == ["prompt", *["model", "env"] * len(roles)][: len(roles)]
    assert roles[-1] == "model"
    assert roles.count("model") <= max_turns
    # The mask is the model's turns, log-probabilities are theirs, spans cover them and nothing else, versions grow.
    mask = np.zeros(length, bool)
    for turn in episode.turns:
        mask[turn.start : turn.end] = turn.role == "model"
    assert (episode.trained == mask).all()
    assert np.allclose(episode.logprobs, np.where(mask, -math.log(tokenizer.size), 0.0))
    covered = [place for span in episode.spans for place in range(span.start, span.end)]
    assert covered == np.flatnonzero(mask).tolist()
    assert [span.version for span in episode.spans] == sorted(span.version for span in episode.spans)
    # Text is what was said, and what the model said is what the environment heard.
    said = {role: [] for role in ("prompt", "model", "env")}
    for turn in episode.turns:
        said[turn.role].append(tokenizer.decode(episode.tokens[turn.start : turn.end]))
    assert said["prompt"] == [TASK.prompt]
    assert said["env"] == lines[: len(said["env"])]
    heard = len(env.heard)
    assert said["model"][:heard] == env.heard == [text for text, _ in turns[:heard]]
    assert (episode.stop is StopReason.STOP) == (heard == len(lines) + 1)
    assert episode.routes.shape == (length - 1, 3, 2)
    assert all(request.want_routes for request in script.requests)


class Routed:
    """An engine whose experts are the number of the turn that fed the token."""

    version = Version(1, 0)

    def __init__(self, tokenizer):
        self._answer = np.array(tokenizer.encode("1<eos>", special=True), np.int32)

    async def generate(self, request):
        turn = int(request.id.rpartition("/")[2])
        return Completion(
            tokens=self._answer,
            logprobs=np.zeros(2, np.float32),
            spans=(Span(self.version, 0, 2),),
            stop=StopReason.STOP,
            routes=np.full((len(request.prompt) + 1, 1, 2), turn, np.uint8),
        )


def test_routes_of_a_token_are_those_of_the_turn_that_fed_it_first(tokenizer):
    stage = dataclasses.replace(stage_of(tokenizer, [], env=Talk(["==", "="]))[0], engine=Routed(tokenizer))
    episode = played(stage)
    # prompt 6, model 2 (its last token is fed by the next turn), env 2, model 2, env 1, model 2
    assert episode.routes[:, 0, 0].tolist() == [0] * 7 + [1] * 4 + [2] * 3
    assert len(episode.routes) == len(episode.tokens) - 1


def completion(**changes):
    whole = {
        "tokens": np.array([5, 1], np.int32),
        "logprobs": np.zeros(2, np.float32),
        "spans": (Span(Version(1, 0), 0, 2),),
        "stop": StopReason.STOP,
        "routes": None,
    }
    return Completion(**(whole | changes))


@pytest.mark.parametrize(
    "answer",
    [
        completion(logprobs=np.zeros(1, np.float32)),
        completion(logprobs=np.array([0, np.nan], np.float32)),
        completion(spans=()),
        completion(spans=(Span(Version(1, 0), 0, 1),)),
        completion(spans=(Span(Version(1, 0), 1, 2), Span(Version(1, 0), 0, 1))),
        completion(routes=np.zeros((3, 1, 2), np.uint8)),
    ],
)
def test_a_completion_that_is_not_whole_is_an_engine_error(tokenizer, answer):
    class Sloppy:
        async def generate(self, request):
            return answer

    episode = played(dataclasses.replace(stage_of(tokenizer, [])[0], engine=Sloppy()))
    assert episode.stop is StopReason.ENGINE_ERROR
    assert episode.routes is None
    assert not episode.trained.any() or answer.routes is not None


def test_a_prompt_longer_than_the_context_is_refused_with_the_reason(tokenizer):
    task = Task(key="train/0", prompt="1" * 64, reference="1")
    episode = played(stage_of(tokenizer, ["1<eos>"])[0], task=task)
    assert episode.stop is StopReason.ENGINE_ERROR
    assert "a prompt of 64 tokens leaves no room in a context of 64" in episode.error


def test_an_empty_prompt_is_refused(tokenizer):
    episode = played(stage_of(tokenizer, ["1<eos>"])[0], task=Task(key="train/0", prompt="", reference="1"))
    assert episode.stop is StopReason.ENGINE_ERROR
    assert len(episode.tokens) == 0


def test_text_that_the_tokenizer_cannot_write_is_the_environments_error(tokenizer):
    episode = played(stage_of(tokenizer, ["1<eos>"])[0], task=Task(key="train/0", prompt="π=", reference="3"))
    assert (episode.stop, episode.error.split(":")[0]) == (StopReason.ENV_ERROR, "the prompt")
    stage, _ = stage_of(tokenizer, ["1<eos>", "2<eos>"], env=Talk(["π"]))
    episode = played(stage)
    assert (episode.stop, episode.error.split(":")[0]) == (StopReason.ENV_ERROR, "an observation")


def test_an_end_token_in_an_observation_is_text(tokenizer):
    episode = played(stage_of(tokenizer, ["1<eos>", "46<eos>"], env=Talk(["<eos>"]))[0])
    _, _, env, _ = episode.turns
    assert tokenizer.eos not in episode.tokens[env.start : env.end]


class Broken(Talk):
    """Talks once, then fails in the way the test wants."""

    def __init__(self, fault, *, bounded):
        super().__init__(["="])
        self._fault, self.bounded = fault, bounded

    def step(self, action):
        if self._lines:
            return super().step(action)
        return self._fault()


def raises():
    raise ValueError("no such key")


async def never():
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (raises, "step raised ValueError: no such key"),
        (never, "step did not answer within 0.1 s"),
        (lambda: time.sleep(0.3), "step did not answer within 0.1 s"),
        (lambda: "46", "step gave a str, not an Observation"),
        (lambda: Observation("1" * 10**6, False), "step gave 1000000 characters"),
    ],
)
def test_an_environment_that_breaks_costs_its_episode(tokenizer, fault, words):
    stage, _ = stage_of(tokenizer, ["1<eos>", "2<eos>"], env=Broken(fault, bounded=False), deadline_s=0.1)
    episode = played(stage)
    assert episode.stop is StopReason.ENV_ERROR
    assert words in episode.error
    assert episode.failed
    assert (episode.reward, episode.parts, episode.routes) == (0.0, {}, None)
    assert tokenizer.decode(episode.tokens) == "12+34=1=2"


def test_a_reward_that_breaks_costs_its_episode(tokenizer, tmp_path):
    (tmp_path / "mine.py").write_text("def nan(task, transcript): return float('nan')")
    mix = make_mix({f"{tmp_path}/mine.py:nan": 1.0})
    episode = played(stage_of(tokenizer, ["46<eos>"], mix=mix)[0])
    assert episode.stop is StopReason.REWARD_ERROR
    assert episode.error.endswith("nan' gave nan")
    assert math.isfinite(episode.reward)


def test_an_aborted_request_ends_an_episode_that_is_never_trained(tokenizer):
    stage, _ = stage_of(tokenizer, ["464646<eos>"])

    async def main():
        playing = asyncio.ensure_future(play(TASK, stage, Draft(0), key="k", group="k"))
        for _ in range(4):
            await asyncio.sleep(0)
        await stage.engine.abort(["k/0"])
        return await playing

    episode = asyncio.run(main())
    assert (episode.stop, episode.failed) == (StopReason.ABORTED, True)


def test_cancelling_ends_the_request_in_the_engine(tokenizer):
    stage, _ = stage_of(tokenizer, ["4" * 60])

    async def main():
        playing = asyncio.ensure_future(play(TASK, stage, Draft(0), key="k", group="k"))
        for _ in range(4):
            await asyncio.sleep(0)
        assert stage.engine.report().running == 1
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert stage.engine.report().running == 0

    asyncio.run(main())


def test_the_calculator_is_played_from_question_to_answer(tokenizer):
    env = make_env("calculator", {"kinds": [{"operands": 2, "digits": 2, "ops": ["*"]}]})
    task = env.task("train", 0)
    call, answer = f"[{task.prompt.removesuffix('=')}]<eos>", f"{task.reference}<eos>"
    stage, _ = stage_of(tokenizer, [call, answer], env=env, mix=make_mix({"correct": 1.0, "tool": 0.5}))
    episode = played(stage, task=task)
    assert (episode.reward, episode.parts) == (1.5, {"correct": 1.0, "tool": 1.0})
    assert [turn.role for turn in episode.turns] == ["prompt", "model", "env", "model"]
