"""A run whose trainer has two ranks: what becomes of it when one dies or hangs, and how it goes on with other ranks."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from contraflow.buffer.accounts import accounts
from tests.faults.test_processes import RECIPE, Running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RANKS = "parallel = { dp = 2, ep = 2, deadline_s = 5.0 }\n"

Start = Callable[..., Running]


@pytest.fixture
def start(tiny_moe: Path, tmp_path: Path) -> Iterator[Start]:
    started: list[Running] = []

    def begin(*extra: str, steps: int = 4000, ranks: str = RANKS) -> Running:
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(RECIPE.format(model=tiny_moe, steps=steps) + ranks, encoding="utf-8")
        started.append(Running(recipe, tmp_path / "run", *extra))
        return started[-1]

    yield begin
    for running in started:
        if running.process.poll() is None:
            os.killpg(running.process.pid, signal.SIGKILL)
        running.process.communicate()


@pytest.mark.parametrize(("blow", "within_s"), [(signal.SIGKILL, 30), (signal.SIGSTOP, 60)], ids=["killed", "stopped"])
def test_a_rank_that_dies_or_hangs_ends_the_run_by_name_and_one_rank_goes_on(
    start: Start, blow: signal.Signals, within_s: float
) -> None:
    running = start()
    running.until_step(7, within_s=240)
    os.kill(running.worker("trainer-1"), blow)
    said = running.end(within_s)
    assert running.process.returncode == 1, said
    assert ("'trainer-1'" if blow == signal.SIGKILL else "rank 1") in said
    cut = accounts(running.folder).cut
    assert cut >= 5
    said = start("--resume", steps=cut + 4, ranks="").end(240)
    assert f"done: {cut + 4} steps" in said
    totals = accounts(running.folder)
    assert totals.trained == totals.final == (cut + 4) * 4
