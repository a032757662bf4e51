"""Versions go in parts from any layout of the trainer to any of the engine, which computes what the trainer does."""

from pathlib import Path

import pytest

from contraflow.telemetry import read_journal
from tests.slow.test_learning import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LAYOUTS = {"one": "", "ep": "dp=2 ep=2", "dp": "dp=2", "tp": "tp=2"}
ONE = "dp=1 ep=1 tp=1"
SHORT = ("run.steps=3", "run.eval_tasks=0", "buffer.groups_per_step=8", "rollout.concurrency=8")


@pytest.mark.parametrize(
    ("trainer", "engine"), [("one", "tp"), ("one", "ep"), ("ep", "one"), ("ep", "tp"), ("dp", "one"), ("dp", "ep")]
)
def test_an_engine_computes_what_the_trainer_does_with_every_version(tmp_path: Path, trainer: str, engine: str) -> None:
    settings = [*SHORT, "weights.carrier=collective", "weights.bucket_bytes=50000", "weights.probe_tolerance=1e-4"]
    for side, layout in (("train", LAYOUTS[trainer]), ("engine", LAYOUTS[engine])):
        settings += [f"{side}.parallel.{size}" for size in f"{ONE} {layout}".split()]
    run(tmp_path / "run", *settings, recipe="tiny_ep2.toml")
    refreshes = [r for r in read_journal(tmp_path / "run/metrics.jsonl") if r["kind"] == "refresh"]
    assert refreshes[-1]["version"]["n"] == 3
    assert all(refresh["served"] or refresh["gone"] for refresh in refreshes)
