"""The gradient's norm is that of the whole model, wherever its parts lie, and all ranks clip and refuse alike."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from contraflow.config import Parallel, Train
from contraflow.errors import TrainingError
from contraflow.parallel.data import local
from contraflow.parallel.mesh import open_mesh
from contraflow.parallel.pieces import take
from contraflow.parallel.spread import Spread, load_spread
from contraflow.train.optimizer import Optimizer
from tests.dispatch import gloo
from tests.parallel.equal import difference, make_folder

pytestmark = pytest.mark.timeout(300)  # several processes; on a busy machine they wait for each other
TRAIN = Train(learning_rate=1e-3, warmup_updates=0, clip_norm=0.5, weight_decay=0.1)
DOMINANT = ("layers.0.mlp.gate_up", 5)  # the gradient of one expert outweighs everything else


def gradient(spread: Spread, name: str, spoiled: str = "") -> torch.Tensor:
    """A whole one, the same on every rank."""
    noise = torch.Generator().manual_seed(sum(map(ord, name)))
    whole = torch.randn(spread.shapes[name], generator=noise) * 1e-3
    if name == DOMINANT[0]:
        whole[DOMINANT[1]] *= 1e6
    if name == spoiled:
        whole[-1].fill_(math.inf)
    return whole


def fill(spread: Spread, spoiled: str = "") -> None:
    for name, parameter in spread.decoder.named_parameters():
        whole = gradient(spread, name, spoiled)
        parameter.grad = torch.zeros_like(parameter)
        local(parameter.grad).copy_(whole if spread.mesh is None else take(whole, spread.pieces[name]))


def applied(spread: Spread) -> tuple[float, dict[str, Any], str, dict[str, Any]]:
    """Norm and weights after one update; what is said of a gradient with an infinity in one expert, and the weights."""
    optimizer = Optimizer(spread.decoder, TRAIN, spread)
    fill(spread)
    norm = optimizer.apply().grad_norm
    moved = {name: None if whole is None else whole.clone() for name, whole in spread.tensors()}
    fill(spread, "layers.1.mlp.down")
    with pytest.raises(TrainingError) as fault:
        optimizer.apply()
    return norm, moved, str(fault.value), dict(spread.tensors())


def on_ranks(store: Any, rank: int, layouts: list[Parallel], folder: Path, meeting: Path) -> list[Any]:
    dist.destroy_process_group()
    found = []
    for place, parallel in enumerate(layouts):
        with open_mesh(parallel, rank=rank, init_method=f"file://{meeting}/{place}") as mesh:
            found.append(applied(load_spread(folder, mesh)))
    return found


def test_one_dominant_expert_clips_the_whole_model_alike_on_every_rank(tmp_path: Path) -> None:
    layouts = [Parallel(dp=2), Parallel(dp=2, ep=2), Parallel(tp=2, ep=2), Parallel(tp=2), Parallel(pp=2)]
    folder = make_folder("olmoe", tmp_path)
    one = load_spread(folder, None)
    exact = math.sqrt(sum(float(gradient(one, name).double().square().sum()) for name in one.shapes))
    norm, moved, fault, _ = applied(one)
    assert norm == pytest.approx(exact, rel=1e-6)
    assert fault == "the gradient of 'layers.1.mlp.down' is not finite (norm inf)"
    by_rank = gloo.run(on_ranks, 2, tmp_path, layouts, folder, tmp_path)
    for place, layout in enumerate(layouts):
        for found in (answers[place] for answers in by_rank):
            assert found[0] == pytest.approx(exact, rel=1e-6), layout
            assert found[2] == fault, layout  # every rank refuses, whoever holds the bad one
        _, weights, _, after = by_rank[0][place]
        assert all(difference(weights[name], whole) <= 1e-6 for name, whole in moved.items()), layout
        assert all(torch.equal(after[name], weights[name]) for name in weights), layout
