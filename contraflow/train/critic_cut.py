"""Where a critic comes from, a model folder or a cut, and what it adds to a cut: its parts lie beside the policy's.

Takes the recipe's section and where the run stands, gives a head and a trunk with what its optimizers had; a copy of
them as parts. Does not train. The head is small and whole: rank 0 writes it, every rank reads it.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from contraflow import config
from contraflow.cuts import CutId, CutManifest, CutSpace, Part
from contraflow.errors import CheckpointError, ConfigError, CutTorn
from contraflow.model.builtin import model_folder
from contraflow.model.families import ModelConfig
from contraflow.model.folder import read_config
from contraflow.model.value import FILE, ValueHead, load_value_head
from contraflow.parallel.spread import Spread, load_spread
from contraflow.parallel.team import Team
from contraflow.train.critic import Critic
from contraflow.train.cut_reading import CONFIG, Alike, Source, read_model
from contraflow.train.shards import Copy, host

FOLDER = "critic"
TRUNK, HEAD = Source(f"{FOLDER}/{CONFIG}", f"{FOLDER}/"), f"{FOLDER}/head"


class CriticCut(msgspec.Struct, frozen=True, kw_only=True):
    """What a cut says of the critic in it."""

    trunk: str  # own or shared
    model: str  # digest of its trunk's configuration
    updates: int  # of its optimizers; the learning rate is a function of them


class Opened(NamedTuple):
    """A head on the device, a trunk unless it is the policy's, and what their optimizers had, in that order."""

    head: ValueHead
    trunk: Spread | None
    moments: tuple[dict[str, Tensor], ...] = ()
    updates: int = 0

    def resume(self, critic: Critic) -> None:
        """Let the optimizers of a critic made of these go on. Nothing for a new one."""
        for optimizer, moments in zip(critic.optimizers, self.moments, strict=False):
            optimizer.load(moments, self.updates)


class CriticCopy:
    """What one rank adds to a cut, copied: training may go on."""

    def __init__(self, critic: Critic, policy: Spread) -> None:
        trunk = critic.trunk
        kind, model = ("shared", policy.config) if trunk is None else ("own", trunk.config)
        self.about = CriticCut(trunk=kind, model=model.digest(), updates=critic.optimizers[0].updates)
        self._trunk = None if trunk is None else Copy(trunk, critic.optimizers[1], TRUNK.below)
        self._files: dict[str, bytes] = {}
        if policy.first:
            state = dict(critic.head.named_parameters()) | critic.optimizers[0].moments()
            self._files[HEAD] = safetensors.torch.save({label: host(of.detach()) for label, of in state.items()})
            if trunk is not None:
                self._files[TRUNK.config] = json.dumps(trunk.config.to_hf()).encode()

    def write(self, space: CutSpace, cut: CutId) -> list[Part]:
        """Put this rank's parts. Raises BlobError."""
        files = [space.put(cut, name, data) for name, data in self._files.items()]
        return files if self._trunk is None else [*files, *self._trunk.write(space, cut)]


def new_critic(section: config.Critic, start: Path, policy: Spread, where: dict[str, Any]) -> Opened:
    """Of a run that begins: `start` is the policy's folder, `where` as `load_spread` takes it. Collective.

    Raises ConfigError when its model does not read the policy's tokens, ModelError.
    """
    folder = model_folder(section.folder) if section.folder else start
    mine = read_config(folder)
    _check_vocabulary(mine, policy.config, section)
    device = next(policy.decoder.parameters()).device
    head = load_value_head(folder, mine.dim, device=device) if (folder / FILE).is_file() else ValueHead(mine.dim)
    trunk = load_spread(folder, policy.mesh, **where) if section.trunk == "own" else None
    return Opened(head.to(device), trunk)


def load_critic(
    space: CutSpace,
    manifest: CutManifest,
    said: CriticCut | None,
    section: config.Critic,
    policy: Spread,
    where: dict[str, Any],
) -> Opened:
    """The critic in a cut, which `said` describes. Collective.

    Raises CheckpointError when there is none, or of another kind than `section` wants, or its parts are torn.
    """
    if said is None or said.trunk != section.trunk:
        has = "no critic" if said is None else f"a critic with trunk = {said.trunk!r}"
        raise CheckpointError(
            f"cut {manifest.id.name} in {space.url} holds {has}, and loss.advantages = 'gae' wants one with"
            f" critic.trunk = {section.trunk!r}: resume with the recipe the run was started with, or start a new run"
            " from the cut's exported model"
        )

    def check(found: ModelConfig) -> None:
        if found.digest() != said.model:
            raise CheckpointError(
                f"cut {manifest.id.name} in {space.url} says critic {said.model}, but holds {found.digest()}"
            )
        _check_vocabulary(found, policy.config, section)

    trunk, moments = None, list[dict[str, Tensor]]()
    if section.trunk == "own":
        trunk, of_trunk = read_model(space, manifest, policy.mesh, TRUNK, check, **where)
        moments = [of_trunk]
    dim = (policy if trunk is None else trunk).config.dim
    with Alike(Team(policy.mesh)) as reading:
        head, of_head = _read_head(space, manifest, dim)
    reading.settle()
    return Opened(head.to(next(policy.decoder.parameters()).device), trunk, (of_head, *moments), said.updates)


def _read_head(space: CutSpace, manifest: CutManifest, dim: int) -> tuple[ValueHead, dict[str, Tensor]]:
    head, what = ValueHead(dim), f"cut {manifest.id.name} in {space.url}: part {HEAD!r}"
    try:
        state = safetensors.torch.load(space.read(manifest, manifest.part(HEAD)))
    except SafetensorError as fault:
        raise CutTorn(f"{what} is no safetensors file: {fault}") from None
    with torch.no_grad():
        for name, weight in head.named_parameters():
            found = state.pop(name, None)
            if found is None or found.shape != weight.shape:
                raise CutTorn(f"{what} does not hold {name!r} of shape {list(weight.shape)}")
            weight.copy_(found)
    return head, state


def _check_vocabulary(mine: ModelConfig, policy: ModelConfig, section: config.Critic) -> None:
    if mine.vocab != policy.vocab:
        raise ConfigError(
            f"critic.folder = {section.folder!r}: a model of {mine.vocab} tokens cannot read those of a policy of"
            f" {policy.vocab}"
        )
