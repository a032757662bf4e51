"""Exact cuts: killed and resumed at every step, an asynchronous run is the run that was never killed, bit for bit."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from contraflow.buffer.accounts import accounts
from contraflow.buffer.audit import audit
from contraflow.buffer.ledger import HANDED_BACK, on_path, reading, surviving
from contraflow.buffer.riding import alight
from contraflow.buffer.segments import Place, read_group
from contraflow.config import Recipe
from contraflow.errors import ConfigError, WorkerDied
from contraflow.loop import Loop
from contraflow.rollout.handover import is_open, sampled
from contraflow.runtime.inline import InlineRuntime
from contraflow.telemetry import read_journal
from contraflow.types import Group
from tests.cut_writer import space_in
from tests.test_loop import recipe_of, run, steps_of, until_step

STEPS = 7
NATIVE = {"kind": "native", "context_tokens": 48, "kv_tokens": 4096, "max_sequences": 32}
TOLD = ("step", "reward", "trained_tokens", "age_mean", "age_max", "loss", "grad_norm")  # of a step, that must be equal


def exact(model: Path, **sections: dict[str, Any]) -> Recipe:
    tree: dict[str, dict[str, Any]] = {
        "run": {"steps": STEPS, "eval_tasks": 0},
        "train": {"checkpoint_every": 1, "exact_checkpoints": True, "keep_checkpoints": 100},
        "rollout": {"continue_from": 1, "max_new_tokens": 12},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return recipe_of(model, **tree)


async def kill(loop: Loop, step: int, turns: int) -> None:
    """Everything dies `turns` turns of the loop after `step` steps are done: inside or outside of a cut."""
    await until_step(loop, step)
    for _ in range(turns):
        await asyncio.sleep(0)
    assert isinstance(loop.system.runtime, InlineRuntime)
    loop.system.runtime.kill("buffer")


def killed_everywhere(recipe: Recipe, folder: Path) -> int:
    """Kill the run after each of its steps in turn, resume it each time; gives how often it died.

    Some turns are few, so that the cut of that step is not written yet; others are in the middle of the next step.
    """
    deaths = 0
    for step in range(1, recipe.run.steps):
        turns = 23 * step % 71
        try:
            run(recipe, folder, resume=deaths > 0, meddle=lambda loop: kill(loop, step, turns))  # noqa: B023
        except WorkerDied:
            deaths += 1
    run(recipe, folder, resume=deaths > 0)
    return deaths


def groups_of(folder: Path) -> list[tuple[int, int, Group]]:
    """(step, group, payload) of everything trained on the surviving history, in the order of the takes."""
    with reading(folder) as db:
        (line,) = db.execute("SELECT max(line) FROM lines").fetchone()
        here = on_path(surviving(db, line)).replace("line =", "events.line =")
        rows = db.execute(
            "SELECT step, group_id, segment, start, length, digest FROM events JOIN payloads USING (group_id, attempt)"
            f" WHERE kind = 'taken' AND {here} ORDER BY step, id"
        ).fetchall()
    return [(step, group, read_group(folder, Place(*where))) for step, group, *where in rows]


def said(group: Group) -> list[tuple[Any, ...]]:
    """What was sampled in a group: tokens, log-probabilities, and the n of the version of every span."""
    return [
        (e.tokens.tolist(), e.logprobs.tolist(), [(s.version.n, s.start, s.end) for s in e.spans], e.stop, e.reward)
        for e in group.episodes
    ]


def partial_in_cuts(folder: Path, tmp: Path) -> list[int]:
    """Sampled tokens of unfinished episodes that each cut of a run holds, read from the cuts alone."""
    space, counts = space_in(folder / "checkpoints"), []
    for name in space.names():
        alight(space, space.manifest(name), tmp / name)
        with reading(tmp / name) as db:
            rows = db.execute(
                "SELECT segment, start, length, digest FROM (SELECT group_id, attempt, kind, reason, max(id) FROM"
                " events WHERE kind != 'refused' GROUP BY group_id) JOIN payloads USING (group_id, attempt)"
                " WHERE kind = 'waiting' AND reason = ?",
                (HANDED_BACK,),
            ).fetchall()
        parts = [read_group(tmp / name, Place(*where)) for where in rows]
        counts.append(sum(sampled(each) for part in parts for each in part.episodes if is_open(each)))
    return counts


def check_equal(recipe: Recipe, tmp: Path) -> None:
    run(recipe, tmp / "whole")
    assert killed_everywhere(recipe, tmp / "killed") == recipe.run.steps - 1
    partial = partial_in_cuts(tmp / "whole", tmp / "cuts")
    assert sum(count > 0 for count in partial) >= len(partial) // 2
    whole, again = groups_of(tmp / "whole"), groups_of(tmp / "killed")
    assert [(step, group) for step, group, _ in whole] == [(step, group) for step, group, _ in again]
    assert [said(group) for *_, group in whole] == [said(group) for *_, group in again]
    last = {record["step"]: record for record in steps_of(tmp / "killed")}
    for record in steps_of(tmp / "whole"):
        assert {key: record.get(key) for key in TOLD} == {key: last[record["step"]].get(key) for key in TOLD}
    weights = [stored_in(tmp / name) for name in ("whole", "killed")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert audit(tmp / "whole") == audit(tmp / "killed") == []


def stored_in(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and both moments in the newest cut of a run, by part and name."""
    space = space_in(folder / "checkpoints")
    manifest = space.manifest(space.names()[0])
    tensors = [part for part in manifest.parts if part.name.startswith("rank-") and not part.name.endswith("index")]
    read = {part.name: load(space.read(manifest, part)) for part in tensors}
    return {f"{part}/{name}": tensor for part, stored in read.items() for name, tensor in stored.items()}


LONG = {"name": "arithmetic", "options": {"kinds": [{"digits_a": 9, "digits_b": 9}]}}
CALCULATOR = {"env": {"name": "calculator"}, "rollout": {"max_turns": 3, "max_new_tokens": 24}}


@pytest.mark.parametrize("max_age", [1, 2])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"env": LONG, "rollout": {"concurrency": 5}}, id="scripted"),
        pytest.param({"engine": NATIVE}, id="native"),
        pytest.param({"engine": {**NATIVE, "kernels": "off"}}, id="native-torch"),
        pytest.param({"engine": {**NATIVE, "context_tokens": 96}, **CALCULATOR}, id="turns"),
    ],
)
def test_killed_and_resumed_at_every_step_a_run_is_the_run_in_one_go(
    tmp_path: Path, max_age: int, change: dict[str, Any]
) -> None:
    model = Path("builtin:tiny-moe")
    check_equal(exact(model, buffer={"max_age": max_age, "keep_payloads": "all"}, **change), tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"rollout": {"workers": 2, "concurrency": 3}}, id="workers"),
        pytest.param({"run": {"eval_tasks": 8, "eval_every": 2}}, id="looks"),
        pytest.param({"buffer": {"expiry": "repose"}}, id="repose", marks=pytest.mark.slow),
        pytest.param({"buffer": {"expiry": "mask"}}, id="mask", marks=pytest.mark.slow),
        pytest.param({"train": {"checkpoint_every": 3}}, id="seldom", marks=pytest.mark.slow),
        pytest.param({"engine": {"on_refresh": "recompute"}}, id="recompute", marks=pytest.mark.slow),
    ],
)
def test_whatever_else_goes_on(tmp_path: Path, change: dict[str, Any]) -> None:
    sections: dict[str, dict[str, Any]] = {"engine": NATIVE, "buffer": {"keep_payloads": "all"}}
    for name, section in change.items():
        sections[name] = {**sections.get(name, {}), **section}
    check_equal(exact(Path("builtin:tiny-moe"), **sections), tmp_path)


@pytest.mark.parametrize("told_to_leave", [False, True], ids=["dies", "leaves"])
def test_a_worker_that_goes_away_is_replaced_between_exact_cuts_and_nothing_is_lost(
    tmp_path: Path, told_to_leave: bool
) -> None:
    async def go(loop: Loop) -> None:
        runtime = loop.system.runtime
        assert isinstance(runtime, InlineRuntime)
        for step in (2, 4):
            await until_step(loop, step)
            (runtime.notice if told_to_leave else runtime.kill)("rollout-1")

    rollout = {"workers": 2, "grace_s": 0.001}
    recipe = exact(Path("builtin:tiny-moe"), engine=NATIVE, rollout=rollout, run={"steps": 8})
    assert run(recipe, tmp_path, meddle=go).steps == 8
    gone = [r["kind"] for r in read_journal(tmp_path / "metrics.jsonl") if r["kind"] in ("death", "drained")]
    assert gone == ["drained" if told_to_leave else "death"] * 2
    assert accounts(tmp_path).trained == 8 * 4
    assert audit(tmp_path) == []


def test_a_stop_between_cuts_cuts_there_and_the_run_goes_on_with_what_was_under_way(tmp_path: Path) -> None:
    async def stop(loop: Loop) -> None:
        await until_step(loop, 4)
        loop.stop()

    recipe = exact(Path("builtin:tiny-moe"), engine=NATIVE, train={"checkpoint_every": 3})
    stopped = run(recipe, tmp_path, meddle=stop)
    assert stopped.stopped
    assert accounts(tmp_path).cut == stopped.steps
    assert run(recipe, tmp_path, resume=True).steps == STEPS
    records = read_journal(tmp_path / "metrics.jsonl")
    resumed = [r["step"] for r in records if r["kind"] == "step"].index(stopped.steps)
    assert [r["step"] for r in records if r["kind"] == "step"] == list(range(STEPS))
    before = [r for r in records if r["kind"] == "step"][resumed]
    assert [r for r in records[: records.index(before)] if r["kind"] == "continued"]
    assert audit(tmp_path) == []


def test_a_run_cut_otherwise_can_go_on_with_exact_cuts_and_back(tmp_path: Path) -> None:
    model = Path("builtin:tiny-moe")
    for place, way in enumerate((False, True, False)):
        recipe = exact(model, engine=NATIVE, run={"steps": 4 * place + 4}, train={"exact_checkpoints": way})
        run(recipe, tmp_path, resume=place > 0)
    assert accounts(tmp_path).trained == 12 * 4
    assert audit(tmp_path) == []


def test_cuts_that_would_throw_everything_away_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.continue_from = 0: every cut would throw away"):
        exact(Path("builtin:tiny-moe"), rollout={"continue_from": 0})
