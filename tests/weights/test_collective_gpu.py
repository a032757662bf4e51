"""A version from one GPU to another over NCCL, and over gloo by way of the host: as between processes on the CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from contraflow.telemetry import read_journal
from tests.slow.test_learning_gpu import RECIPES, run
from tests.weights.carried import (
    Trainer,
    an_engine_killed_in_mid_transfer_is_named_and_its_successor_served,
    versions_arrive_and_damage_is_named,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
WAYS = {"nccl": ("cuda:0", "cuda:1"), "by the host": ("cpu", "cpu")}


@pytest.fixture(params=list(WAYS))
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trainer]:
    torch.cuda.set_device(0)
    made = Trainer(tmp_path, torch.device("cuda:0"), WAYS[request.param], "cuda:1", deadline_s=8.0)
    yield made
    made.close()


def test_versions_arrive_and_damage_is_named(trainer: Trainer) -> None:
    versions_arrive_and_damage_is_named(trainer)


def test_an_engine_killed_in_mid_transfer_is_named_and_its_successor_served(trainer: Trainer) -> None:
    an_engine_killed_in_mid_transfer_is_named_and_its_successor_served(trainer)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_a_run_on_two_gpus_learns_from_parts(tmp_path: Path, half: bool) -> None:
    settings = ["train.device=cuda:0", "engine.device=cuda:1", "weights.carrier=collective", "run.steps=10"]
    if half:
        settings += ["train.compute=bfloat16", "engine.compute=bfloat16", "weights.dtype=bfloat16"]
        settings += ["weights.probe_tolerance=0.05"]
    run(RECIPES / "tiny_cpu.toml", tmp_path / "run", *settings, "run.eval_every=5")
    records = read_journal(tmp_path / "run" / "metrics.jsonl")
    looks = [record["accuracy"] for record in records if record["kind"] == "eval"]
    assert looks[-1] > looks[0] + 0.05
    refreshes = [record for record in records if record["kind"] == "refresh" and record["served"]]
    assert refreshes[-1]["version"] == {"line": 0, "n": 10}
