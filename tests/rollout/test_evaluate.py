"""`contraflow eval` on the shipped model: against one forward pass, which samples nothing, and itself."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from contraflow.algo.estimates import pass_at_k
from contraflow.cli import app
from contraflow.config import Recipe, load_recipe
from contraflow.envs.registry import make_env
from contraflow.errors import ConfigError
from contraflow.model.builtin import model_folder
from contraflow.model.folder import load_folder
from contraflow.model.tokenizer import Tokenizer
from contraflow.rollout.evaluate import Report, Result, Subject, evaluate, find_model
from contraflow.rollout.examine import Exam
from contraflow.train.sft import answered, encode, look_at

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny_cpu.toml"
TASKS = 40


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe(RECIPE, ["engine.max_sequences=64"])


def ask(recipe: Recipe, *folders: Path, ks: tuple[int, ...] = (1,), **exam: float) -> Report:
    subjects = [Subject(folder, lambda: 0.0, lambda answers: None) for folder in folders]
    return evaluate(recipe, Exam(count=TASKS, **exam), ks, subjects)  # type: ignore[arg-type]


def test_greedy_answers_are_as_right_as_one_forward_pass_over_the_references_says(recipe: Recipe) -> None:
    folder = model_folder("builtin:tiny-moe")
    (result,) = ask(recipe, folder).results
    env, tokenizer = make_env(recipe.env.name, recipe.env.options), Tokenizer.load(folder)
    samples = [encode(answered(env.task("test", index)), tokenizer) for index in range(TASKS)]
    assert result.measures["pass@1"].mean == pytest.approx(look_at(load_folder(folder), samples, 4096).accuracy)
    assert result.measures["pass@1"] == result.measures["correct"]
    assert 0 < result.measures["pass@1"].mean < 1
    mixed = 0.7 * result.measures["correct"].mean + 0.3 * result.measures["partial"].mean
    assert result.measures["reward"].mean == pytest.approx(mixed)
    assert result.failed == 0


def test_sampled_answers_give_pass_at_k_and_the_same_again(recipe: Recipe) -> None:
    folder = model_folder("builtin:tiny-moe")
    first, again = (ask(recipe, folder, ks=(1, 3, 6), samples=6, temperature=1.0) for _ in range(2))
    assert first == again
    (result,) = first.results
    right = [round(6 * share) for share in result.by_task["correct"]]
    assert result.by_task["pass@3"] == pytest.approx(pass_at_k(right, samples=6, k=3).tolist())
    means = [result.measures[f"pass@{k}"].mean for k in (1, 3, 6)]
    assert means[0] < means[1] < means[2]
    other = ask(recipe, folder, samples=6, temperature=1.0, seed=1)
    assert other.results[0].by_task["correct"] != result.by_task["correct"]


def test_two_models_are_compared_task_by_task(recipe: Recipe, tiny_moe: Path) -> None:
    folder = model_folder("builtin:tiny-moe")
    equal = ask(recipe, folder, folder, samples=2, temperature=1.0)
    assert set(equal.differences.values()) == {(0.0, 0.0, 0.0)}
    better = ask(recipe, tiny_moe, folder)  # random weights, then the shipped model
    assert better.differences["reward"].low > 0
    assert any("difference" in line for line in better.lines())


@pytest.mark.parametrize(
    ("exam", "ks"), [({"samples": 2, "temperature": 0.0}, (1,)), ({"samples": 2, "temperature": 1.0}, (3,))]
)
def test_what_cannot_be_asked_is_refused(recipe: Recipe, exam: dict[str, float], ks: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        ask(recipe, model_folder("builtin:tiny-moe"), ks=ks, **exam)


def test_a_run_stands_for_the_model_it_made(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="has no model yet"):
        find_model(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    assert find_model(tmp_path) == tmp_path / "model"
    assert find_model(Path("builtin:tiny-moe")) == model_folder("builtin:tiny-moe")


def test_columns_of_two_runs_have_the_names_of_the_runs() -> None:
    results = [
        Result(model=model, failed=0, tokens=1.0, measures={}, by_task={})
        for model in ("a/run-1/model", "a/run-2/model", "tiny")
    ]
    heads = Report(exam=Exam(count=TASKS), results=results).lines()[1]
    assert heads.split() == ["run-1", "run-2", "tiny"]


def test_the_command_prints_a_table_and_keeps_every_task(tmp_path: Path) -> None:
    out = tmp_path / "eval.json"
    words = ["eval", "builtin:tiny-moe", "--recipe", str(RECIPE), "--tasks", "5", "--samples", "2", "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "pass@2" in done.stdout
    kept = json.loads(out.read_text(encoding="utf-8"))
    assert len(kept["results"][0]["by_task"]["reward"]) == 5
    assert kept["exam"]["temperature"] == 1.0
