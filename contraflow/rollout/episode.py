"""One attempt at a task: prompt in, turns between model and environment, a score at the end.

Takes a task and what it is played with, gives an `Episode`; whatever breaks on the way is told in its `error`.
Token in, token out: what the model sampled is kept as sampled, never tokenised again. Cancelling aborts the request.

Shape letters: L tokens of the episode so far, N new tokens, M MoE layers, K experts per token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from contraflow import config
from contraflow.envs.draws import derive_seed
from contraflow.errors import ContraflowError, EngineError, ModelError, RewardError, TaskError
from contraflow.model.tokenizer import Tokenizer
from contraflow.rewards.base import Said, Transcript
from contraflow.rollout.engine import Engine
from contraflow.rollout.guard import Guard
from contraflow.types import Completion, Episode, Request, Routes, Span, StopReason, Task, Turn


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How far an episode may go, and how it is sampled."""

    max_new_tokens: int  # of the model, over all its turns
    max_turns: int
    context_tokens: int  # everything: prompt, model and environment
    temperature: float
    routes: bool

    @classmethod
    def of(cls, rollout: config.Rollout, engine: config.Engine) -> "Limits":
        """The limits a recipe sets for training."""
        return cls(
            max_new_tokens=rollout.max_new_tokens,
            max_turns=rollout.max_turns,
            context_tokens=engine.context_tokens,
            temperature=rollout.temperature,
            routes=engine.routes,
        )


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What episodes are played with. Shared by all that run at once; holds nothing of any one of them."""

    engine: Engine
    tokenizer: Tokenizer
    guard: Guard
    limits: Limits


async def play(task: Task, stage: Stage, *, key: str, group: str, seed: int) -> Episode:
    """Play one episode of `task`. Turn t is request `KEY/t` of `group`, sampled with a seed derived from (`seed`, t).

    Never raises for what an environment, a reward or a refused request does: see `Episode.stop` and `Episode.error`.
    """
    draft = _Draft(seed)
    try:
        stop = await _converse(draft, task, stage, key=key, group=group)
    except TaskError as fault:
        return draft.broken(StopReason.ENV_ERROR, fault)
    except EngineError as fault:
        return draft.broken(StopReason.ENGINE_ERROR, fault)
    if stop is StopReason.ABORTED:
        return draft.broken(stop, EngineError("the request was aborted"))
    try:
        reward, parts = await stage.guard.score(task, Transcript(tuple(draft.said), stop))
    except RewardError as fault:
        return draft.broken(StopReason.REWARD_ERROR, fault)
    return draft.finished(stop, reward, parts)


async def _converse(draft: "_Draft", task: Task, stage: Stage, *, key: str, group: str) -> StopReason:
    """Let model and environment take turns until one of them, or a limit, ends it."""
    limits = stage.limits
    session = await stage.guard.open(task)
    draft.hear("prompt", task.prompt, _write(stage.tokenizer, "the prompt", task.prompt, special=True))
    left = limits.max_new_tokens
    for turn in range(limits.max_turns):
        request = Request(
            id=f"{key}/{turn}",
            prompt=np.array(draft.tokens, np.int32),
            seed=derive_seed(draft.seed, turn),
            max_new_tokens=left,
            temperature=limits.temperature,
            stop_tokens=(stage.tokenizer.eos,),
            group=group,
            want_routes=limits.routes,
        )
        completion = await stage.engine.generate(request)
        action = draft.say(completion, stage.tokenizer)
        if completion.stop is not StopReason.STOP:
            return completion.stop
        observation = await stage.guard.step(session, action)
        if observation.done:
            draft.said.append(Said("env", observation.text))
            return StopReason.STOP
        left -= len(completion.tokens)
        ids = _write(stage.tokenizer, "an observation", observation.text, special=False)
        if turn + 1 == limits.max_turns or left < 1 or len(draft.tokens) + len(ids) >= limits.context_tokens:
            draft.said.append(Said("env", observation.text))  # heard by the grader only: no token would follow it
            return StopReason.LENGTH
        draft.hear("env", observation.text, ids)
    raise AssertionError("max_turns is at least 1")


def _write(tokenizer: Tokenizer, what: str, text: str, *, special: bool) -> list[int]:
    try:
        return tokenizer.encode(text, special=special)
    except ModelError as fault:
        raise TaskError(f"{what}: {fault}") from fault


def broken_episode(seed: int, fault: ContraflowError, stop: StopReason = StopReason.ENV_ERROR) -> Episode:
    """An episode of which nothing is left: its task could not be posed, or it was not finished in time."""
    return _Draft(seed).broken(stop, fault)


class _Draft:
    """An episode while it is written.

    Invariants: `tokens`, `trained` and `logprobs` are equally long, turns cover them in order, spans cover exactly the
    trained ones. Routes of a token are those of the turn that fed it first: later turns only add rows.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.tokens: list[int] = []
        self.said: list[Said] = []
        self._trained: list[bool] = []
        self._logprobs: list[float] = []
        self._spans: list[Span] = []
        self._turns: list[Turn] = []
        self._routes: list[Routes] = []

    def hear(self, role: Literal["prompt", "env"], text: str, ids: list[int]) -> None:
        """Append what the model is told."""
        self.said.append(Said(role, text))
        self._append(role, ids, [0.0] * len(ids))

    def say(self, completion: Completion, tokenizer: Tokenizer) -> str:
        """Append what the model sampled; gives its text. Raises EngineError when the completion is not whole."""
        _check(completion)
        start, ids = len(self.tokens), completion.tokens.tolist()
        self._spans += [Span(span.version, start + span.start, start + span.end) for span in completion.spans]
        self._append("model", ids, completion.logprobs.tolist())
        if completion.routes is not None and completion.stop is not StopReason.ABORTED:
            self._add_routes(completion.routes)
        ended = completion.stop is StopReason.STOP
        text = tokenizer.transcribe(ids[:-1] if ended else ids)
        self.said.append(Said("model", text))
        return text

    def finished(self, stop: StopReason, reward: float, parts: Mapping[str, float]) -> Episode:
        """The episode, scored."""
        routes = np.concatenate(self._routes) if self._routes else None
        return self._episode(stop, reward=reward, parts=dict(parts), routes=routes)

    def broken(self, stop: StopReason, fault: ContraflowError) -> Episode:
        """The episode as far as it got, never to be trained."""
        return self._episode(stop, reward=0.0, error=str(fault) or type(fault).__name__)

    def _append(self, role: Literal["prompt", "model", "env"], ids: list[int], logprobs: list[float]) -> None:
        start = len(self.tokens)
        self.tokens += ids
        self._trained += [role == "model"] * len(ids)
        self._logprobs += logprobs
        self._turns.append(Turn(role, start, len(self.tokens)))

    def _add_routes(self, routes_LMK: Routes) -> None:
        if len(routes_LMK) != len(self.tokens) - 1:
            raise EngineError(
                f"routes of {len(routes_LMK)} tokens for a sequence of {len(self.tokens)}; one fewer is due"
            )
        known = sum(len(rows) for rows in self._routes)
        self._routes.append(routes_LMK[known:])

    def _episode(self, stop: StopReason, **rest: Any) -> Episode:
        return Episode(
            seed=self.seed,
            tokens=np.array(self.tokens, np.int32),
            trained=np.array(self._trained, np.bool_),
            logprobs=np.array(self._logprobs, np.float32),
            spans=tuple(self._spans),
            turns=tuple(self._turns),
            stop=stop,
            **rest,
        )


def _check(completion: Completion) -> None:
    """Engines may be other programs: what they answer is trained on, so it is checked."""
    count = len(completion.tokens)
    if len(completion.logprobs) != count or not np.isfinite(completion.logprobs).all():
        raise EngineError(f"{count} tokens came with log-probabilities {completion.logprobs.tolist()}")
    ends = [0, *(span.end for span in completion.spans)]
    if [span.start for span in completion.spans] != ends[:-1] or ends[-1] != count:
        raise EngineError(f"{count} tokens came with version spans {completion.spans}, which do not cover them")
