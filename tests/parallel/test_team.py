"""Ranks that do not work together say so: told different things, astray, silent or away."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from contraflow import config
from contraflow.config import Parallel
from contraflow.errors import ContraflowError
from contraflow.parallel.mesh import open_mesh
from contraflow.parallel.team import Team
from contraflow.runtime.base import Rendezvous
from contraflow.train.learner import Place
from contraflow.train.worker import make_trainer
from tests.dispatch import gloo
from tests.parallel.equal import make_folder

pytestmark = pytest.mark.timeout(300)  # several processes; on a busy machine they wait for each other


def told_otherwise(rank: int, folder: Path, meeting: Path) -> str:
    """What a trainer's rank says when the other was given another learning rate."""
    host: Any = SimpleNamespace(clock=time.monotonic)
    place = Place(model_folder=str(folder), run_folder=str(meeting), seed=1, line=0, temperature=1.0, keep_episodes=0)
    with pytest.raises(ContraflowError) as fault:
        make_trainer(
            host,
            rendezvous=Rendezvous(rank, 2, f"file://{meeting}/trainer"),
            train=config.Train(learning_rate=(1e-3, 2e-3)[rank], parallel=Parallel(dp=2)),
            loss=config.Loss(),
            weights=config.Weights(),
            place=place,
            buffer=None,  # type: ignore[arg-type]
        )
    return f"{type(fault.value).__name__}: {fault.value}"


def astray(store: Any, rank: int, folder: Path, meeting: Path) -> list[str]:
    """What rank 0 hears when the other was told, does something else, falls silent inside, and does not come at all."""
    dist.destroy_process_group()
    heard = [told_otherwise(rank, folder, meeting)]
    with open_mesh(Parallel(dp=2, deadline_s=1.0), rank=rank, init_method=f"file://{meeting}/meet") as mesh:
        team = Team(mesh)
        try:
            with team.together("step 3" if rank == 0 else "step 4"):
                pass
        except ContraflowError as fault:
            heard.append(str(fault))
        if rank == 1:
            with team.together("step 5"):
                store.wait(["done"])
            return heard
        try:
            with team.together("step 5"):
                team.sum(torch.ones(1))
        except ContraflowError as fault:
            heard.append(str(fault))
        try:
            with team.together("step 6"):
                pass
        except ContraflowError as fault:
            heard.append(str(fault))
        store.set("done", "")
    return heard


def test_ranks_told_different_things_astray_silent_or_away_are_named(tmp_path: Path) -> None:
    (first, *heard), (second, *told) = gloo.run(astray, 2, tmp_path, make_folder("qwen3", tmp_path), tmp_path)
    assert first.startswith("ConfigError: ranks disagree on train.learning_rate: rank 0 has 0.001, rank 1 has 0.002")
    assert second.startswith("ConfigError: ranks disagree on train.learning_rate: rank 1 has 0.002, rank 0 has 0.001")
    assert heard[0] == "rank 0 is at step 3, rank 1 at step 4: calls went astray"
    assert told[0] == "rank 1 is at step 4, rank 0 at step 3: calls went astray"
    assert "'rank 1' died: took no part in step 5" in heard[1]
    assert "'rank 1' died" in heard[2]
