"""The recipes keep their promises: the shipped model can be made again, and reinforcement teaches it (minutes)."""

import subprocess
import sys
from pathlib import Path

import pytest

from contraflow.buffer.accounts import accounts
from contraflow.config import load_sft_recipe
from contraflow.telemetry import read_journal
from contraflow.train.sft import make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RECIPES = Path(__file__).parents[2] / "recipes"


def run(folder: Path, *settings: str, recipe: str = "tiny_cpu.toml") -> list[float]:
    """Held-out accuracies of a whole run in processes of its own, first to last."""
    command = [sys.executable, "-c", "from contraflow.cli import main; main()", "run", str(RECIPES / recipe)]
    command += ["--folder", str(folder), "--plain", *(word for setting in settings for word in ("--set", setting))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [record["accuracy"] for record in read_journal(folder / "metrics.jsonl") if record["kind"] == "eval"]


def test_the_shipped_model_learns_what_its_data_did_not_hold(tmp_path: Path) -> None:
    looks = run(tmp_path / "run")
    assert 0.2 <= looks[0] <= 0.45
    assert looks[-1] >= 0.8
    steps = [r for r in read_journal(tmp_path / "run/metrics.jsonl") if r["kind"] == "step"]
    assert max(step["age_max"] for step in steps) <= 2
    assert accounts(tmp_path / "run").trained == len(steps) * 64


def test_a_model_made_from_nothing_learns_as_well(tmp_path: Path) -> None:
    told = list(make_model(load_sft_recipe(RECIPES / "tiny_moe_sft.toml"), tmp_path / "model", clock=lambda: 0.0))
    assert "held-out 0.9" in told[-2]
    looks = run(tmp_path / "run", f"model.folder={tmp_path / 'model'}", "run.steps=60")
    assert 0.2 <= looks[0] <= 0.45
    assert looks[-1] >= 0.75


def test_what_was_learned_survives_an_interruption(tmp_path: Path) -> None:
    first = run(tmp_path / "run", "run.steps=20")
    recipe = tmp_path / "run/recipe.toml"
    command = [sys.executable, "-c", "from contraflow.cli import main; main()", "run", str(recipe), "--resume"]
    command += ["--folder", str(tmp_path / "run"), "--plain", "--set", "run.steps=40"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    looks = [r["accuracy"] for r in read_journal(tmp_path / "run/metrics.jsonl") if r["kind"] == "eval"]
    assert looks[len(first)] == pytest.approx(first[-1], abs=1e-9)  # the same weights, the same held-out tasks
    assert looks[-1] > first[-1]


def test_a_trainer_and_an_engine_of_two_ranks_each_learn_as_those_of_one_do(tmp_path: Path) -> None:
    looks = {
        recipe: run(tmp_path / recipe, "run.steps=30", recipe=recipe) for recipe in ("tiny_cpu.toml", "tiny_ep2.toml")
    }
    one, two = looks.values()
    assert two[0] == pytest.approx(one[0], abs=0.01)  # the same model and tasks, answered greedily
    assert two[-1] >= 0.65
    assert two[-1] == pytest.approx(one[-1], abs=0.1)
    steps, refreshes = (
        [r for r in read_journal(tmp_path / "tiny_ep2.toml/metrics.jsonl") if r["kind"] == kind]
        for kind in ("step", "refresh")
    )
    assert max(step["age_max"] for step in steps) <= 2
    # Behaviour log-probabilities of one pair of ranks, trained by the other: the same but for the steps in between.
    assert all(abs(step["behaviour_kl"]) < 0.1 for step in steps)
    assert refreshes[-1]["version"] == {"line": 0, "n": 30}
    assert all(refresh["served"] for refresh in refreshes)


def test_two_trainer_ranks_learn_as_one_does_and_one_goes_on_from_their_cut(tmp_path: Path) -> None:
    ranks = ("train.parallel.dp=2", "train.parallel.ep=2")
    first = run(tmp_path / "run", "run.steps=40", *ranks)
    assert 0.2 <= first[0] <= 0.45
    assert first[-1] >= 0.65  # one rank: 0.76
    recipe = tmp_path / "run/recipe.toml"
    command = [sys.executable, "-c", "from contraflow.cli import main; main()", "run", str(recipe), "--resume"]
    command += ["--folder", str(tmp_path / "run"), "--plain", "--set", "run.steps=50"]
    command += ["--set", "train.parallel.dp=1", "--set", "train.parallel.ep=1"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    looks = [r["accuracy"] for r in read_journal(tmp_path / "run/metrics.jsonl") if r["kind"] == "eval"]
    assert looks[len(first)] == pytest.approx(first[-1], abs=1e-9)  # the same weights, the same held-out tasks


def test_versions_that_travel_in_parts_teach_as_well(tmp_path: Path) -> None:
    looks = run(tmp_path / "run", "run.steps=20", "weights.carrier=collective", recipe="tiny_ep2.toml")
    assert 0.2 <= looks[0] <= 0.45
    assert looks[-1] >= looks[0] + 0.15
    records = read_journal(tmp_path / "run/metrics.jsonl")
    refreshes = [r for r in records if r["kind"] == "refresh" and r["served"]]
    assert refreshes[-1]["version"]["n"] == 20
    carried = next(r["carried"] for r in reversed(records) if r["kind"] == "pools" and r["carried"])
    assert carried.keys() == {"trainer-0", "trainer-1"}
    assert all(told["failed"] == 0 and told["sent"] + told["skipped"] >= 19 for told in carried.values())
