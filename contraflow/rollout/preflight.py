"""Before a run: do the environment, the rewards, the tokenizer and the limits of a recipe fit together?

Plays the reference answers of a few tasks of both splits without a model. Whatever does not fit is a `ConfigError`
naming the task, so that a broken environment is refused before anything is started.
"""

from pathlib import Path
from typing import get_args

from contraflow.config import Recipe
from contraflow.envs.base import Env, Split
from contraflow.envs.registry import make_env
from contraflow.errors import ConfigError, ModelError, RewardError, TaskError
from contraflow.model.tokenizer import Tokenizer
from contraflow.rewards.base import Said, Transcript
from contraflow.rewards.mix import Mix
from contraflow.rewards.model import MODEL, Unasked
from contraflow.rewards.registry import open_mix
from contraflow.rollout.episode import Limits
from contraflow.rollout.guard import Guard, make_guard
from contraflow.types import StopReason, Task


async def check_tasks(recipe: Recipe, folder: Path, *, tasks: int = 8) -> None:
    """Check the first `tasks` tasks of each split against what the recipe will do with them.

    Raises: ConfigError (unknown or broken environment or reward, a task that cannot be played), ModelError (tokenizer).
    """
    model = Unasked(recipe.reward.model) if MODEL in recipe.reward.parts else None
    env, mix = make_env(recipe.env.name, recipe.env.options), open_mix(recipe.reward, model=model)
    tokenizer, limits = Tokenizer.load(folder), Limits.of(recipe.rollout, recipe.engine)
    for task in await check_reference(env, mix, tasks, deadline_s=recipe.env.step_deadline_s):
        _check_room(task, tokenizer, limits)


async def check_reference(env: Env, mix: Mix, n: int, *, deadline_s: float) -> list[Task]:
    """Let the first `n` tasks of each split grade their own reference answers; gives the tasks.

    Raises: ConfigError when one breaks, the episode does not end, or the marks are less than full.
    """
    guard = make_guard(env, mix, deadline_s=deadline_s, context_tokens=1 << 20)
    try:
        return [await _grade_own(guard, env.name, split, index) for split in get_args(Split) for index in range(n)]
    finally:
        guard.close()


async def _grade_own(guard: Guard, name: str, split: Split, index: int) -> Task:
    try:
        task = await guard.task(split, index)
        observation = await guard.step(await guard.open(task), task.reference)
        turns = (Said("prompt", task.prompt), Said("model", task.reference), Said("env", observation.text))
        _, parts = await guard.score(task, Transcript(turns, StopReason.STOP))
    except (TaskError, RewardError) as fault:
        raise ConfigError(f"env {name!r}, task {split}/{index}: {fault}") from fault
    own = f"env {name!r}, task {split}/{index}: its own reference {task.reference!r}"
    if not observation.done:
        raise ConfigError(f"{own} does not end the episode")
    if parts["correct"] != 1:
        raise ConfigError(f"{own} is graded {parts['correct']:g}, not 1")
    return task


def _check_room(task: Task, tokenizer: Tokenizer, limits: Limits) -> None:
    try:
        prompt, answer = tokenizer.encode(task.prompt, special=True), tokenizer.encode(task.reference)
    except ModelError as fault:
        raise ConfigError(f"task {task.key}: {fault}; choose another model, or options that it can write") from fault
    if len(prompt) + len(answer) >= limits.context_tokens:
        raise ConfigError(
            f"task {task.key}: prompt and answer take {len(prompt)} + {len(answer)} tokens and an end token; "
            f"engine.context_tokens = {limits.context_tokens} is too few"
        )
    if len(answer) >= limits.max_new_tokens:
        raise ConfigError(
            f"task {task.key}: its answer takes {len(answer)} tokens and an end token; "
            f"rollout.max_new_tokens = {limits.max_new_tokens} is too few"
        )
