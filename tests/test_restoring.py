"""A run that lost its folder goes on from a cut, in a folder or on S3; and what a person may name."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from contraflow.buffer.accounts import accounts
from contraflow.cli import app
from contraflow.config import Recipe
from contraflow.errors import CheckpointError, CutTaken, RunFolderError
from contraflow.loop import Loop
from contraflow.model.folder import load_folder
from contraflow.restoring import find_cut, restore
from contraflow.run import run_recipe
from tests.cut_writer import attempt, never, space_in
from tests.test_loop import Silent, Ticks, parts_of, recipe_of, until_step
from tests.test_loop import run as run_meddled

STEPS = 6


def small(model: Path, **train: Any) -> Recipe:
    sizes = {"steps": STEPS, "eval_tasks": 0}
    return recipe_of(model, run=sizes, buffer={"max_age": 0}, train={"checkpoint_every": 2, **train})


def run(recipe: Recipe, folder: Path, *, resume: bool = False) -> None:
    run_recipe(recipe, folder, resume=resume, clock=Ticks(), view=Silent())


def bring(reference: Path | str, folder: Path, *overrides: str) -> str:
    return restore(str(reference), folder, overrides, clock=time.monotonic, pause=never)


@pytest.fixture(scope="module")
def straight(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to its end, at age 0, with cuts before steps 4 and 6."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    run(small(tiny_moe), folder)
    return folder


def test_a_run_that_goes_on_elsewhere_from_an_older_cut_ends_with_the_same_bits(
    straight: Path, tiny_moe: Path, tmp_path: Path
) -> None:
    assert bring(straight / "checkpoints/line-0-step-4", tmp_path / "new") == "line-0-step-4"
    assert space_in(tmp_path / "new/checkpoints").names() == ["line-0-step-4"]
    run(small(tiny_moe), tmp_path / "new", resume=True)
    assert parts_of(tmp_path / "new") == parts_of(straight)
    totals = accounts(tmp_path / "new")
    assert totals.trained == totals.final == STEPS * 4
    assert totals.posed == totals.trained + sum(totals.dropped.values()) + totals.held


def test_the_run_is_as_it_was(straight: Path) -> None:
    assert space_in(straight / "checkpoints").names() == ["line-0-step-6", "line-0-step-4"]


def test_a_cut_says_where_the_run_stands(straight: Path) -> None:
    about = space_in(straight / "checkpoints").manifest("line-0-step-4").about
    assert about["cut"] | {"model": "", "recipe": ""} == {
        "line": 0, "step": 4, "updates": 4, "seed": 0, "model": "", "recipe": "", "critic": None,
    }  # fmt: skip
    assert about["ledger"]["line"] == 0
    assert about["ledger"]["next_task"] >= 16
    assert about["recipe"] == (straight / "recipe.toml").read_text(encoding="utf-8")
    assert len(about["config"]) == 64


def test_a_folder_that_is_not_empty_is_left_alone(straight: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("", encoding="utf-8")
    with pytest.raises(RunFolderError, match="is not empty"):
        bring(straight, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_what_is_no_run_and_no_cut_is_said(straight: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a run's folder"):
        find_cut(str(tmp_path), clock=time.monotonic, pause=never)
    with pytest.raises(CheckpointError, match=r"no cut line-0-step-5.*the next older cut is line-0-step-4"):
        find_cut(f"{straight}/checkpoints/line-0-step-5", clock=time.monotonic, pause=never)
    (tmp_path / "run" / "checkpoints" / "manifests").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="holds no whole cut"):
        find_cut(str(tmp_path / "run" / "checkpoints"), clock=time.monotonic, pause=never)


def test_the_command_exports_the_newest_cut_of_a_run_as_its_model(straight: Path, tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["export", str(straight), str(tmp_path / "model")])
    assert said.exit_code == 0, said.output
    assert "the model of cut line-0-step-6" in said.output
    one, two = (load_folder(folder) for folder in (straight / "model", tmp_path / "model"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_the_command_that_resumes_from_s3_asks_for_a_folder() -> None:
    said = CliRunner().invoke(app, ["resume", "s3://bucket/run"])
    assert isinstance(said.exception, RunFolderError)
    assert "Give --folder" in str(said.exception)


def test_a_run_whose_cut_another_writer_took_stops_and_says_whose_it_is(tiny_moe: Path, tmp_path: Path) -> None:
    async def rival(loop: Loop) -> None:
        await until_step(loop, 3)
        attempt(space_in(tmp_path / "checkpoints"), "line-0-step-4", "rival")

    with pytest.raises(CutTaken, match=r"line-0-step-4.*belongs to writer rival"):
        run_meddled(small(tiny_moe), tmp_path, meddle=rival)
    assert space_in(tmp_path / "checkpoints").manifest("line-0-step-4").id.writer == "rival"


def test_a_store_that_refuses_ends_the_run_and_what_was_saved_before_goes_on(tiny_moe: Path, tmp_path: Path) -> None:
    async def full(loop: Loop) -> None:
        await until_step(loop, 3)
        parts = tmp_path / "checkpoints" / "parts"
        parts.rename(parts.with_name("parts-before"))
        parts.write_text("in the way", encoding="utf-8")

    recipe = small(tiny_moe, checkpoint_deadline_s=0.3)
    with pytest.raises(CheckpointError, match=r"line-0-step-4.*could not be written.*given up after.*resume"):
        run_meddled(recipe, tmp_path, meddle=full)
    (tmp_path / "checkpoints" / "parts").unlink()
    (tmp_path / "checkpoints" / "parts-before").rename(tmp_path / "checkpoints" / "parts")
    assert space_in(tmp_path / "checkpoints").names() == ["line-0-step-2"]
    run(recipe, tmp_path, resume=True)
    assert accounts(tmp_path).trained == STEPS * 4


@pytest.mark.s3
@pytest.mark.timeout(300)
def test_a_run_whose_folder_is_lost_goes_on_from_s3_and_its_twin_is_refused(
    bucket: str, straight: Path, tiny_moe: Path, tmp_path: Path
) -> None:
    kept = small(tiny_moe, checkpoint_url=bucket)
    run(kept.model_copy(update={"run": kept.run.model_copy(update={"steps": 4})}), tmp_path / "first")
    assert not (tmp_path / "first" / "checkpoints").exists()
    shutil.rmtree(tmp_path / "first")
    assert bring(bucket, tmp_path / "one") == bring(bucket, tmp_path / "two") == "line-0-step-4"
    run(kept, tmp_path / "one", resume=True)
    wanted = parts_of(straight)
    space = space_in(bucket, 20.0)
    manifest = space.manifest(space.names()[0])
    assert manifest.id.name == "line-1-step-6"
    assert {p.name: p.sha256 for p in manifest.parts if p.name.startswith(("rank", "model"))} == wanted
    with pytest.raises(RunFolderError, match="knows of no checkpoint of step 6"):  # its record is of before the twin's
        run(kept, tmp_path / "two", resume=True)
