"""Cuts: everything a run needs to go on bit for bit, written whole or not at all.

Takes a model, its optimizer and where the run stands; gives a folder `line-L-step-N` with `model/` (a Hugging Face
folder), `optimizer.safetensors` (or, beyond 2 GiB, several), `state.json` and `files.json` (digests of all the others).
Written beside its place, synced, then renamed. There is no random state to keep: what the trainer draws is a function
of (seed, step). It holds whole tensors by name and nothing of the ranks that wrote it, so a trainer of any layout goes
on from it. Does not decide when to save, or read the buffer's ledger.
"""

import hashlib
import itertools
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor

from contraflow.errors import CheckpointError, ModelError
from contraflow.model.families import ModelConfig
from contraflow.model.folder import copy_companions, tensor_names, write_folder, write_shards
from contraflow.model.names import Part
from contraflow.model.reading import TensorFiles
from contraflow.parallel.mesh import Mesh
from contraflow.parallel.spread import Spread, load_spread
from contraflow.parallel.team import Team
from contraflow.train.optimizer import Optimizer

_NAME = re.compile(r"line-(\d+)-step-(\d+)")
T = TypeVar("T")
Named = Iterable[tuple[str, Tensor]]


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run stands: before step `step`, on history `line`, after `updates` optimizer updates."""

    line: int
    step: int
    updates: int
    seed: int
    model: str  # digest of the model's configuration
    recipe: str  # digest of what decides the training arithmetic; for the record, not enforced


class Loaded(NamedTuple):
    """A checkpoint read back, every file's digest verified; `spread` and `moments` are this rank's parts."""

    cut: Cut
    spread: Spread
    moments: dict[str, Tensor]


def save(folder: Path, cut: Cut, *, spread: Spread, optimizer: Optimizer, companions: Path, keep: int) -> Path:
    """Write a cut into `folder`, then forget all but the newest `keep`; gives the cut's own folder.

    Collective: rank 0 writes, one tensor after the other. `companions` is the model folder whose tokenizer files go
    along. A cut of the same line and step that is already there whole is left as it is. Raises CheckpointError, on rank
    0, when it cannot be written (a full disk): nothing of it remains, and the earlier ones are untouched.
    """
    tensors, moments = spread.tensors(), optimizer.whole_moments()
    try:
        if spread.first:
            _save(folder, cut, spread.config, _present(tensors), _present(moments), companions, keep)
    finally:  # the others hand over what is asked for, and must not be left waiting
        for _ in itertools.chain(tensors, moments):
            pass
    return folder / _name(cut)


def load(
    cut_folder: Path,
    mesh: Mesh | None = None,
    *,
    expected_model: str | None = None,
    device: torch.device | str = "cpu",
    compute: torch.dtype = torch.float32,
    max_tokens: int | None = None,
) -> Loaded:
    """Read a cut back, on a mesh this rank's part of it. `device`, `compute`, `max_tokens` as for `load_spread`.

    Collective. Raises CheckpointError when it is torn, altered or of another model than `expected_model`.
    """
    team, fault = Team(mesh), ""
    if team.first:  # one reader of whole files is enough
        try:
            _verify(cut_folder)
        except CheckpointError as torn:
            fault = str(torn)
    if fault := team.words(fault)[0]:
        raise CheckpointError(fault)
    cut = _decode(cut_folder / "state.json", Cut)
    if expected_model is not None and cut.model != expected_model:
        raise CheckpointError(
            f"checkpoint {cut_folder} holds model {cut.model}, the recipe's model is {expected_model}; "
            "resume with the recipe the run was started with"
        )
    try:
        spread = load_spread(cut_folder / "model", mesh, device=device, compute=compute, max_tokens=max_tokens)
        return Loaded(cut, spread, _moments(cut_folder, spread))
    except (OSError, ModelError) as error:
        raise CheckpointError(f"checkpoint {cut_folder} cannot be read: {error}") from error


def cuts(folder: Path) -> list[Path]:
    """All cuts in a folder, whole or not, newest first: a later line is newer, whatever its step."""
    found = [(match, path) for path in folder.glob("line-*-step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda pair: (int(pair[0][1]), int(pair[0][2])), reverse=True)]


def latest(folder: Path) -> Path | None:
    """The newest cut that is whole; torn ones are passed over. None when there is none."""
    return next((path for path in cuts(folder) if is_whole(path)), None)


def cut_step(cut_folder: Path) -> int:
    """The step a resumed run begins with. Raises CheckpointError when the state cannot be read."""
    return _decode(cut_folder / "state.json", Cut).step


def is_whole(cut_folder: Path) -> bool:
    """Whether every file is there and has its digest."""
    try:
        _verify(cut_folder)
    except CheckpointError:
        return False
    return True


def _name(cut: Cut) -> str:
    return f"line-{cut.line}-step-{cut.step}"


def _present(tensors: Iterable[tuple[str, Tensor | None]]) -> Iterator[tuple[str, Tensor]]:
    return ((name, whole) for name, whole in tensors if whole is not None)


def _save(
    folder: Path, cut: Cut, config: ModelConfig, tensors: Named, moments: Named, companions: Path, keep: int
) -> None:
    final, draft = folder / _name(cut), folder / f".writing-{_name(cut)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        if final.exists():
            if is_whole(final):
                return
            _remove(final)
        _write(draft, cut, config, tensors, moments, companions)
        draft.rename(final)
        _sync(folder)
        for old in cuts(folder)[keep:]:
            _remove(old)
    except (OSError, SafetensorError, ModelError) as fault:
        shutil.rmtree(draft, ignore_errors=True)  # what is left of a failed draft is swept by the next save
        raise CheckpointError(
            f"checkpoint {final} could not be written: {fault}; earlier ones are untouched, free some space and resume"
        ) from fault


def _write(draft: Path, cut: Cut, config: ModelConfig, tensors: Named, moments: Named, companions: Path) -> None:
    model = draft / "model"
    model.mkdir(parents=True)
    write_folder(config, tensors, model)
    copy_companions(companions, model)
    write_shards(draft, "optimizer", moments)
    (draft / "state.json").write_bytes(msgspec.json.encode(cut))
    digests = {str(path.relative_to(draft)): _digest(path) for path in _files(draft)}
    (draft / "files.json").write_bytes(msgspec.json.encode(digests))
    for path in [*_files(draft), model, draft]:
        _sync(path)


def _moments(cut_folder: Path, spread: Spread) -> dict[str, Tensor]:
    """This rank's part of the optimizer's state."""
    files = sorted(cut_folder.glob("optimizer*.safetensors"))
    where = {label: file for file in files for label in tensor_names(file)}
    found = {}
    with TensorFiles(where) as opened:
        for label in where:
            name, _, key = label.rpartition(":")
            if name not in spread.shapes:
                raise CheckpointError(f"checkpoint {cut_folder}: optimizer state {label!r} does not fit its model")
            if not spread.holds(name):
                continue
            if key == "step":
                found[label] = opened.read([Part(label, ())], ())
            else:
                found[label] = spread.read(opened, name, [Part(label, spread.shapes[name])])
    return found


def _verify(cut_folder: Path) -> None:
    expected = _decode(cut_folder / "files.json", dict[str, str])
    present = {str(path.relative_to(cut_folder)) for path in _files(cut_folder)} - {"files.json"}
    if present != expected.keys() or "state.json" not in expected:
        odd = sorted(present ^ expected.keys()) or ["state.json"]
        raise CheckpointError(f"checkpoint {cut_folder} is torn: {odd[0]!r} is missing or not listed in files.json")
    for name, digest in expected.items():
        if (found := _digest(cut_folder / name)) != digest:
            raise CheckpointError(f"checkpoint {cut_folder}: {name!r} was altered (digest {found}, was {digest})")


def _decode(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as fault:
        raise CheckpointError(f"checkpoint file {path} cannot be read: {fault}") from fault


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    """Out of sight first: a removal that is interrupted must not leave half a cut under its name."""
    doomed = path.with_name(f".removing-{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _sweep(folder: Path) -> None:
    for pattern in (".writing-*", ".removing-*"):
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover)
