"""Cuts for tests: a space of them in a folder, one written and committed in a row, what it holds, and damage to it."""

from pathlib import Path
from typing import Any

import torch

from contraflow.cuts import CutId, Part
from contraflow.train.checkpoint import Snapshot, commit
from contraflow.train.shards import Shards
from contraflow.train.worker import Trainer
from tests.cut_writer import space_in


def save(folder: Path, cut: Any, *, keep: int = 9, writer: str = "w", **of: Any) -> str:
    space = space_in(folder)
    parts = Snapshot(cut, **of).write(space, writer)
    return commit(space, cut, writer, parts, keep=keep, about={})


async def saved(trainer: Any, step: int) -> str:
    """A cut by a trainer of any number of ranks, whose gang this is; its name."""
    await trainer.call(60, Trainer.save, step)
    by_rank = await trainer.call(60, Trainer.saved)
    parts = [part for parts in by_rank for part in parts]
    return await trainer.refs[0].call(60, Trainer.commit, parts, {})


def whole(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Every tensor of a cut, weights and moments, put together from its parts without the code that loads them."""
    space = space_in(folder)
    manifest = space.manifest(name)
    shards = Shards(space, manifest)
    found: dict[str, torch.Tensor] = {f"{name}:step": torch.tensor(count) for name, count in shards.steps.items()}
    for part, entries in shards._where.items():
        slabs = shards._slabs(part)
        for entry in entries:
            label = f"{entry.name}:{entry.kind}"
            need = [end for _, end in entry.box]
            old = found.get(label, torch.full([0] * len(need), torch.nan))
            shape = [max(a, b) for a, b in zip(old.shape, need, strict=True)]
            grown = torch.full(shape, torch.nan)
            grown[tuple(slice(0, n) for n in old.shape)] = old
            grown[tuple(slice(start, end) for start, end in entry.box)] = slabs[entry.key]
            found[label] = grown
    return found


def file_of(folder: Path, cut: CutId, part: str) -> Path:
    return folder / "parts" / cut.name / cut.writer / part


def files(folder: Path, name: str) -> list[Part]:
    return list(space_in(folder).manifest(name).parts)
