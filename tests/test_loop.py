"""The whole loop, inline: real buffer, trainer and weights; the scripted engine answers, so no model has to learn."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from contraflow.buffer.accounts import accounts
from contraflow.buffer.audit import audit
from contraflow.config import Recipe, check_recipe
from contraflow.errors import CheckpointError, ConfigError, DeadlineExceeded, RunFolderError, TaskError, WorkerDied
from contraflow.loop import Loop, Outcome
from contraflow.rollout.worker import RolloutWorker
from contraflow.run import run_recipe
from contraflow.runtime.inline import InlineRuntime
from contraflow.system import check_proof, open_system
from contraflow.telemetry import Journal, read_journal
from contraflow.view.base import Snapshot
from tests.cut_writer import space_in
from tests.train.cutting import file_of

STEPS = 10


def recipe_of(model: Path, **sections: dict[str, Any]) -> Recipe:
    tree: dict[str, dict[str, Any]] = {
        "run": {"steps": STEPS, "eval_every": 5, "eval_tasks": 32, "stall_s": 20.0},
        "model": {"folder": str(model)},
        "engine": {"kind": "scripted"},
        "rollout": {"episodes": 4, "concurrency": 6},
        "buffer": {"groups_per_step": 4, "no_signal": "keep"},
        "train": {"checkpoint_every": 4},
        "runtime": {"kind": "inline"},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return check_recipe(tree)


class Ticks:
    """A clock that moves by itself: one millisecond a look, the same every run."""

    def __init__(self) -> None:
        self._count = itertools.count()

    def __call__(self) -> float:
        return next(self._count) / 1000


class Silent:
    """A view that keeps the last snapshot."""

    last: Snapshot | None = None

    def show(self, snapshot: Snapshot) -> None:
        self.last = snapshot

    def end(self, outcome: str) -> None:
        """Nothing to draw."""


Meddle = Callable[[Loop], Awaitable[None]]


def run(recipe: Recipe, folder: Path, *, resume: bool = False, meddle: Meddle | None = None) -> Outcome:
    """Run a recipe; `meddle` runs beside the loop."""

    async def main() -> Outcome:
        async with open_system(recipe, folder, resume=resume, clock=Ticks()) as system:
            journal = Journal(folder / "metrics.jsonl")
            loop = Loop(system, recipe, journal=journal, clock=Ticks())
            meddling = asyncio.ensure_future(meddle(loop)) if meddle else None
            try:
                return await loop.run()
            finally:
                journal.close()
                if meddling:
                    await meddling

    return asyncio.run(main())


def parts_of(folder: Path) -> dict[str, str]:
    """Digests of what the trainer put into the newest cut of a run."""
    space = space_in(folder / "checkpoints")
    manifest = space.manifest(space.names()[0])
    return {part.name: part.sha256 for part in manifest.parts if part.name.startswith(("rank", "model"))}


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [record for record in read_journal(folder / "metrics.jsonl") if record["kind"] == "step"]


async def until_step(loop: Loop, step: int) -> None:
    async with loop.versions.changed:
        await loop.versions.changed.wait_for(lambda: loop.progress.steps >= step)


def test_reward_rises_and_every_group_is_accounted_for(tiny_moe: Path, tmp_path: Path) -> None:
    outcome = run(recipe_of(tiny_moe), tmp_path)
    steps = steps_of(tmp_path)
    looks = [r["accuracy"] for r in read_journal(tmp_path / "metrics.jsonl") if r["kind"] == "eval"]
    assert (outcome.steps, outcome.accuracy, outcome.stopped) == (STEPS, looks[-1], False)
    assert Path(outcome.model, "config.json").is_file()
    assert looks[-1] > looks[0] + 0.2
    assert [step["step"] for step in steps] == list(range(STEPS))
    assert max(step["age_max"] for step in steps) <= 2
    totals = accounts(tmp_path)
    assert totals.trained == totals.final == STEPS * 4
    assert totals.posed == totals.trained + sum(totals.dropped.values()) + totals.held


def test_the_same_seed_gives_the_same_run_bit_for_bit(tiny_moe: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(recipe_of(tiny_moe), tmp_path / name)
    a, b = (parts_of(tmp_path / name) for name in ("a", "b"))
    assert a == b
    assert (tmp_path / "a/episodes.jsonl").read_bytes() == (tmp_path / "b/episodes.jsonl").read_bytes()


def test_another_seed_gives_another_run(tiny_moe: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        run(recipe_of(tiny_moe, run={"seed": seed, "steps": 2}), tmp_path / str(seed))
    assert (tmp_path / "0/episodes.jsonl").read_bytes() != (tmp_path / "1/episodes.jsonl").read_bytes()


def test_max_age_zero_is_the_synchronous_trainer(tiny_moe: Path, tmp_path: Path) -> None:
    run(recipe_of(tiny_moe, buffer={"max_age": 0}, run={"steps": 4}), tmp_path)
    assert [(step["age_mean"], step["age_max"]) for step in steps_of(tmp_path)] == [(0.0, 0)] * 4


@pytest.mark.parametrize("max_age", [0, 2])
def test_pools_that_take_turns_on_one_device_give_the_same_run(tiny_moe: Path, tmp_path: Path, max_age: int) -> None:
    native = {"kind": "native", "context_tokens": 32, "kv_tokens": 2048, "max_sequences": 32}
    for name, keep in (("apart", "none"), ("turns", "all")):
        recipe = recipe_of(
            tiny_moe,
            engine={**native, "offload": keep},
            train={"offload": keep},
            buffer={"max_age": max_age},
            run={"steps": 3, "eval_every": 2, "eval_tasks": 8},
        )
        run(recipe, tmp_path / name)
    apart, turns = (parts_of(tmp_path / name) for name in ("apart", "turns"))
    records = read_journal(tmp_path / "turns/metrics.jsonl")
    assert [record["kind"] for record in records if record["kind"] in ("rest", "step", "wake")] == [
        "rest", "wake", "step",
    ] * 3  # fmt: skip
    assert all(record["bytes"] > 100_000 for record in records if record["kind"] == "rest")
    if max_age == 0:  # with nothing in flight the turns change no order, and so not a bit
        assert apart == turns
    assert accounts(tmp_path / "turns").trained == 3 * 4


@pytest.mark.parametrize("expiry", ["hold", "mask", "repose"])
def test_no_policy_trains_a_token_that_is_too_old(tiny_moe: Path, tmp_path: Path, expiry: str) -> None:
    recipe = recipe_of(tiny_moe, buffer={"expiry": expiry, "max_age": 1}, rollout={"concurrency": 3})
    run(recipe, tmp_path)
    assert max(step["age_max"] for step in steps_of(tmp_path)) <= 1


def test_a_curriculum_leaves_tasks_out_unsampled_and_accounts_stay_exact(tiny_moe: Path, tmp_path: Path) -> None:
    section = {"by": "kind", "low": 2.0, "high": 3.0, "keep": 0.5, "least": 2}  # nothing is ever solved that well
    run(recipe_of(tiny_moe, run={"steps": 4}, buffer={"curriculum": section}), tmp_path)
    seen = accounts(tmp_path)
    assert seen.trained == 4 * 4
    assert seen.dropped["curriculum"] > 4
    assert seen.posed == seen.trained + sum(seen.dropped.values()) + seen.held
    assert audit(tmp_path) == []


def test_a_curriculum_by_a_fact_that_tasks_do_not_have_ends_the_run_with_those_they_have(
    tiny_moe: Path, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=r"has no fact 'size'.*it has: carries, format, kind"):
        run(recipe_of(tiny_moe, buffer={"curriculum": {"by": "size"}}), tmp_path)


def test_groups_without_signal_are_dropped_and_counted(tiny_moe: Path, tmp_path: Path) -> None:
    run(recipe_of(tiny_moe, buffer={"no_signal": "drop"}), tmp_path)
    assert accounts(tmp_path).dropped["no_signal"] > 0
    assert accounts(tmp_path).trained == STEPS * 4


def test_a_batch_of_equal_rewards_still_publishes_the_next_version(tiny_moe: Path, tmp_path: Path) -> None:
    run(recipe_of(tiny_moe, reward={"parts": {"format": 1.0}}, run={"steps": 3}), tmp_path)
    assert [(step["applied"], step["updates"]) for step in steps_of(tmp_path)] == [(True, 0)] * 3


def test_two_rollout_workers_share_the_work(tiny_moe: Path, tmp_path: Path) -> None:
    run(recipe_of(tiny_moe, rollout={"workers": 2}), tmp_path)
    refreshed = {r["worker"] for r in read_journal(tmp_path / "metrics.jsonl") if r["kind"] == "refresh"}
    assert refreshed == {"rollout-0", "rollout-1"}
    assert max(step["age_max"] for step in steps_of(tmp_path)) <= 2


def test_a_dead_rollout_worker_is_replaced_and_its_groups_posed_again(tiny_moe: Path, tmp_path: Path) -> None:
    async def kill(loop: Loop) -> None:
        await until_step(loop, 3)
        assert isinstance(loop.system.runtime, InlineRuntime)
        loop.system.runtime.kill("rollout-0")

    outcome = run(recipe_of(tiny_moe), tmp_path, meddle=kill)
    totals = accounts(tmp_path)
    assert outcome.steps == STEPS
    assert totals.trained == STEPS * 4
    assert totals.reposed.get("lost", 0) > 0
    assert [r["worker"] for r in read_journal(tmp_path / "metrics.jsonl") if r["kind"] == "death"] == ["rollout-0"]


@pytest.mark.parametrize("replace", [True, False])
def test_a_worker_told_to_leave_is_drained_and_replaced_if_asked_and_nothing_is_lost(
    tiny_moe: Path, tmp_path: Path, replace: bool
) -> None:
    async def notice(loop: Loop) -> None:
        await until_step(loop, 3)
        assert isinstance(loop.system.runtime, InlineRuntime)
        loop.system.runtime.notice("rollout-1")

    recipe = recipe_of(tiny_moe, rollout={"workers": 2, "replace": replace, "grace_s": 5.0}, run={"steps": 20})
    assert run(recipe, tmp_path, meddle=notice).steps == 20
    records = read_journal(tmp_path / "metrics.jsonl")
    (drained,) = [record for record in records if record["kind"] == "drained"]
    assert (drained["worker"], drained["fault"]) == ("rollout-1", "")
    after = records[records.index(drained) :]
    assert ("rollout-1" in {r["worker"] for r in after if r["kind"] == "refresh"}) == replace
    assert not [record for record in records if record["kind"] == "death"]
    totals = accounts(tmp_path)
    assert totals.trained == totals.final == 20 * 4
    assert totals.posed == totals.trained + sum(totals.dropped.values()) + totals.held


def test_what_a_leaving_worker_has_under_way_is_finished_by_another_from_where_it_was(
    tiny_moe: Path, tmp_path: Path
) -> None:
    async def notice(loop: Loop) -> None:
        await until_step(loop, 2)
        while not (await loop.system.rollouts["rollout-1"].call(5.0, RolloutWorker.report)).engine.running:
            pass
        assert isinstance(loop.system.runtime, InlineRuntime)
        loop.system.runtime.notice("rollout-1")

    recipe = recipe_of(
        tiny_moe,
        engine={"kind": "native", "context_tokens": 32, "kv_tokens": 2048, "max_sequences": 32},
        rollout={"workers": 2, "grace_s": 0.001, "continue_from": 1},
        run={"steps": 6, "eval_tasks": 0},
    )
    assert run(recipe, tmp_path, meddle=notice).steps == 6
    records = read_journal(tmp_path / "metrics.jsonl")
    (drained,) = [record for record in records if record["kind"] == "drained"]
    assert drained["handed_back"] > 0
    assert sum(record["tokens"] for record in records if record["kind"] == "continued") > 0
    assert max(step["age_max"] for step in steps_of(tmp_path)) <= 2
    assert accounts(tmp_path).trained == 6 * 4
    assert audit(tmp_path) == []


def test_a_notice_to_the_trainer_ends_the_run_with_a_cut(tiny_moe: Path, tmp_path: Path) -> None:
    async def notice(loop: Loop) -> None:
        await until_step(loop, 3)
        assert isinstance(loop.system.runtime, InlineRuntime)
        loop.system.runtime.notice("trainer-0")

    outcome = run(recipe_of(tiny_moe, run={"steps": 50}), tmp_path, meddle=notice)
    assert outcome.stopped
    assert accounts(tmp_path).cut == outcome.steps < 50


def test_a_dead_buffer_ends_the_run_by_name_and_it_resumes(tiny_moe: Path, tmp_path: Path) -> None:
    async def kill(loop: Loop) -> None:
        await until_step(loop, 6)
        assert isinstance(loop.system.runtime, InlineRuntime)
        loop.system.runtime.kill("buffer")

    with pytest.raises(WorkerDied) as death:
        run(recipe_of(tiny_moe), tmp_path, meddle=kill)
    assert death.value.worker == "buffer"
    assert run(recipe_of(tiny_moe), tmp_path, resume=True).steps == STEPS
    totals = accounts(tmp_path)
    assert (totals.line, totals.trained, totals.final) == (1, STEPS * 4, STEPS * 4)


@pytest.mark.parametrize("max_age", [0, 2])
def test_steps_that_a_crash_undid_are_done_again_bit_for_bit(tiny_moe: Path, tmp_path: Path, max_age: int) -> None:
    """Killed at step 7, with cuts at 4 and 8: the cut at 8 holds steps 4, 5 and 6 twice trained on the same groups."""

    async def kill(loop: Loop) -> None:
        await until_step(loop, 7)
        assert isinstance(loop.system.runtime, InlineRuntime)
        loop.system.runtime.kill("buffer")

    recipe = recipe_of(tiny_moe, buffer={"max_age": max_age}, run={"eval_tasks": 0})
    with pytest.raises(WorkerDied):
        run(recipe, tmp_path / "killed", meddle=kill)
    run(recipe, tmp_path / "killed", resume=True)
    told = steps_of(tmp_path / "killed")
    for step in (4, 5, 6):
        first, again = [
            {key: record[key] for key in ("reward", "trained_tokens", "age_max", "loss", "grad_norm") if key in record}
            for record in told
            if record["step"] == step
        ]
        assert first == again
        assert "loss" in first
    totals = accounts(tmp_path / "killed")
    assert (totals.trained, totals.superseded) == (STEPS * 4, 3 * 4)
    assert audit(tmp_path / "killed") == []


def test_a_stop_ends_cleanly_and_the_run_goes_on_from_there(tiny_moe: Path, tmp_path: Path) -> None:
    async def stop(loop: Loop) -> None:
        await until_step(loop, 2)
        loop.stop()

    recipe = recipe_of(tiny_moe, run={"steps": 20})
    outcome = run(recipe, tmp_path, meddle=stop)
    assert outcome.stopped
    assert 2 <= outcome.steps < 20
    resumed = run(recipe, tmp_path, resume=True)
    assert (resumed.steps, resumed.stopped) == (20, False)
    assert [step["step"] for step in steps_of(tmp_path)] == list(range(20))
    assert accounts(tmp_path).trained == 20 * 4


@pytest.mark.parametrize("section", ["train", "engine"])
def test_a_gpu_that_is_not_there_is_refused_before_anything_is_made(
    tiny_moe: Path, tmp_path: Path, section: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.device = 'cuda:999' takes GPU 999"):
        run(recipe_of(tiny_moe, **{section: {"device": "cuda:999"}}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("train", "engine"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_version_is_proven_in_the_engines_precision_whatever_the_trainers(
    tiny_moe: Path, tmp_path: Path, train: str, engine: str
) -> None:
    recipe = recipe_of(
        tiny_moe,
        engine={"kind": "native", "compute": engine, "context_tokens": 32, "kv_tokens": 512, "max_sequences": 16},
        train={"compute": train},
        run={"steps": 2, "eval_every": 2, "eval_tasks": 2},
        buffer={"groups_per_step": 2},
        weights={"probe_tolerance": 1e-6},  # bf16 differs from fp32 by thousands of that
    )
    outcome = run(recipe, tmp_path)
    assert (outcome.steps, len(steps_of(tmp_path))) == (2, 2)


def refreshes_of(model: Path, folder: Path, dtype: str, steps: int) -> list[dict[str, Any]]:
    """Refreshes of a run whose weights travel in `dtype` and as deltas; each was proven and served."""
    recipe = recipe_of(
        model,
        engine={"kind": "native", "compute": "bfloat16", "context_tokens": 32, "kv_tokens": 512, "max_sequences": 16},
        train={"learning_rate": 1e-6, "warmup_updates": 1},
        run={"steps": steps, "eval_every": 2, "eval_tasks": 2},
        buffer={"groups_per_step": 2},
        weights={"carrier": "blob", "dtype": dtype, "full_every": 3, "probe_tolerance": 1e-6},
    )
    assert run(recipe, folder).steps == steps
    seen = [record for record in read_journal(folder / "metrics.jsonl") if record["kind"] == "refresh"]
    assert all(record["served"] for record in seen)
    return seen


def test_weights_that_travel_in_bf16_and_as_deltas_are_proven_and_move_few_bytes(
    tiny_moe: Path, tmp_path: Path
) -> None:
    seen = refreshes_of(tiny_moe, tmp_path, "bfloat16", 4)
    ways = [record["via"] for record in seen]
    assert ways == ["whole", "1 delta upon 0.0", "1 delta upon 0.1", "whole", "1 delta upon 0.3"]
    for record in seen:
        if record["via"] != "whole":
            assert record["moved"] < record["bytes"] / 2


def test_replayed_experts_of_a_synchronous_run_are_those_the_trainer_would_choose(
    tiny_moe: Path, tmp_path: Path
) -> None:
    """Engine and trainer have the same weights and the same arithmetic: a difference would be an error of carriage."""
    recipe = recipe_of(
        tiny_moe,
        run={"steps": 3, "eval_every": 3},
        engine={"kind": "native", "routes": True, "context_tokens": 48},
        buffer={"max_age": 0},
        train={"routing": "r3", "missing_routes": "refuse"},
        loss={"balance_weight": 0.01},  # so that groups without signal are trained too
    )
    run(recipe, tmp_path)
    for step in steps_of(tmp_path):
        assert step["applied"]
        assert step["replayed_tokens"] > step["trained_tokens"]  # prompts are replayed too
        assert step["routes_differ"] == step["first_differs"] == [0.0] * len(step["routes_differ"])
        assert (step["routes_missing"], step["routes_dropped"]) == (0, 0)


def test_experts_that_travel_in_float8_are_proven_as_the_engine_holds_them_and_told_apart(
    tiny_moe: Path, tmp_path: Path
) -> None:
    seen = refreshes_of(tiny_moe, tmp_path, "float8", 2)
    assert [record["via"] for record in seen] == ["whole", "1 delta upon 0.0", "1 delta upon 0.1"]
    for record in seen:
        assert record["differs"] == "experts' weights are rounded to float8 in the engine, and not in the trainer"


ALIKE: dict[str, Any] = {"parallel": {"dp": 2, "ep": 2}}


@pytest.mark.parametrize(
    ("engine", "train", "says"),
    [
        ({}, {"parallel": {"pp": 2}}, "train.parallel.pp = 2"),
        ({"parallel": {"tp": 2}}, ALIKE, "engine.parallel.tp = 2 and train.parallel.tp = 1"),
        ({"device": "cuda"}, {}, "engine.device = 'cuda' and train.device = 'cpu'"),
        (ALIKE, {}, ""),
        ({"device": "cuda:1"}, {"device": "cuda"}, ""),
        ({"parallel": {"tp": 2}}, {"parallel": {"tp": 2, "ep": 2}}, ""),
    ],
)
def test_a_proof_in_bf16_that_would_fail_by_rounding_is_refused_beforehand(
    engine: dict[str, Any], train: dict[str, Any], says: str
) -> None:
    def recipe(compute: str, tolerance: float) -> Recipe:
        return check_recipe(
            {"engine": {**engine, "compute": compute}, "train": train, "weights": {"probe_tolerance": tolerance}}
        )

    check_proof(recipe("float32", 1e-3))
    check_proof(recipe("bfloat16", 0.05))
    if not says:
        return check_proof(recipe("bfloat16", 1e-3))
    with pytest.raises(ConfigError) as fault:
        check_proof(recipe("bfloat16", 1e-3))
    assert says in str(fault.value)
    assert "weights.probe_tolerance = 0.001" in str(fault.value)
    return None


def test_a_run_ends_early_once_it_is_good_enough(tiny_moe: Path, tmp_path: Path) -> None:
    outcome = run(recipe_of(tiny_moe, run={"stop_at_accuracy": 0.3, "steps": 100}), tmp_path)
    assert outcome.accuracy >= 0.3
    assert outcome.steps < 100


def test_a_wait_that_cannot_end_says_who_waited_for_what(tiny_moe: Path, tmp_path: Path) -> None:
    recipe = recipe_of(tiny_moe, run={"stall_s": 0.5}, buffer={"no_signal": "drop"}, reward={"parts": {"format": 1.0}})
    with pytest.raises(
        DeadlineExceeded, match=r"learn waited 0.5 s for 4 more groups for step 0 .*dropped as no_signal"
    ):
        run(recipe, tmp_path)


def test_a_second_run_in_the_same_folder_is_refused(tiny_moe: Path, tmp_path: Path) -> None:
    async def second(loop: Loop) -> None:
        await until_step(loop, 1)
        with pytest.raises(RunFolderError, match="in use by the run of process"):
            async with open_system(loop.recipe, tmp_path, resume=True, clock=Ticks()):
                pass

    run(recipe_of(tiny_moe, run={"steps": 3}), tmp_path, meddle=second)
    with pytest.raises(RunFolderError, match="not empty"):
        run(recipe_of(tiny_moe), tmp_path)


def test_a_resume_where_no_run_is_is_refused(tiny_moe: Path, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(RunFolderError, match="holds no run to resume"):
            run(recipe_of(tiny_moe), folder, resume=True)
    assert not (tmp_path / "absent").exists()


def test_a_run_that_died_before_its_first_checkpoint_resumes_from_the_beginning(tiny_moe: Path, tmp_path: Path) -> None:
    async def kill(loop: Loop) -> None:
        await until_step(loop, 2)
        assert isinstance(loop.system.runtime, InlineRuntime)
        loop.system.runtime.kill("buffer")

    recipe = recipe_of(tiny_moe, train={"checkpoint_every": 100}, run={"steps": 6})
    with pytest.raises(WorkerDied):
        run(recipe, tmp_path, meddle=kill)
    assert run(recipe, tmp_path, resume=True).steps == 6
    assert accounts(tmp_path).trained == 6 * 4


def test_a_damaged_checkpoint_is_passed_over_and_said_so(tiny_moe: Path, tmp_path: Path) -> None:
    run(recipe_of(tiny_moe), tmp_path)
    newest, older = space_in(tmp_path / "checkpoints").names()
    damage = file_of(
        tmp_path / "checkpoints", space_in(tmp_path / "checkpoints").manifest(newest).id, "rank-00000/00000"
    )
    damage.write_bytes(damage.read_bytes()[:-1])
    view = Silent()
    run_recipe(recipe_of(tiny_moe), tmp_path, resume=True, clock=Ticks(), view=view)
    assert view.last is not None
    assert f"from cut {older}" in view.last.note
    assert f"passed over: cut {newest}" in view.last.note
    assert accounts(tmp_path).trained == STEPS * 4


def test_a_refused_resume_leaves_the_recipe_as_it_was(tiny_moe: Path, tmp_path: Path) -> None:
    run(recipe_of(tiny_moe, run={"steps": 2}), tmp_path)
    before = (tmp_path / "recipe.toml").read_bytes()
    with pytest.raises(CheckpointError, match="resume with the recipe"):
        run(recipe_of(Path("builtin:tiny-moe")), tmp_path, resume=True)
    assert (tmp_path / "recipe.toml").read_bytes() == before


def test_what_a_view_is_shown_adds_up(tiny_moe: Path, tmp_path: Path) -> None:
    view = Silent()
    run_recipe(recipe_of(tiny_moe), tmp_path, resume=False, clock=Ticks(), view=view)
    assert view.last is not None
    assert (view.last.step, view.last.steps, view.last.age_bound) == (STEPS, STEPS, 2)
    assert view.last.groups["trained"] == STEPS * 4
    assert {worker.name for worker in view.last.workers} == {"rollout-0", "trainer-0"}
