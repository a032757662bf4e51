"""Replayed experts on several ranks: the training of one rank, and choices of all ranks known to all."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contraflow.config import Parallel, Train
from contraflow.model.router import RouterTape
from contraflow.parallel.mesh import Mesh
from contraflow.parallel.spread import load_spread
from contraflow.telemetry import Account
from contraflow.train.batcher import pack
from contraflow.train.crew import open_crew
from contraflow.train.forward import feed
from contraflow.train.look import look
from contraflow.train.optimizer import Optimizer
from contraflow.train.routing import prepare_routers
from contraflow.train.update import Updater
from contraflow.types import Sample
from tests.parallel import ranks
from tests.parallel.equal import MODELS, make_folder, objective, samples
from tests.parallel.test_equal import check, fits

pytestmark = pytest.mark.timeout(300)  # several processes; on a busy machine they wait for each other
AGAIN = {"recompute": "layer"}
INTERLEAVED = {"schedule": "interleaved"}
TWO = [
    Parallel(dp=2, ep=2),
    Parallel(tp=2, ep=2),
    Parallel(cp=2, ep=2, **AGAIN),
    Parallel(pp=2, **INTERLEAVED, **AGAIN),
]
FOUR = [
    Parallel(pp=2, dp=2, ep=2, **AGAIN),
    Parallel(cp=2, tp=2, ep=4),
    Parallel(dp=2, tp=2, ep=2, **AGAIN),
    Parallel(dp=4, ep=4),
]


def test_two_ranks_train_as_one_on_given_experts(tmp_path: Path) -> None:
    data, heads, context, stages = TWO
    cases = [(data, "deepseek_v3"), (heads, "qwen3_moe"), (context, "olmoe"), (stages, "qwen3_moe")]
    check(cases, tmp_path, 2, layers=4, routed=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_train_as_one_on_given_experts_whatever_the_family(tmp_path: Path) -> None:
    families = [family for family in MODELS if "experts" in MODELS[family]]
    cases = [case for case in itertools.product(TWO, families) if fits(*case)]
    check(cases, tmp_path, 2, layers=5, routed=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_ranks_train_as_one_on_given_experts(tmp_path: Path) -> None:
    check([(parallel, "olmoe") for parallel in FOUR], tmp_path, 4, layers=4, routed=True)


def looked(mesh: Mesh, folder: Path, made: list[Sample]) -> list[Any]:
    decoder = load_spread(folder, mesh).decoder
    crew = open_crew(decoder, mesh, Account(lambda: 0.0), temperature=1.0)
    experts = decoder.config.experts
    found = look(made, {}, crew, device=torch.device("cpu"), tokens_per_batch=30, experts=experts)
    return [one.routes for one in found]


def alone(folder: Path, made: list[Sample]) -> list[Any]:
    """One sample after the other, by a plain forward pass."""
    decoder, found = load_spread(folder, None).decoder, []
    for one in made:
        (batch,) = pack([one], tokens_per_batch=99, reduction="token")
        fed, tape = feed(batch, torch.device("cpu")), RouterTape()
        with torch.no_grad():
            decoder(fed.tokens_F, fed.positions_F, fed.plan, tape=tape)
        found.append(tape.routes().numpy())
    return found


@pytest.mark.parametrize("parallel", [TWO[0], *TWO[2:]], ids=["dp", "cp", "pp"])
def test_every_rank_learns_the_choices_of_a_first_pass_by_all(tmp_path: Path, parallel: Parallel) -> None:
    folder, made = make_folder("olmoe", tmp_path, 4), samples(11, seed=3)
    wanted = alone(folder, made)
    for found in ranks.run(looked, parallel, tmp_path, folder, made):
        for ids, known in zip(found, wanted, strict=True):
            assert ids.dtype == np.uint8
            assert np.array_equal(ids, known)


def frozen(mesh: Mesh | None, folder: Path) -> tuple[list[float], Any]:
    spread = load_spread(folder, mesh)
    prepare_routers(spread.decoder, "own", freeze=True)
    optimizer = Optimizer(spread.decoder, Train(warmup_updates=0), spread)
    crew = open_crew(spread.decoder, mesh, Account(lambda: 0.0), temperature=1.0)
    updater = Updater(spread.decoder, optimizer, Account(lambda: 0.0), crew, balance_weight=0.1)
    losses = []
    for seed in range(3):
        batches = pack(samples(6, seed=seed), tokens_per_batch=40, reduction="token", shares=crew.team.shares)
        losses.append(updater.update(batches, objective).loss)
    return losses, {name: whole for name, whole in spread.tensors() if "router" in name}


def test_frozen_routers_stay_on_several_ranks_too(tmp_path: Path) -> None:
    folder = make_folder("glm4_moe", tmp_path)
    before = {n: t.clone() for n, t in load_spread(folder, None).tensors() if "router" in n and t is not None}
    losses, _ = frozen(None, folder)
    (found, routers), *_ = ranks.run(frozen, Parallel(dp=2), tmp_path, folder)
    assert found == pytest.approx(losses, rel=1e-5)
    assert found[2] != found[0]
    assert routers.keys() == before.keys()
    assert all(torch.equal(routers[name], before[name]) for name in before)
