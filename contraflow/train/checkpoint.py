"""Cuts: everything a run needs to go on bit for bit, written whole or not at all.

Takes a decoder, the optimizer's moments and where the run stands; gives a folder `line-L-step-N` with `model/` (a
Hugging Face folder), `optimizer.safetensors`, `state.json` and `files.json` (digests of all the others). Written beside
its place, synced, then renamed. There is no random state to keep: what the trainer draws is a function of (seed, step).
Does not decide when to save, or read the buffer's ledger.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from contraflow.errors import CheckpointError, ModelError
from contraflow.model.decoder import Decoder
from contraflow.model.folder import copy_companions, load_folder, save_folder

_NAME = re.compile(r"line-(\d+)-step-(\d+)")
T = TypeVar("T")


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run stands: before step `step`, on history `line`, after `updates` optimizer updates."""

    line: int
    step: int
    updates: int
    seed: int
    model: str  # digest of the model's configuration
    recipe: str  # digest of what decides the training arithmetic; for the record, not enforced


class Loaded(NamedTuple):
    """A checkpoint read back, every file's digest verified."""

    cut: Cut
    decoder: Decoder
    moments: dict[str, Tensor]


def save(
    folder: Path, cut: Cut, *, decoder: Decoder, moments: Mapping[str, Tensor], companions: Path, keep: int
) -> Path:
    """Write a cut into `folder`, then forget all but the newest `keep`; gives the cut's own folder.

    `companions` is the model folder whose tokenizer files go along. A cut of the same line and step that is already
    there whole is left as it is. Raises CheckpointError when it cannot be written (a full disk): nothing of it remains,
    and the earlier ones are untouched.
    """
    name = f"line-{cut.line}-step-{cut.step}"
    final, draft = folder / name, folder / f".writing-{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        if final.exists():
            if is_whole(final):
                return final
            _remove(final)
        _write(draft, cut, decoder, moments, companions)
        draft.rename(final)
        _sync(folder)
        for old in cuts(folder)[keep:]:
            _remove(old)
    except (OSError, SafetensorError, ModelError) as fault:
        shutil.rmtree(draft, ignore_errors=True)  # what is left of a failed draft is swept by the next save
        raise CheckpointError(
            f"checkpoint {final} could not be written: {fault}; earlier ones are untouched, free some space and resume"
        ) from fault
    return final


def load(cut_folder: Path, *, expected_model: str | None = None) -> Loaded:
    """Read a cut back. Raises CheckpointError when it is torn, altered or of another model than `expected_model`."""
    _verify(cut_folder)
    cut = _decode(cut_folder / "state.json", Cut)
    if expected_model is not None and cut.model != expected_model:
        raise CheckpointError(
            f"checkpoint {cut_folder} holds model {cut.model}, the recipe's model is {expected_model}; "
            "resume with the recipe the run was started with"
        )
    try:
        decoder = load_folder(cut_folder / "model")
        moments = load_tensors((cut_folder / "optimizer.safetensors").read_bytes())
    except (OSError, SafetensorError, ModelError) as fault:
        raise CheckpointError(f"checkpoint {cut_folder} cannot be read: {fault}") from fault
    return Loaded(cut, decoder, moments)


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


def _write(draft: Path, cut: Cut, decoder: Decoder, moments: Mapping[str, Tensor], companions: Path) -> None:
    model = draft / "model"
    model.mkdir(parents=True)
    save_folder(decoder, model)
    copy_companions(companions, model)
    (draft / "optimizer.safetensors").write_bytes(save_tensors(dict(moments)))
    (draft / "state.json").write_bytes(msgspec.json.encode(cut))
    digests = {str(path.relative_to(draft)): _digest(path) for path in _files(draft)}
    (draft / "files.json").write_bytes(msgspec.json.encode(digests))
    for path in [*_files(draft), model, draft]:
        _sync(path)


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
