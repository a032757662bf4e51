"""A model out of a cut, with its moments, on whatever ranks ask for it.

Takes the parts of a cut and a mesh, gives this rank's part of the model, verified. What one rank meets is raised on
all. Does not know what else a cut holds, or make one.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contraflow.cuts import CutManifest, CutSpace
from contraflow.errors import BlobError, CheckpointError, ModelError
from contraflow.model.families import ModelConfig
from contraflow.parallel.data import local
from contraflow.parallel.mesh import Mesh
from contraflow.parallel.spread import Spread, empty_spread
from contraflow.parallel.team import Team
from contraflow.train.shards import MOMENTS, WEIGHT, Shards

CONFIG = "config.json"


class Source(NamedTuple):
    """Where a model lies in a cut: its config's part, and the folder of its ranks' parts, which may be the top."""

    config: str
    below: str = ""


POLICY = Source(f"model/{CONFIG}")


class Read(NamedTuple):
    """This rank's part of a model, and its optimizer's moments by label."""

    spread: Spread
    moments: dict[str, Tensor]


class Alike:
    """A stretch in which a rank may fail; `settle`, which all ranks call, raises on all what any of them met."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._fault = ""
        self._error: Exception | None = None

    def __enter__(self) -> "Alike":
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> bool:
        if isinstance(error, CheckpointError | BlobError | ModelError):
            self._error, self._fault = error, str(error)
            return True
        return False

    def settle(self) -> None:
        """Collective. Raises CheckpointError."""
        said = next(filter(None, self._team.words(self._fault)), "")
        if said:
            raise CheckpointError(said) from self._error


def read_model(
    space: CutSpace,
    manifest: CutManifest,
    mesh: Mesh | None,
    source: Source,
    check: Callable[[ModelConfig], None],
    **where: Any,
) -> Read:
    """`where` as `empty_spread` takes it; `check` raises CheckpointError for a model that is not the one wanted.

    Collective. Raises CheckpointError, on all ranks alike, when parts are torn or altered.
    """
    team = Team(mesh)
    with Alike(team) as reading:
        config, shards = model_config(space, manifest, source), Shards(space, manifest, source.below)
        check(config)
    reading.settle()
    spread = empty_spread(config, mesh, **where)
    with Alike(team) as reading:
        targets, moments = _targets(spread, shards)
        shards.fill(targets, spread)
    reading.settle()
    return Read(spread, moments)


def model_config(space: CutSpace, manifest: CutManifest, source: Source = POLICY) -> ModelConfig:
    """Of the model in a cut. Raises CheckpointError."""
    data = space.read(manifest, manifest.part(source.config))
    try:
        return ModelConfig.from_hf(json.loads(data))
    except (ModelError, ValueError) as fault:
        raise CheckpointError(f"cut {manifest.id.name} in {space.url}: {source.config}: {fault}") from fault


def _targets(spread: Spread, shards: Shards) -> tuple[dict[tuple[str, str], Tensor], dict[str, Tensor]]:
    """What is to be filled on this rank, and among it the optimizer's state by its labels."""
    if strange := sorted((shards.names | shards.steps.keys()) - spread.shapes.keys()):
        raise CheckpointError(f"the cut's tensor {strange[0]!r} does not fit its model")
    weights = {name: local(parameter) for name, parameter in spread.decoder.named_parameters()}
    targets = {(name, WEIGHT): weight for name, weight in weights.items()}
    moments: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name not in shards.steps:
            continue
        moments[f"{name}:step"] = torch.tensor(shards.steps[name])
        for kind in MOMENTS:
            targets[name, kind] = moments[f"{name}:{kind}"] = torch.zeros(weight.shape)
    return targets, moments
