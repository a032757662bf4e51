"""A checkpoint is the same file for file, whatever ranks read it and write it again."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from contraflow.config import Parallel
from contraflow.errors import CheckpointError
from contraflow.model.folder import load_folder
from contraflow.parallel.mesh import Mesh, open_mesh
from contraflow.parallel.spread import Spread
from contraflow.telemetry import Account
from contraflow.train.batcher import pack
from contraflow.train.checkpoint import Cut, load, save
from contraflow.train.optimizer import Optimizer
from contraflow.train.update import Updater
from tests.dispatch import gloo
from tests.parallel.equal import TRAIN, make_folder, objective, samples

pytestmark = pytest.mark.timeout(300)  # several processes; on a busy machine they wait for each other
TWO = [Parallel(dp=2), Parallel(dp=2, ep=2), Parallel(tp=2, ep=2), Parallel(pp=2), Parallel(cp=2, ep=2)]
FOUR = [
    Parallel(dp=4),
    Parallel(dp=4, ep=4),
    Parallel(dp=2, tp=2, ep=2),
    Parallel(dp=2, tp=2),
    Parallel(pp=2, tp=2, ep=2),
    Parallel(pp=2, dp=2, ep=2),
    Parallel(dp=2, cp=2, ep=4),
]


def trained_cut(family: str, folder: Path) -> Path:
    """A cut of one rank after two updates."""
    decoder = load_folder(make_folder(family, folder))
    optimizer = Optimizer(decoder, TRAIN)
    for seed in range(2):
        batches = pack(samples(4, seed=seed), tokens_per_batch=1000, reduction="token")
        Updater(decoder, optimizer, Account(lambda: 0.0)).update(batches, objective)
    cut = Cut(line=0, step=2, updates=2, seed=1, model=decoder.config.digest(), recipe="r")
    return save(folder / "cut" / family, cut, spread=Spread(decoder), optimizer=optimizer, companions=folder, keep=1)


def rewrite(cut_folder: Path, into: Path, mesh: Any) -> Path:
    """Load a cut as training does, and save it again."""
    loaded = load(cut_folder, mesh)
    optimizer = Optimizer(loaded.spread.decoder, TRAIN, loaded.spread)
    optimizer.load(loaded.moments, loaded.cut.updates)
    return save(into, loaded.cut, spread=loaded.spread, optimizer=optimizer, companions=cut_folder / "model", keep=1)


def passed_on(store: Any, rank: int, cut_folder: Path, layouts: list[Parallel], folder: Path) -> tuple[list[Path], str]:
    """From layout to layout: each reads what the one before it wrote. At last, what is said of one that is torn."""
    dist.destroy_process_group()
    written = []
    for place, parallel in enumerate(layouts):
        with open_mesh(
            parallel, rank=rank, init_method=f"file://{folder}/meet-{cut_folder.parent.name}-{place}"
        ) as mesh:
            cut_folder = rewrite(
                cut_folder, folder / f"{cut_folder.parent.name}-{place}" / cut_folder.parent.name, mesh
            )
            written.append(cut_folder)
            dist.barrier()
            if place == len(layouts) - 1:
                return written, refusal(folder / "torn", mesh)
    raise AssertionError("no layout was given")


def refusal(cut_folder: Path, mesh: Mesh) -> str:
    with pytest.raises(CheckpointError) as fault:
        load(cut_folder, mesh)
    return str(fault.value)


def digests(cut_folder: Path) -> dict[str, str]:
    return msgspec.json.decode((cut_folder / "files.json").read_bytes())


def check(family: str, layouts: list[Parallel], world: int, tmp_path: Path) -> None:
    first = trained_cut(family, tmp_path)
    shutil.copytree(first, tmp_path / "torn")
    (tmp_path / "torn" / "optimizer.safetensors").write_bytes(b"torn")
    answers = gloo.run(passed_on, world, tmp_path, first, layouts, tmp_path)
    written = answers[0][0]
    assert len({said for _, said in answers}) == 1  # every rank refuses a torn cut, with the same words
    assert "'optimizer.safetensors' was altered" in answers[0][1]
    back = rewrite(written[-1], tmp_path / "back", None)
    assert len(digests(first)) >= 4
    for layout, cut_folder in zip([*layouts, None], [*written, back], strict=True):
        assert digests(cut_folder) == digests(first), layout


def test_two_ranks_of_any_layout_read_and_write_what_one_rank_wrote(tmp_path: Path) -> None:
    check("olmoe", TWO, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
def test_four_ranks_of_any_layout_read_and_write_what_one_rank_wrote(family: str, tmp_path: Path) -> None:
    check(family, FOUR if family == "olmoe" else [p for p in FOUR if p.pp == 1], 4, tmp_path)


def test_moments_of_a_model_that_are_not_its_own_are_refused(tmp_path: Path) -> None:
    cut_folder = trained_cut("qwen3", tmp_path)
    save_file({"strange:exp_avg": torch.zeros(1)}, cut_folder / "optimizer.safetensors")
    files = digests(cut_folder)
    files["optimizer.safetensors"] = hashlib.sha256((cut_folder / "optimizer.safetensors").read_bytes()).hexdigest()
    (cut_folder / "files.json").write_bytes(msgspec.json.encode(files))
    with pytest.raises(CheckpointError, match="'strange:exp_avg' does not fit"):
        load(cut_folder)
