"""A run brought back from one of its cuts into an empty folder, when its own is lost or another is wanted.

Takes a run's folder or the place of its cuts (`s3://bucket/run`); gives a folder that `contraflow run --resume` goes on
with, on any number of ranks. Does not start anything.
"""

from collections.abc import Sequence
from pathlib import Path

from contraflow.buffer.riding import alight
from contraflow.config import load_recipe
from contraflow.cuts import CutManifest, CutSpace, in_lanes, open_cuts
from contraflow.errors import CheckpointError, RunFolderError
from contraflow.telemetry import Clock
from contraflow.train.checkpoint import split
from contraflow.train.uploads import Pause


def find_cut(reference: str, *, clock: Clock, pause: Pause) -> tuple[CutSpace, CutManifest]:
    """The cut that a person names: `RUN` or `s3://bucket/run` for the newest whole one, or either with `/NAME`.

    In a run's folder cuts are in `checkpoints/`, unless its recipe says train.checkpoint_url. Raises CheckpointError.
    """
    url, name = split(reference)
    if "://" not in url and not (Path(url) / "manifests").is_dir():
        url = _space_of_run(Path(url))
    space = open_cuts(url, clock=clock, pause=pause)
    if name:
        return space, space.manifest(name)
    manifest, refused = space.newest()
    if manifest is None:
        raise CheckpointError(f"{url} holds no whole cut" + "".join(f"; {torn}" for torn in refused))
    return space, manifest


def restore(reference: str, folder: Path, overrides: Sequence[str] = (), *, clock: Clock, pause: Pause) -> str:
    """Make `folder`, which must be empty or absent, a run that goes on from a cut; the cut's name.

    The cut is copied into the folder unless the run, with `overrides` to its recipe, keeps its cuts elsewhere. Raises
    RunFolderError, ConfigError, CheckpointError, BlobError.
    """
    if folder.exists() and any(folder.iterdir()):
        raise RunFolderError(f"{folder} is not empty; give --folder another name")
    space, manifest = find_cut(reference, clock=clock, pause=pause)
    text = manifest.about.get("recipe")
    if not isinstance(text, str):
        raise CheckpointError(f"cut {manifest.id.name} in {space.url} does not hold its run's recipe")
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / "recipe.toml.partial"
    draft.write_text(text, encoding="utf-8")
    url = load_recipe(draft, overrides).train.checkpoint_url
    if not url:
        copy(space, manifest, open_cuts(str(folder / "checkpoints"), clock=clock, pause=pause))
    elif split(reference)[1]:
        raise RunFolderError(
            f"the run keeps its cuts in {url} and goes on from the newest there; to go on from {manifest.id.name}, "
            "keep them in the new folder: --set train.checkpoint_url="
        )
    alight(space, manifest, folder)
    draft.rename(folder / "recipe.toml")  # last: without it the folder holds no run
    return manifest.id.name


def copy(space: CutSpace, manifest: CutManifest, target: CutSpace) -> None:
    """The same cut in another place, every part verified on the way. Raises CutTorn, CutTaken, BlobError."""
    parts = in_lanes(lambda part: target.put(manifest.id, part.name, space.read(manifest, part)), manifest.parts)
    target.commit(manifest.id, parts, manifest.about)


def _space_of_run(run: Path) -> str:
    recipe = run / "recipe.toml"
    if not recipe.is_file():
        raise CheckpointError(f"{run} is neither a run's folder (it has no recipe.toml) nor a place of cuts")
    url = load_recipe(recipe).train.checkpoint_url
    return url or str(run / "checkpoints")
