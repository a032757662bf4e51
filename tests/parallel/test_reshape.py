"""A cut holds the same bits, whatever ranks wrote it and read it: each writes its own part, and reads what it needs."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from contraflow.config import Parallel
from contraflow.cuts import CutId
from contraflow.errors import CheckpointError
from contraflow.model.folder import load_folder
from contraflow.parallel.mesh import Mesh, open_mesh
from contraflow.parallel.spread import Spread
from contraflow.telemetry import Account
from contraflow.train.batcher import pack
from contraflow.train.checkpoint import Cut, Snapshot, commit, load
from contraflow.train.optimizer import Optimizer
from contraflow.train.shards import Index
from contraflow.train.update import Updater
from tests.cut_writer import space_in
from tests.dispatch import gloo
from tests.parallel.equal import TRAIN, make_folder, objective, samples
from tests.train.cutting import file_of, files, save, whole

pytestmark = pytest.mark.timeout(300)  # several processes; on a busy machine they wait for each other
NAME = "line-0-step-2"
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
    save(folder / "cut" / family, cut, spread=Spread(decoder), optimizer=optimizer, companions=folder)
    return folder / "cut" / family


def rewrite(cuts: Path, into: Path, mesh: Any) -> Path:
    """Load a cut as training does, and save it again, each rank its part; rank 0 commits them all."""
    loaded = load(space_in(cuts), NAME, mesh)
    optimizer = Optimizer(loaded.spread.decoder, TRAIN, loaded.spread)
    optimizer.load(loaded.moments, loaded.cut.updates)
    space = space_in(into)
    taken = Snapshot(loaded.cut, spread=loaded.spread, optimizer=optimizer, companions=cuts)
    parts = taken.write(space, "w")
    if mesh is not None:
        by_rank: list[Any] = [None] * mesh.parallel.ranks
        dist.all_gather_object(by_rank, parts, group=mesh.world)
        parts = [part for parts in by_rank for part in parts]
    if loaded.spread.first:
        commit(space, loaded.cut, "w", parts, keep=1, about={})
    return into


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
        load(space_in(cut_folder), NAME, mesh)
    return str(fault.value)


def check(family: str, layouts: list[Parallel], world: int, tmp_path: Path) -> None:
    first = trained_cut(family, tmp_path)
    shutil.copytree(first, tmp_path / "torn")
    file_of(tmp_path / "torn", CutId(NAME, "w"), "rank-00000/00000").write_bytes(b"torn")
    answers = gloo.run(passed_on, world, tmp_path, first, layouts, tmp_path)
    written = answers[0][0]
    assert len({said for _, said in answers}) == 1  # every rank refuses a torn cut, with the same words
    assert "'rank-00000/00000' has 4 bytes of" in answers[0][1]
    back = rewrite(written[-1], tmp_path / "back", None)
    wanted = whole(first, NAME)
    assert len(wanted) > 40
    assert all(bool(tensor.isfinite().all()) for tensor in wanted.values())
    for layout, cuts in zip([*layouts, None], [*written, back], strict=True):
        found = whole(cuts, NAME)
        assert found.keys() == wanted.keys(), layout
        assert all(torch.equal(found[label], wanted[label]) for label in wanted), layout
        shares = [sum(part.size for part in files(cuts, NAME) if part.name.startswith(f"rank-{r:05d}")) for r in (0, 1)]
        assert layout is None or min(shares) > max(shares) / 3, layout  # nobody writes for all


def test_two_ranks_of_any_layout_read_and_write_what_one_rank_wrote(tmp_path: Path) -> None:
    check("olmoe", TWO, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
def test_four_ranks_of_any_layout_read_and_write_what_one_rank_wrote(family: str, tmp_path: Path) -> None:
    check(family, FOUR if family == "olmoe" else [p for p in FOUR if p.pp == 1], 4, tmp_path)


def test_moments_of_a_model_that_are_not_its_own_are_refused(tmp_path: Path) -> None:
    cuts = trained_cut("qwen3", tmp_path)
    space = space_in(cuts)
    manifest = space.manifest(NAME)
    here = CutId("line-0-step-3", "w")
    parts = [space.put(here, part.name, space.read(manifest, part)) for part in manifest.parts]
    strange = Index({}, {"strange": 2.0})
    parts.append(space.put(here, "rank-00009/index", msgspec.json.encode(strange)))
    space.commit(here, parts, manifest.about)
    with pytest.raises(CheckpointError, match="'strange' does not fit"):
        load(space, here.name)
