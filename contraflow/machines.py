"""What holds only on one machine, checked before a run over several of them starts a worker.

Takes a recipe and the machines that workers may live on, each by its warden. A run folder or a shared memory that they
have in common is not assumed or configured: this machine writes a file, and each of the others says if it sees it.
"""

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from contraflow.buffer.ledger import FILE
from contraflow.buffer.riding import alight
from contraflow.config import Recipe, Train
from contraflow.cuts import open_cuts
from contraflow.errors import CheckpointError, ConfigError
from contraflow.parallel.devices import first_gpu
from contraflow.rewards.model import MODEL
from contraflow.runtime.base import Host, Ref
from contraflow.runtime.pools import resource
from contraflow.runtime.tenant import Keeper
from contraflow.runtime.warden import Warden
from contraflow.train.uploads import space_url
from contraflow.weights.memory import shared_folder

BUFFER = "buffer"  # the name whose place a porter takes for a while
ANSWER_S = 30.0  # for a machine to look for a file


@runtime_checkable
class Spread(Protocol):
    """A runtime whose workers may live on other machines."""

    async def machines(self) -> Sequence[Keeper]: ...

    async def start(self, name: str, factory: Callable[..., Any], /, **kwargs: Any) -> Ref[Any]: ...

    async def stop(self, name: str) -> None: ...


class Porter:
    """Has brought a run's record from its newest cut to the machine that it was made on."""


def make_porter(host: Host, *, train: Train, folder: str) -> Porter:
    """Put ledger and payloads of the newest whole cut into `folder`, which has no ledger. Raises CheckpointError."""
    pause = threading.Event().wait
    space = open_cuts(space_url(train, Path(folder)), clock=host.clock, pause=pause, deadline_s=ANSWER_S)
    manifest, refused = space.newest()
    if manifest is None:
        raise CheckpointError(
            f"{space.url} holds no whole cut to bring a ledger from" + "".join(f"; {t}" for t in refused)
        )
    alight(space, manifest, Path(folder))
    return Porter()


def gpu_pools(recipe: Recipe) -> tuple[str, ...]:
    """Pools of which each worker computes on a GPU."""
    devices = {"train": recipe.train.device, "rollout": recipe.engine.device}
    if MODEL in recipe.reward.parts:
        devices["reward"] = recipe.reward.model.device
    return tuple(pool for pool, device in devices.items() if first_gpu(device) is not None)


async def check_machines(recipe: Recipe, folder: Path, runtime: Spread, *, resume: bool) -> None:
    """Raise ConfigError, naming settings, values and machines, unless the recipe can run over all of them.

    Where a resumed run's ledger is not on the one machine that the buffer may live on, it is brought there from a cut.
    """
    machines = await runtime.machines()
    for keeper in machines:
        await keeper.warden.call(ANSWER_S, Warden.make_folder, str(folder))
    strangers = await _blind(machines, folder)
    apart = await _blind(machines, shared_folder())
    weights, where = recipe.weights, f"{folder} of this machine is not seen on {', '.join(strangers)}"
    wrong = []
    if apart and weights.carrier in ("memory", "ipc"):
        wrong.append(
            f"weights.carrier = {weights.carrier!r} stays on one machine, and {', '.join(apart)} is another: use"
            " 'collective', or 'blob' with weights.url = 's3://bucket/prefix'"
        )
    if strangers and weights.carrier == "blob" and not weights.url:
        wrong.append(
            f"weights.carrier = 'blob' without weights.url writes to RUN/weights, but {where}: set weights.url"
        )
    if strangers and not recipe.train.checkpoint_url:
        wrong.append(f"train.checkpoint_url is not set, so cuts go to RUN/checkpoints, but {where}: set it")
    homes = [keeper for keeper in machines if keeper.offers.get(resource("buffer"))] or machines
    lacking = await _without_ledger(homes, folder) if strangers and resume else []
    if lacking and len(homes) > 1:
        wrong.append(
            f"there is no ledger in {folder} on {', '.join(lacking)}, where the buffer may live: put RUN on a disk that"
            " all share, or let one machine alone offer contraflow_buffer"
        )
    if strangers and recipe.engine.served and any(url.startswith("unix:") for url in recipe.engine.server.urls):
        wrong.append("engine.server.urls has sockets of one machine (unix:): use http://host:port")
    if wrong:
        raise ConfigError(f"this run is over {len(machines)} machines: " + "; ".join(wrong) + ". See docs/ray.md")
    if lacking:
        await runtime.start(BUFFER, make_porter, train=recipe.train, folder=str(folder))
        await runtime.stop(BUFFER)


async def _blind(machines: Sequence[Keeper], folder: Path) -> list[str]:
    """The machines that do not see what is written into `folder` here."""
    with _mark(folder) as mark:
        seen = [await keeper.warden.call(ANSWER_S, Warden.sees, str(mark)) for keeper in machines]
    return [keeper.host for keeper, sees in zip(machines, seen, strict=True) if not sees]


async def _without_ledger(homes: Sequence[Keeper], folder: Path) -> list[str]:
    return [k.host for k in homes if not await k.warden.call(ANSWER_S, Warden.sees, str(folder / FILE))]


@contextmanager
def _mark(folder: Path) -> Iterator[Path]:
    path = folder / f".seen-{secrets.token_hex(8)}"
    path.touch()
    try:
        yield path
    finally:
        path.unlink()
