"""A whole run with trainer and engine on one GPU: it learns, publishes, refreshes, and goes on from its checkpoint."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from contraflow.buffer.accounts import accounts
from contraflow.telemetry import read_journal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device"),
    pytest.mark.timeout(300),
]
RECIPES = Path(__file__).parents[2] / "recipes"
ON_GPU = ("train.device=cuda", "engine.device=cuda")
HALF = ("train.compute=bfloat16", "engine.compute=bfloat16")


def run(recipe: Path, folder: Path, *settings: str, resume: bool = False) -> None:
    command = [sys.executable, "-c", "from contraflow.cli import main; main()", "run", str(recipe)]
    command += ["--folder", str(folder), "--plain", *["--resume"] * resume]
    command += [word for setting in settings for word in ("--set", setting)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_journal(folder / "metrics.jsonl") if record["kind"] == kind]


def test_a_run_on_a_gpu_learns_and_goes_on_from_its_checkpoint_in_either_precision(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(RECIPES / "tiny_cpu.toml", folder, *ON_GPU, "run.steps=10", "run.eval_every=5")
    looks = [look["accuracy"] for look in records(folder, "eval")]
    assert 0.2 <= looks[0] <= 0.45
    assert looks[-1] > looks[0] + 0.05  # on the CPU: from 0.37 to 0.58
    refreshes = records(folder, "refresh")
    assert refreshes[-1]["version"] == {"line": 0, "n": 10}
    assert all(refresh["served"] for refresh in refreshes)

    run(folder / "recipe.toml", folder, "run.steps=15", resume=True)
    again = [look["accuracy"] for look in records(folder, "eval")][len(looks) :]
    assert again[0] == pytest.approx(looks[-1], abs=0.01)  # the same weights and tasks; batches may round differently

    run(folder / "recipe.toml", folder, "run.steps=20", *HALF, resume=True)
    final = [look["accuracy"] for look in records(folder, "eval")][len(looks) + len(again) :]
    assert final[0] == pytest.approx(again[-1], abs=0.05)
    assert final[-1] > looks[0] + 0.1

    steps = records(folder, "step")
    assert [step["step"] for step in steps] == list(range(20))
    assert all(step["applied"] for step in steps)
    # What the engine sampled and what the trainer computes for it differ by the steps in between, and by rounding.
    assert all(abs(step["behaviour_kl"]) < 0.1 for step in steps)
    assert accounts(folder).trained == 20 * 64
