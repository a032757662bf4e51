"""One attempt at a task: prompt in, turns between model and environment, a score at the end.

Takes a task and what it is played with, gives an `Episode`; whatever breaks on the way is told in its `error`.
Token in, token out: what the model sampled is kept as sampled, never tokenised again. Cancelling aborts the request.
One that was begun elsewhere is played the same way, but that turns which were sampled there are not asked for again.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from contraflow import config
from contraflow.envs.draws import derive_seed
from contraflow.errors import ContraflowError, EngineError, ModelError, RewardError, TaskError
from contraflow.model.tokenizer import Tokenizer
from contraflow.rewards.base import Said, Transcript
from contraflow.rewards.model import Asked
from contraflow.rollout.draft import Draft, joined
from contraflow.rollout.engine import Engine
from contraflow.rollout.guard import Guard
from contraflow.types import Completion, Episode, Request, StopReason, Task

if TYPE_CHECKING:
    from contraflow.rollout.harness import Table


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
    table: "Table | None" = None  # where outside programs play, if they do
    asked: Asked | None = None  # the reward part that asks a process of its own, if there is one
    kind_by: str = ""  # the fact of a task that the buffer chooses by; empty: it wants every task


async def play(task: Task, stage: Stage, draft: Draft, *, key: str, group: str) -> Episode:
    """Play one episode of `task`, written into `draft`. Turn t is request `KEY/t` of `group`, sampled with a seed
    derived from (the draft's, t); turns that the draft recalls are said again to a new session.

    Never raises for what an environment, a reward or a refused request does: see `Episode.stop` and `Episode.error`.
    """
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


async def _converse(draft: Draft, task: Task, stage: Stage, *, key: str, group: str) -> StopReason:
    """Let model and environment take turns until one of them, or a limit, ends it."""
    limits = stage.limits
    if stage.table is not None:
        return await stage.table.converse(draft, task, stage, key=key, group=group)
    session = await stage.guard.open(task)
    draft.hear("prompt", task.prompt, _write(stage.tokenizer, "the prompt", task.prompt, special=True))
    left = limits.max_new_tokens
    for turn in range(limits.max_turns):
        if draft.is_halted():
            return StopReason.ABORTED
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
        completion = await take_turn(draft, request, stage)
        action = draft.say(completion, stage.tokenizer)
        if draft.is_halted():
            return StopReason.ABORTED
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


async def take_turn(draft: Draft, request: Request, stage: Stage) -> Completion:
    """The turn that `request` asks for; only what the draft does not recall is sampled."""
    known = draft.recall(request.stop_tokens)
    if known is not None:
        done = len(known.tokens)
        room = min(request.max_new_tokens, stage.limits.context_tokens - len(request.prompt)) - done
        if known.stop is StopReason.STOP:
            return known
        if room < 1:
            return msgspec.structs.replace(known, stop=StopReason.LENGTH)
        prompt = np.concatenate([request.prompt, known.tokens])
        request = msgspec.structs.replace(request, prompt=prompt, done=done, max_new_tokens=room)
    draft.asked = request.id
    rest = await stage.engine.generate(request)
    draft.asked = ""
    return rest if known is None else joined(known, rest)


def _write(tokenizer: Tokenizer, what: str, text: str, *, special: bool) -> list[int]:
    try:
        return tokenizer.encode(text, special=special)
    except ModelError as fault:
        raise TaskError(f"{what}: {fault}") from fault


def broken_episode(seed: int, fault: ContraflowError, stop: StopReason = StopReason.ENV_ERROR) -> Episode:
    """An episode of which nothing is left: its task could not be posed, or it was not finished in time."""
    return Draft(seed).broken(stop, fault)
