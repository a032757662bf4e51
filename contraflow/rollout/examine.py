"""Held-out tasks answered by an engine: k samples of each, scored; for a look inside a run and for `contraflow eval`.

Takes an `Exam` and a stage, gives episodes by task; measures of them by task; and a look's report. All tokens are of
one version, or it is an error. Does not choose versions or load models.
Shape letters: N tasks, K samples, M measures.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec
import numpy as np

from contraflow.algo.estimates import Float64, intervals, pass_at_k
from contraflow.envs.base import Split
from contraflow.envs.draws import derive_seed
from contraflow.errors import EngineError, TaskError
from contraflow.rollout.draft import Draft
from contraflow.rollout.episode import Stage, broken_episode, play
from contraflow.rollout.report import EvalReport
from contraflow.types import Episode, Task, Version

Told = Callable[[str, Task], AbstractContextManager[None]]  # around the answers to a task, which have this group's name
Answers = list[tuple[Episode, ...]]  # N of K


class Exam(msgspec.Struct, frozen=True, kw_only=True):
    """Which tasks, and how often each is answered. Greedy answers are all the same: `temperature` 0 wants 1 sample."""

    first: int = 0
    count: int
    samples: int = 1
    temperature: float = 0.0
    split: Split = "test"
    seed: int = 0
    at_once: int = 256  # answers asked for at a time


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Measures of each task: `values_NM` float64, `names` of its columns. A failed episode earns 0 of everything."""

    names: tuple[str, ...]
    values_NM: Float64


async def examine(
    exam: Exam,
    stage: Stage,
    *,
    key: str,
    told: Told = lambda group, task: nullcontext(),
    tell: Callable[[int], None] = lambda answers: None,
) -> Answers:
    """Answer every task `exam.samples` times, as requests KEY/...; `tell` hears of each task's answers.

    A sample's noise is a function of (seed, task, sample). Raises: EngineError when tokens of two versions are met.
    """
    limits = msgspec.structs.replace(stage.limits, temperature=exam.temperature, routes=False)
    sampled = dataclasses.replace(stage, limits=limits)
    turns = asyncio.Semaphore(exam.at_once)

    async def sample(task: Task, index: int, place: int) -> Episode:
        seed, group = derive_seed(exam.seed, "look", index, place), f"{key}/{index}"
        async with turns:
            return await play(task, sampled, Draft(seed), key=f"{group}/{place}", group=group)

    async def answer(index: int) -> tuple[Episode, ...]:
        async with turns:
            try:
                task = await stage.guard.task(exam.split, index)
            except TaskError as fault:
                return (broken_episode(derive_seed(exam.seed, "look", index, 0), fault),) * exam.samples
        with told(f"{key}/{index}", task):
            episodes = await asyncio.gather(*(sample(task, index, place) for place in range(exam.samples)))
        tell(exam.samples)
        return tuple(episodes)

    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(answer(index)) for index in range(exam.first, exam.first + exam.count)]
    answers = [one.result() for one in asked]
    versions = {span.version for episodes in answers for episode in episodes for span in episode.spans}
    if len(versions) > 1:
        raise EngineError(f"answers of one evaluation are of versions {', '.join(map(str, sorted(versions)))}")
    return answers


def measure(answers: Answers, ks: Sequence[int]) -> Measured:
    """pass@k for each of `ks`, the mean reward, and the mean of each part of it, task by task.

    An answer is right when the part `correct` is at least 1. Raises ConfigError for a k above the samples of a task.
    """
    right_NK = np.array([[episode.parts.get("correct", 0.0) >= 1 for episode in one] for one in answers], np.bool_)
    samples = right_NK.shape[1] if answers else max(ks)
    names = sorted({name for one in answers for episode in one for name in episode.parts})
    columns = {f"pass@{k}": pass_at_k(right_NK.sum(1), samples=samples, k=k) for k in ks} if answers else {}
    columns["reward"] = np.array([np.mean([episode.reward for episode in one]) for one in answers])
    for name in names:
        columns[name] = np.array([np.mean([episode.parts.get(name, 0.0) for episode in one]) for one in answers])
    return Measured(names=tuple(columns), values_NM=np.stack(list(columns.values()), 1))


def judge(answers: Answers, exam: Exam, *, serving: Version) -> EvalReport:
    """The report of a look; `serving` is what was served when it began."""
    measured = measure(answers, sorted({1, exam.samples}))
    found = intervals(measured.values_NM, seed=exam.seed) if answers else []
    by_name = dict(zip(measured.names, found, strict=False))
    whole = [episode for one in answers for episode in one]
    parts = {name: by_name[name].mean for name in sorted({part for episode in whole for part in episode.parts})}
    return EvalReport(
        version=next((span.version for episode in whole for span in episode.spans), serving),
        first=exam.first,
        count=len(answers),
        failed=sum(episode.failed for episode in whole),
        accuracy=parts.get("correct", 0.0),
        reward=by_name["reward"].mean if answers else 0.0,
        parts=parts,
        samples=exam.samples,
        temperature=exam.temperature,
        intervals={name: (round(one.low, 6), round(one.high, 6)) for name, one in by_name.items()},
        passed={k: by_name[f"pass@{k}"].mean for k in sorted({1, exam.samples}) if answers},
    )
