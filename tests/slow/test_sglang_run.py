"""A whole run whose tokens come from a twin of an SGLang server, in a process of its own on a socket."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from contraflow.buffer.accounts import accounts
from contraflow.model.builtin import model_folder
from contraflow.telemetry import read_journal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RECIPE = Path(__file__).parents[2] / "recipes/tiny_vllm.toml"
SMALL = ["run.steps=6", "run.eval_every=6", "run.eval_tasks=32", "rollout.concurrency=16", "buffer.groups_per_step=16"]


@contextmanager
def twin(context_tokens: int) -> Iterator[str]:
    """The address of one on the shipped model, which may not answer yet: a run waits for servers."""
    with tempfile.TemporaryDirectory() as place:  # a socket's path has to be short
        socket = Path(place) / "s"
        words = ["-m", "contraflow.rollout.sglang_twin", str(model_folder("builtin:tiny-moe")), str(socket)]
        server = subprocess.Popen([sys.executable, *words, str(context_tokens)])
        try:
            yield f"unix:{socket}"
        finally:
            server.kill()
            server.wait()


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_a_run_trains_through_an_sglang_server_whose_tokens_are_those_of_its_own_weights(
    tmp_path: Path, policy: str
) -> None:
    with twin(32) as url:
        settings = [*SMALL, "engine.kind=sglang", f'engine.server.urls=["{url}"]', "engine.server.arguments=[]"]
        settings += ["engine.routes=true", f"engine.on_refresh={policy}"]
        command = [sys.executable, "-c", "from contraflow.cli import main; main()", "run", str(RECIPE), "--plain"]
        command += ["--folder", str(tmp_path / "run"), *(w for setting in settings for w in ("--set", setting))]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    records = list(read_journal(tmp_path / "run/metrics.jsonl"))
    steps = [record for record in records if record["kind"] == "step"]
    refreshes = [record for record in records if record["kind"] == "refresh"]
    assert len(steps) == 6
    assert all(step["applied"] and step["age_max"] <= 2 and step["failed"] == 0 for step in steps)
    # The trainer computes the log-probabilities of tokens of its own weights as the server told them.
    assert steps[0]["age_max"] == 0
    assert 0.9999 < steps[0]["ratio_low"] <= steps[0]["ratio_high"] < 1.0001
    assert refreshes
    assert all(refresh["served"] for refresh in refreshes)
    assert accounts(tmp_path / "run").trained == 6 * 16
