"""docs/sandbox.md is true: its environment runs, its recipe is accepted, its counts are those of the code."""

import asyncio
import importlib.util
import platform
import re
import tomllib
from pathlib import Path

import pytest

from contraflow.config import check_recipe
from contraflow.envs.registry import make_env
from contraflow.model.tokenizer import build_char_tokenizer
from contraflow.rewards.sandbox import syscalls
from contraflow.rollout.preflight import check_tasks
from tests.rewards.escapes import ATTEMPTS, CHEATS

PAGE = (Path(__file__).parents[2] / "docs" / "sandbox.md").read_text(encoding="utf-8")
TOML = re.findall(r"^```toml\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
(PYTHON,) = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def my_programs(tmp_path, monkeypatch):
    (tmp_path / "my_programs.py").write_text(PYTHON, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.skipif(platform.system() != "Linux", reason="programs run on Linux")
def test_the_environment_of_the_page_passes_the_check_before_a_run(my_programs):
    recipe = check_recipe(tomllib.loads(TOML[1]))
    env = make_env(recipe.env.name, recipe.env.options)
    tasks = [env.task("train", index) for index in range(8)] + [env.task("test", index) for index in range(8)]
    letters = "".join(sorted({letter for task in tasks for letter in task.prompt + task.reference}))
    build_char_tokenizer(my_programs / "model", letters)
    asyncio.run(check_tasks(recipe, my_programs / "model"))


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs math-verify")
def test_the_recipe_for_mathematics_judges_the_shipped_environments_references(tmp_path):
    build_char_tokenizer(tmp_path / "model")
    asyncio.run(check_tasks(check_recipe(tomllib.loads(TOML[0])), tmp_path / "model", tasks=2))


def test_the_counts_on_the_page_are_those_of_the_code():
    assert f"{len(ATTEMPTS)} attempts to get out and {len(CHEATS)} to cheat" in PAGE
    assert f"a list of {len(syscalls.allowed('x86_64'))} that are allowed" in PAGE
