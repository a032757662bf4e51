"""A whole run on Ray: the same groups and weights as on one machine's processes, and what its deaths come to."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from contraflow.buffer.accounts import accounts
from contraflow.telemetry import read_journal
from contraflow.view.inspect import prove
from tests.ray_head import Head, needs_ray

pytestmark = [pytest.mark.ray, needs_ray, pytest.mark.timeout(400)]

RECIPE = """
[run]
steps = {steps}
restarts = 0
eval_every = 100
eval_tasks = 16
[model]
folder = "{model}"
[rollout]
episodes = 4
max_new_tokens = 4
[engine]
context_tokens = 32
kv_tokens = 4096
[buffer]
groups_per_step = 4
max_age = 0
no_signal = "keep"
[train]
checkpoint_every = 4
"""


class Running:
    """A `contraflow run` in a session of its own."""

    def __init__(self, recipe: Path, folder: Path, environment: dict[str, str], *extra: str) -> None:
        command = [sys.executable, "-c", "from contraflow.cli import main; main()", "run", str(recipe), "--plain"]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_A")}
        self.folder = folder
        self.process = subprocess.Popen(
            [*command, "--folder", str(folder), *extra],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**clean, **environment},
        )

    def until_step(self, step: int, within_s: float = 200.0) -> None:
        deadline, path = time.monotonic() + within_s, self.folder / "metrics.jsonl"
        while time.monotonic() < deadline and self.process.poll() is None:
            if path.is_file() and any(r["kind"] == "step" and r["step"] >= step for r in read_journal(path)):
                return
            time.sleep(0.05)
        raise AssertionError(f"step {step} was not reached: {self.end(5)}")

    def end(self, within_s: float = 200.0) -> str:
        """What it printed, once it has ended."""
        return self.process.communicate(timeout=within_s)[0]


Start = Callable[..., Running]


@pytest.fixture
def start(tiny_moe: Path, tmp_path: Path) -> Iterator[Start]:
    started: list[Running] = []

    def begin(name: str, *extra: str, environment: dict[str, str], steps: int) -> Running:
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(RECIPE.format(model=tiny_moe, steps=steps), encoding="utf-8")
        started.append(Running(recipe, tmp_path / name, environment, *extra))
        return started[-1]

    yield begin
    for running in started:
        if running.process.poll() is None:
            os.killpg(running.process.pid, signal.SIGKILL)
        running.process.communicate()


@pytest.fixture
def own_head() -> Iterator[Head]:
    mine = Head()
    try:
        yield mine.until_ready()
    finally:
        mine.close()


def find_worker(name: str) -> int:
    """The process of a worker by its title; others of that name may run on this machine, the newest is ours."""
    found = [int(e.name) for e in Path("/proc").iterdir() if e.name.isdigit() and _title(e) == name]
    return max(found, key=lambda process: Path(f"/proc/{process}").stat().st_ctime)


def _title(entry: Path) -> str:
    try:
        return (entry / "comm").read_text().strip()
    except OSError:
        return ""


def weights(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((folder / "model").glob("*.safetensors")))


def test_a_synchronous_run_ends_with_the_same_bits_as_on_local_and_the_same_accounts(
    start: Start, ray_head: Head
) -> None:
    local = start("local", environment={}, steps=4)
    ray = start("ray", "--runtime", "ray", environment=ray_head.environment, steps=4)
    for running in (local, ray):
        said = running.end()
        assert running.process.returncode == 0, said
        assert prove(running.folder) == []
    assert len(weights(local.folder)) > 10_000
    assert weights(local.folder) == weights(ray.folder)
    assert accounts(local.folder) == accounts(ray.folder)


def test_a_killed_rollout_worker_is_named_and_replaced(start: Start, ray_head: Head) -> None:
    running = start("run", "--runtime", "ray", environment=ray_head.environment, steps=60)
    running.until_step(3)
    os.kill(find_worker("rollout-0"), signal.SIGKILL)
    said = running.end()
    assert running.process.returncode == 0, said
    assert "worker 'rollout-0' died: its process ended; was running" in said
    assert accounts(running.folder).trained == 60 * 4


def test_a_head_that_goes_ends_the_run_by_name_and_it_can_be_resumed_elsewhere(start: Start, own_head: Head) -> None:
    running = start("run", "--runtime", "ray", environment=own_head.environment, steps=4000)
    running.until_step(6)
    own_head.kill("gcs_server")
    said = running.end(40)
    assert running.process.returncode == 1, said
    assert "contraflow: the cluster's head at " in said
    assert "resume the run: it goes on from its newest cut" in said
    done = accounts(running.folder).trained // 4
    again = start("run", "--resume", environment={}, steps=done + 3)  # the recipe's file says local
    said = again.end()
    assert f"done: {done + 3} steps" in said
    assert (accounts(running.folder).trained, prove(running.folder)) == ((done + 3) * 4, [])
