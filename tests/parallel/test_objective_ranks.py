"""A whole step with ratios by sequence, a proximal policy and penalties in the reward: on several ranks as on one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from contraflow.config import Loss, Parallel, Train
from contraflow.parallel.mesh import open_mesh
from contraflow.parallel.spread import Spread, load_spread
from contraflow.telemetry import Account
from contraflow.train.crew import open_crew
from contraflow.train.optimizer import Optimizer
from contraflow.train.step import Numbers, TrainStep
from tests.dispatch import gloo
from tests.parallel.equal import difference, make_folder, samples

pytestmark = pytest.mark.timeout(300)  # several processes; on a busy machine they wait for each other
LOSSES = [
    Loss(surrogate="gspo", old="proximal", corrections={"geometric_mask": (0.1, 0.4), "tis": (0.1, 0.3)}),
    Loss(surrogate="cispo", advantages="reinforce++", kl_in="reward", kl_kind="k1", kl_weight=0.1),
]
TRAIN = Train(warmup_updates=0, clip_norm=0.5, updates=2, tokens_per_batch=40)


def step_on(spread: Spread, reference: Spread, loss: Loss) -> tuple[Numbers, dict[str, Any]]:
    account = Account(lambda: 0.0)
    crew = open_crew(spread.decoder, spread.mesh, account, temperature=0.9)
    step = TrainStep(
        spread.decoder,
        Optimizer(spread.decoder, TRAIN, spread),
        account,
        train=TRAIN,
        loss=loss,
        temperature=0.9,
        reference=reference.decoder.requires_grad_(False),
        crew=crew,
    )
    by_group = [[msgspec.structs.replace(s, behaviour=3 * s.behaviour) for s in samples(3, seed=n)] for n in range(6)]
    outcome = step.run(by_group, step=4, seed=2)
    assert outcome.fault == ""
    return outcome.numbers, dict(spread.tensors())


def on_ranks(store: Any, rank: int, cases: Sequence[tuple[Parallel, Loss]], folder: Path, meeting: Path) -> list[Any]:
    dist.barrier()
    dist.destroy_process_group()
    seen = []
    for index, (parallel, loss) in enumerate(cases):
        with open_mesh(parallel, rank=rank, init_method=f"file://{meeting}/{index}") as mesh:
            seen.append(step_on(load_spread(folder, mesh), load_spread(folder, mesh), loss))
    return seen


def check(layouts: Sequence[Parallel], world: int, tmp_path: Path) -> None:
    folder = make_folder("qwen3_moe", tmp_path, 4)
    cases = [(parallel, loss) for parallel in layouts for loss in LOSSES]
    by_rank = gloo.run(on_ranks, world, tmp_path, cases, folder, tmp_path)
    for place, (parallel, loss) in enumerate(cases):
        numbers, weights = step_on(load_spread(folder, None), load_spread(folder, None), loss)
        assert numbers.updates == 2
        if loss.corrections:
            assert all(0 < share < 1 for share in numbers.corrected.values())
        for rank in by_rank:
            found = rank[place][0]
            for name in ("loss", "kl", "entropy", "ratio_mean", "clipped_high", "effective", "grad_norm"):
                assert getattr(found, name) == pytest.approx(getattr(numbers, name), rel=1e-4, abs=1e-7), (
                    parallel,
                    name,
                )
            assert found.corrected == pytest.approx(numbers.corrected)
        for name, wanted in weights.items():
            assert difference(by_rank[0][place][1][name], wanted) <= 1e-5, (parallel, loss.surrogate, name)


def test_two_ranks_step_as_one(tmp_path: Path) -> None:
    check([Parallel(dp=2, ep=2), Parallel(cp=2)], 2, tmp_path)


@pytest.mark.slow
def test_stages_and_heads_on_two_ranks_step_as_one(tmp_path: Path) -> None:
    check([Parallel(tp=2), Parallel(pp=2)], 2, tmp_path)


@pytest.mark.slow
def test_four_ranks_step_as_one(tmp_path: Path) -> None:
    check([Parallel(dp=2, ep=4, cp=2), Parallel(dp=2, pp=2), Parallel(cp=2, tp=2, ep=2)], 4, tmp_path)
