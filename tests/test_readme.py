"""The documents are true: commands exist, paths exist, settings exist, and the shipped model is what they say."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

import click
import pytest
import typer
from pydantic import BaseModel

from contraflow.cli import app
from contraflow.config import Pool, Recipe, RewardRecipe, SftRecipe, load_recipe, load_reward_recipe, load_sft_recipe
from contraflow.model.builtin import SHIPPED, model_folder
from contraflow.model.folder import copy_companions, load_folder
from contraflow.model.reward import RewardModel, Scale, save_reward_model
from contraflow.model.tokenizer import Tokenizer
from contraflow.model.value import ValueHead
from contraflow.rewards.model import MODEL
from contraflow.rollout.preflight import check_tasks

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# What a run writes, and what a reader is asked to make.
MADE = ("runs/", "RUN/", "my_", "checkpoints/", "model/", "package.module", "bad_batches/")


def code(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_path_that_is_named_exists(page: Path) -> None:
    for text in code(page):
        if re.fullmatch(r"[\w./-]+\.(py|md|toml|sh|json)", text) and "/" in text and not text.startswith(MADE):
            assert (ROOT / text).exists() or (ROOT / "contraflow" / text).exists(), text
        if re.fullmatch(r"[a-z]+/", text) and text not in MADE:
            assert (ROOT / text).is_dir() or (ROOT / "contraflow" / text).is_dir(), text


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_setting_that_is_named_exists(page: Path) -> None:
    sections = {**RewardRecipe.model_fields, **SftRecipe.model_fields, **Recipe.model_fields}
    for text in code(page):
        section, _, key = text.partition(" ")[0].partition(".")
        if section in sections and re.fullmatch(r"[a-z_]+", key) and not text.endswith((".py", ".md", ".toml")):
            known = {**sections[section].annotation.model_fields}  # type: ignore[union-attr]
            if section in SftRecipe.model_fields and section in {"model", "sft"}:
                known |= SftRecipe.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
            assert key in known, text


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_that_is_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    ours = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    ours |= {group.name for group in app.registered_groups}
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    spoken = {said.split()[0] for said in re.findall(r"`contraflow ([a-z][a-z -]*)", text)}
    assert spoken <= ours
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) <= verbs


def test_the_first_run_comes_before_line_thirty() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert next(number for number, line in enumerate(lines, 1) if line.startswith("make run")) < 30


def test_the_task_in_the_readme_is_the_one_that_is_tested() -> None:
    def block(page: str) -> str:
        return (ROOT / page).read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]

    assert block("README.md") == block("docs/environment.md")
    assert len(block("README.md").splitlines()) <= 30


def test_the_shipped_model_is_small_sparse_and_readable_by_others() -> None:
    folder = model_folder("builtin:tiny-moe")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "qwen3_moe"
    assert (config["num_experts"] >= 8, config["num_experts_per_tok"]) == (True, 2)
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) <= 5_000_000
    assert load_folder(folder).config.vocab >= Tokenizer.load(folder).size


def untrained_reward_model(folder: Path) -> Path:
    start = model_folder("builtin:tiny-moe")
    decoder = load_folder(start)
    save_reward_model(RewardModel(decoder, ValueHead(decoder.config.dim)), Scale(mean=0.0, std=1.0), folder)
    copy_companions(start, folder)
    return folder


async def _checked(recipe: Recipe) -> None:
    await check_tasks(recipe, model_folder(recipe.model.folder))


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda p: p.name)
def test_every_recipe_can_be_started(path: Path, tmp_path: Path) -> None:
    import asyncio

    if path.name == "reasoning_gym.toml":
        pytest.importorskip("reasoning_gym")
    if path.name.endswith("_sft.toml"):
        load_sft_recipe(path)
    elif path.name.endswith("_reward_model.toml"):
        load_reward_recipe(path)
    else:
        recipe, here = load_recipe(path), []
        if MODEL in recipe.reward.parts:  # which a reader makes first
            here.append(f"reward.model.folder={untrained_reward_model(tmp_path)}")
        if recipe.cluster.name:  # its model is in the cluster's pods; tasks are checked with one that is here
            here.append("model.folder=builtin:tiny-moe")
        recipe = load_recipe(path, here)
        asyncio.run(_checked(recipe))


def test_recipes_of_benchmarks_are_read() -> None:
    assert load_recipe(ROOT / "bench/smollm2/rl.toml").weights.carrier == "ipc"
    assert load_sft_recipe(ROOT / "bench/smollm2/sft.toml").chat.file


def test_ppo_is_compared_at_the_token_budget_of_the_others() -> None:
    others, ppo = (load_recipe(ROOT / "recipes" / name) for name in ("tiny_cpu.toml", "tiny_ppo.toml"))
    assert ppo.loss.advantages == "gae"
    assert others.model_copy(update={"loss": ppo.loss, "critic": ppo.critic}) == ppo


def test_help_does_not_import_torch() -> None:
    script = (
        "import sys, contraflow.cli as c, typer.testing as t; r = t.CliRunner().invoke(c.app, ['--help']); "
        "assert r.exit_code == 0; assert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def helps(command: click.Command) -> Iterator[str]:
    """Every help text of a command and those below it."""
    yield command.help or ""
    for parameter in command.params:
        yield str(getattr(parameter, "help", None) or "")
    for inner in getattr(command, "commands", {}).values():
        yield from helps(inner)


def test_no_help_text_holds_a_bracket_that_would_be_taken_for_markup_and_vanish() -> None:
    assert [text for text in helps(typer.main.get_command(app)) if "[" in text] == []


def choices_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Settings that are one of a few words, and those words."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if get_origin(kind) is Literal:
            yield f"{prefix}{name}", get_args(kind)
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from choices_of(kind, f"{prefix}{name}.")


def test_every_setting_is_explained_with_its_default() -> None:
    page = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    sections = Recipe().model_dump(mode="json")
    for name, nested in (
        ("engine", "parallel"),
        ("engine", "launch"),
        ("engine", "server"),
        ("buffer", "curriculum"),
        ("train", "parallel"),
        ("reward", "judge"),
        ("reward", "model"),
        ("reward", "sandbox"),
    ):
        sections[f"{name}.{nested}"] = sections[name].pop(nested)
    pool = Pool(instance="TYPE").model_dump(mode="json")
    sections["cluster.pools.NAME"] = {key: value for key, value in pool.items() if key != "instance"}
    for name, section in sections.items():
        for key, value in section.items():
            assert f"| `{name}.{key}` | `{json.dumps(value)}` | " in page, f"{name}.{key}"
    rows = dict(re.findall(r"^\| `([\w.]+)` \| [^|]*\| ([^|]*) \|$", page, re.MULTILINE))
    for name, choices in (*choices_of(Recipe), *choices_of(Pool, "cluster.pools.NAME.")):
        assert all(f"`{choice}`" in rows[name] for choice in choices), name
