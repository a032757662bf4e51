"""The trainer's side of a cut: what every rank adds to it, the way back on any layout, and a model folder made of one.

Takes a model, its optimizer and where the run stands; gives parts for `cuts/` to commit, and a trainer that goes on
bit for bit. There is no random state to keep: what any worker draws is a function of (seed, step or group, position).
Does not decide when to save, or know what the buffer adds.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from contraflow.cuts import EARLIER, NAME, CutId, CutManifest, CutSpace, Part, cut_name
from contraflow.errors import BlobError, CheckpointError
from contraflow.model.families import ModelConfig
from contraflow.model.folder import COMPANIONS, write_folder
from contraflow.parallel.data import local
from contraflow.parallel.mesh import Mesh
from contraflow.parallel.spread import Spread, empty_spread
from contraflow.parallel.team import Team
from contraflow.train.critic import Critic
from contraflow.train.critic_cut import CriticCopy, CriticCut
from contraflow.train.cut_reading import CONFIG, POLICY, Alike, model_config, read_model
from contraflow.train.optimizer import Optimizer
from contraflow.train.shards import WEIGHT, Copy, Shards


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run stands: before step `step`, on history `line`, after `updates` optimizer updates.

    The learning rate is a function of `updates`.
    """

    line: int
    step: int
    updates: int
    seed: int
    model: str  # digest of the model's configuration
    recipe: str  # digest of what decides the training arithmetic; for the record, not enforced
    critic: CriticCut | None = None  # what is in it of a critic

    @property
    def name(self) -> str:
        """Of its manifest."""
        return cut_name(self.line, self.step)


class Snapshot:
    """A consistent copy of what this rank adds to a cut, on the host; see `Copy` for its size."""

    def __init__(
        self, cut: Cut, *, spread: Spread, optimizer: Optimizer, companions: Path, critic: Critic | None = None
    ) -> None:
        """`companions` is the model folder whose tokenizer files go along, with rank 0."""
        self._critic = None if critic is None else CriticCopy(critic, spread)
        self.cut = cut if self._critic is None else msgspec.structs.replace(cut, critic=self._critic.about)
        self._copy = Copy(spread, optimizer)
        self._files: dict[str, bytes] = {}
        if spread.first:
            present = [companions / name for name in COMPANIONS if (companions / name).is_file()]
            self._files = {file.name: file.read_bytes() for file in present}
            self._files[CONFIG] = json.dumps(spread.config.to_hf()).encode()

    def write(self, space: CutSpace, writer: str) -> list[Part]:
        """Put this rank's parts; nothing is visible yet. Raises CheckpointError: what was written is deleted."""
        here = CutId(self.cut.name, writer)
        try:
            files = [space.put(here, f"model/{name}", data) for name, data in self._files.items()]
            of_critic = [] if self._critic is None else self._critic.write(space, here)
            return [*files, *self._copy.write(space, here), *of_critic]
        except BlobError as fault:
            raise _unwritten(space, here, fault) from fault


class Loaded(NamedTuple):
    """A checkpoint read back, every part's digest verified; `spread` and `moments` are this rank's parts."""

    cut: Cut
    spread: Spread
    moments: dict[str, Tensor]
    manifest: CutManifest


def commit(space: CutSpace, cut: Cut, writer: str, parts: list[Part], *, keep: int, about: dict[str, Any]) -> str:
    """Make a cut of all ranks' parts visible, then forget all but the newest `keep`; gives its name.

    Raises CutTaken when another writer was first, CheckpointError when it cannot be written: nothing of it is seen.
    """
    here = CutId(cut.name, writer)
    try:
        space.commit(here, parts, {**about, "cut": msgspec.to_builtins(cut)})
        space.tidy(here, keep)
    except BlobError as fault:
        raise CheckpointError(f"cut {cut.name} in {space.url} could not be committed: {fault}; {EARLIER}") from fault
    return cut.name


def cut_of(manifest: CutManifest) -> Cut:
    """Where a run that goes on from it stands. Raises CheckpointError."""
    try:
        return msgspec.convert(manifest.about.get("cut"), Cut)
    except msgspec.ValidationError as fault:
        raise CheckpointError(f"cut {manifest.id.name} does not say where it stands: {fault}") from None


def load(
    space: CutSpace,
    name: str,
    mesh: Mesh | None = None,
    *,
    expected_model: str | None = None,
    device: torch.device | str = "cpu",
    compute: torch.dtype = torch.float32,
    max_tokens: int | None = None,
) -> Loaded:
    """Read a cut back, on a mesh this rank's part of it. `device`, `compute`, `max_tokens` as for `load_spread`.

    Collective. Raises CheckpointError, on all ranks alike, when it is torn, altered or of another model than
    `expected_model`.
    """
    with Alike(Team(mesh)) as reading:
        manifest = space.manifest(name)
        cut = cut_of(manifest)
    reading.settle()
    where: dict[str, Any] = {"device": device, "compute": compute, "max_tokens": max_tokens}
    found = read_model(
        space, manifest, mesh, POLICY, lambda config: _check_model(cut, config, expected_model, space), **where
    )
    return Loaded(cut, found.spread, found.moments, manifest)


def export(space: CutSpace, name: str, folder: Path) -> None:
    """Write the model of a cut as a Hugging Face folder, with its tokenizer. Holds the weights once, in fp32.

    Raises CheckpointError, BlobError, ModelError when the folder cannot be written.
    """
    manifest = space.manifest(name)
    spread, shards = empty_spread(model_config(space, manifest), None), Shards(space, manifest)
    weights = {(name, WEIGHT): local(parameter) for name, parameter in spread.decoder.named_parameters()}
    shards.fill(weights, spread)
    write_folder(spread.config, spread.decoder.named_parameters(), folder)
    for part in manifest.below("model"):
        companion = part.name.removeprefix("model/")
        if companion in COMPANIONS:
            (folder / companion).write_bytes(space.read(manifest, part))


def split(reference: str) -> tuple[str, str]:
    """`URL/line-L-step-N` as the space and the name in it; the name is empty when the reference ends in none."""
    url, _, last = reference.rstrip("/").rpartition("/")
    return (url or ".", last) if NAME.fullmatch(last) else (reference, "")


def _unwritten(space: CutSpace, here: CutId, fault: BlobError) -> CheckpointError:
    failure = CheckpointError(f"cut {here.name} in {space.url} could not be written: {fault}; {EARLIER}")
    try:
        space.discard(here)
    except BlobError as more:
        failure.add_note(f"what was written of it remains until a later cut is committed: {more}")
    return failure


def _check_model(cut: Cut, config: ModelConfig, expected: str | None, space: CutSpace) -> None:
    if cut.model != config.digest():
        raise CheckpointError(f"cut {cut.name} in {space.url} says model {cut.model}, but holds {config.digest()}")
    if expected is not None and cut.model != expected:
        raise CheckpointError(
            f"cut {cut.name} in {space.url} holds model {cut.model}, the recipe's model is {expected}; "
            "resume with the recipe the run was started with"
        )
