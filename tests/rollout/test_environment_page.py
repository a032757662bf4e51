"""docs/environment.md is true: its code runs, its recipes load, and the task it shows is accepted."""

import asyncio
import re
import tomllib
from pathlib import Path

import pytest

from contraflow.config import check_recipe
from contraflow.envs.registry import make_env
from contraflow.model.builtin import model_folder
from contraflow.model.tokenizer import Tokenizer, build_char_tokenizer
from contraflow.rewards.base import Said, Transcript
from contraflow.rewards.registry import make_mix
from contraflow.rollout.preflight import check_tasks
from contraflow.types import StopReason

PAGE = (Path(__file__).parents[2] / "docs" / "environment.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def my_task(tmp_path, monkeypatch):
    (tmp_path / "my_task.py").write_text("\n\n".join(blocks("python")), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_task_is_thirty_lines_and_does_what_it_says(my_task):
    assert len(blocks("python")[0].splitlines()) <= 30
    env = make_env("my_task.py:SortDigits", {"length": 4})
    task = env.task("train", 0)
    assert task.reference == "".join(sorted(task.prompt.removesuffix("=")))
    held_out = {env.task("test", index).prompt for index in range(300)}
    assert not held_out & {env.task("train", index).prompt for index in range(3000)}


@pytest.mark.parametrize("place", range(len(blocks("toml"))))
def test_every_recipe_on_the_page_passes_the_check_before_a_run(my_task, place):
    recipe = check_recipe(tomllib.loads(blocks("toml")[place]))
    build_char_tokenizer(my_task / "model")
    asyncio.run(check_tasks(recipe, my_task / "model"))


def test_the_reward_of_the_page_scores(my_task):
    mix = make_mix(tomllib.loads(blocks("toml")[-1])["reward"]["parts"])
    task = make_env("my_task.py:SortDigits", {}).task("train", 0)
    right = Transcript((Said("model", task.reference),), StopReason.STOP)
    assert mix.score(task, right)[0] == pytest.approx(1.1)


def test_the_alphabet_on_the_page_is_the_shipped_one():
    promised = re.search(r"digits, space and `(.*?)`", PAGE).group(1)
    tokenizer = Tokenizer.load(model_folder("builtin:tiny-moe"))
    assert len(tokenizer.encode(promised + " 0123456789")) + 2 == tokenizer.size  # and the two special tokens
