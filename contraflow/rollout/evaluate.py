"""`contraflow eval`: models answer held-out tasks; pass@k, the reward and its parts, each with its interval.

Takes a recipe (what is asked, how it is scored, sizes of the engine), folders and how often to ask; gives numbers that
travel as JSON, and a small table. Uses the native engine in this process. Does not train.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from contraflow.algo.estimates import Interval, intervals, paired
from contraflow.config import Parallel, Recipe
from contraflow.envs.registry import make_env
from contraflow.errors import ConfigError
from contraflow.model.builtin import model_folder
from contraflow.model.folder import load_folder
from contraflow.model.tokenizer import Tokenizer
from contraflow.parallel.devices import DTYPES, check_device, device_of, enter_device, visible_gpus
from contraflow.rewards.registry import open_mix
from contraflow.rollout.episode import Limits, Stage
from contraflow.rollout.examine import Answers, Exam, Measured, examine, measure
from contraflow.rollout.guard import make_guard
from contraflow.rollout.native import NativeEngine
from contraflow.rollout.open_table import open_table
from contraflow.rollout.preflight import check_tasks
from contraflow.telemetry import Clock
from contraflow.types import Version


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What one model earned. `by_task` holds each measure task by task, in the order of the tasks."""

    model: str
    failed: int  # episodes
    tokens: float  # sampled, per answer
    measures: dict[str, Interval]
    by_task: dict[str, list[float]]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One model, or two on the same tasks with the same noise, and what the second has more than the first."""

    exam: Exam
    results: list[Result]
    differences: dict[str, Interval] = {}

    def lines(self) -> list[str]:
        """The table, for people."""
        exam = self.exam
        how = "greedy" if exam.temperature == 0 else f"{exam.samples} samples each at temperature {exam.temperature:g}"
        lines = [f"{exam.count} {exam.split} tasks, {how}; 95 % intervals: bootstrap over tasks"]
        heads = [_head(Path(result.model)) for result in self.results] + ["difference"] * bool(self.differences)
        lines.append("".join([f"{'':16}", *(f"{head[-24:]:>26}" for head in heads)]))
        for name in self.results[0].measures:
            cells = [result.measures[name].told() for result in self.results]
            cells += [self.differences[name].told()] if self.differences else []
            lines.append("".join([f"{name:16}", *(f"{cell:>26}" for cell in cells)]))
        lines.append("".join([f"{'tokens/answer':16}", *(f"{result.tokens:26.1f}" for result in self.results)]))
        return lines + [f"{r.model}: {r.failed} episodes failed and count as wrong" for r in self.results if r.failed]


class Subject(NamedTuple):
    """Who is examined. `tell` hears of answers as they come."""

    folder: Path
    clock: Clock
    tell: Callable[[int], None]


def find_model(place: Path) -> Path:
    """The model of a folder: itself, `builtin:NAME`, or RUN/model of a run that came to its end.

    Raises: ConfigError, ModelError.
    """
    if (place / "recipe.toml").is_file() and not (place / "config.json").is_file():
        if not (place / "model" / "config.json").is_file():
            raise ConfigError(f"{place} is a run that has no model yet; contraflow export {place} FOLDER writes one")
        return place / "model"
    return model_folder(str(place))


def evaluate(recipe: Recipe, exam: Exam, ks: Sequence[int], subjects: Sequence[Subject]) -> Report:
    """Examine one model, or two in pairs. Raises: ConfigError, ModelError before anything is asked; EngineError."""
    if exam.count < 1:
        raise ConfigError(f"{exam.count} tasks: an evaluation needs at least 1")
    if exam.temperature == 0 and exam.samples > 1:
        raise ConfigError(f"{exam.samples} greedy answers to a task are all the same: use 1 sample or a temperature")
    if wrong := [k for k in ks if not 1 <= k <= exam.samples]:
        raise ConfigError(f"pass@{wrong[0]} of {exam.samples} samples a task: k has to be in [1, {exam.samples}]")
    check_device("engine.device", recipe.engine.device, ranks=1, visible=visible_gpus(recipe.engine.device))
    found = [asyncio.run(_answers(recipe, exam, subject)) for subject in subjects]
    measured = [measure(answers, ks) for answers in found]
    results = [
        _result(subject.folder, answers, values, exam.seed)
        for subject, answers, values in zip(subjects, found, measured, strict=True)
    ]
    return Report(exam=exam, results=results, differences=_differences(measured, exam.seed))


async def _answers(recipe: Recipe, exam: Exam, subject: Subject) -> Answers:
    await check_tasks(recipe, subject.folder)
    section = recipe.engine.model_copy(update={"kind": "native", "parallel": Parallel(), "offload": "none"})
    device = device_of(section.device)
    enter_device(device)
    decoder = load_folder(subject.folder, dtype=DTYPES[section.compute], device=device)
    engine = NativeEngine(decoder, section, clock=subject.clock, version=Version(0, 0))
    world = make_env(recipe.env.name, recipe.env.options)
    guard = make_guard(
        world,
        open_mix(recipe.reward),
        deadline_s=recipe.env.step_deadline_s,
        context_tokens=section.context_tokens,
    )
    limits = Limits.of(recipe.rollout, section)
    wait_s = recipe.env.step_deadline_s
    table = open_table(world, subject.folder, rollout=recipe.rollout, deadline_s=wait_s, sign=None)
    stage = Stage(engine=engine, tokenizer=Tokenizer.load(subject.folder), guard=guard, limits=limits, table=table)
    try:
        return await examine(exam, stage, key="eval", tell=subject.tell)
    finally:
        if table is not None:
            await table.close()
        await engine.close()
        guard.close()


def _result(folder: Path, answers: Answers, measured: Measured, seed: int) -> Result:
    episodes = [episode for one in answers for episode in one]
    columns = measured.values_NM.T.tolist()
    return Result(
        model=str(folder),
        failed=sum(episode.failed for episode in episodes),
        tokens=sum(int(episode.trained.sum()) for episode in episodes) / len(episodes),
        measures=dict(zip(measured.names, intervals(measured.values_NM, seed=seed), strict=True)),
        by_task=dict(zip(measured.names, columns, strict=True)),
    )


def _differences(measured: Sequence[Measured], seed: int) -> dict[str, Interval]:
    if len(measured) < 2:
        return {}
    before, after = measured
    if before.names != after.names:
        raise ConfigError(
            f"the two models have other measures: {before.names} and {after.names}; did all answers fail?"
        )
    return dict(zip(before.names, paired(before.values_NM, after.values_NM, seed=seed), strict=True))


def _head(model: Path) -> str:
    """What a column is called: a run's models are all called `model`, so the run's own name."""
    return model.parent.name if model.name == "model" and model.parent.name else model.name
