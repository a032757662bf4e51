"""The trainer as a worker: fetches the groups of a take, has them learned, and answers while that goes on.

Takes calls from the loop and payloads from the buffer, worker to worker; gives reports and manifests, which are small.
Does not compute: that is learner.py.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from contraflow import config
from contraflow.buffer.service import Buffer
from contraflow.cuts import Part
from contraflow.dispatch.exchange import agree
from contraflow.errors import CarrierError, ConfigError, DispatchError
from contraflow.model.folder import read_config
from contraflow.parallel.devices import DTYPES, device_of, enter_device, same_gpu
from contraflow.parallel.experts import links
from contraflow.parallel.forms import choose_forms
from contraflow.parallel.mesh import Mesh, open_mesh
from contraflow.runtime.base import Address, Host, Ref, Rendezvous
from contraflow.telemetry import Account
from contraflow.train.learner import Learner, Place
from contraflow.train.publishing import Shards
from contraflow.train.report import StepReport, TrainReport
from contraflow.train.uploads import Uploads
from contraflow.types import Group, Manifest, Take, Version
from contraflow.weights.bridge import Link
from contraflow.weights.ipc import Handle

__all__ = ["Place", "StepReport", "TrainReport", "Trainer", "make_trainer"]

T = TypeVar("T")


class Trainer:
    """One rank; of several, all get the same calls in the same order, and rank 0 answers for all.

    Invariant: at most one of step, publish and save (its copying) runs at a time, and only it touches the learner.

    With `place.threaded` the work runs in one thread of its own, and `report` answers meanwhile. Without, it holds the
    event loop: an inline run then interleaves the same way every time, and is bit-equal from its seed.
    """

    def __init__(
        self,
        learner: Learner,
        buffer: Ref[Buffer],
        uploads: Uploads,
        *,
        threaded: bool,
        fetch_deadline_s: float,
        leave: Callable[[], None] = lambda: None,
        forms: tuple[str, ...] = (),
        meeting: str = "",
    ) -> None:
        """`leave` is called last, when the worker closes; `forms` is reported: how tokens reach experts elsewhere.

        `meeting` is where its ranks met, beside which they meet engines.
        """
        self._learner = learner
        self._buffer = buffer
        self._uploads = uploads
        self._fetch_deadline_s = fetch_deadline_s
        self._leave = leave
        self._forms = forms
        self._meeting = meeting
        self._turn = asyncio.Lock()
        self._thread = None
        if threaded:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="learn", initializer=same_gpu())
        learner.account.switch("wait")

    async def step(self, take: Take) -> StepReport | None:
        """Train on the groups of `take` and publish version `take.step + 1`; the report of it on rank 0.

        See `StepReport` for bad batches.

        Raises what buffer, carrier or a full disk raised. The weights may have moved by then: resume from a cut.
        """
        async with self._turn:
            groups = await self._fetch(take)
            return await self._work(lambda: self._learner.learn(take, groups))

    async def publish(self, n: int) -> Manifest | None:
        """Publish the weights as they are, as version `n`: what engines start from. Its manifest on rank 0."""
        async with self._turn:
            return await self._work(lambda: self._learner.publish(n))

    async def save(self, step: int) -> None:
        """Copy the state before step `step`, and begin to write it as parts of a cut while training goes on.

        Raises CheckpointError while the cut before it is on its way.
        """
        async with self._turn:
            self._uploads.check_free()
            self._uploads.begin(await self._work(lambda: self._learner.snapshot(step)))

    async def saved(self) -> list[Part]:
        """This rank's parts of the cut begun last, when they are stored. Raises CheckpointError."""
        return await self._uploads.parts()

    async def commit(self, parts: list[Part], about: dict[str, Any]) -> str:
        """Rank 0: make the cut begun last visible, of all ranks' parts; its name. See `checkpoint.commit`."""
        return await self._uploads.commit(parts, about)

    async def export(self, name: str, folder: str) -> None:
        """Rank 0: write a cut's model as a Hugging Face folder. See `checkpoint.export`."""
        await self._uploads.export(name, Path(folder))

    async def link(self, name: str, number: int) -> Link:
        """Begin to meet the engine of worker `name`, which is being started for the `number`-th time."""
        link = Link(name, number, f"{self._meeting}.links")
        await asyncio.get_running_loop().run_in_executor(self._shards.threads, self._shards.join, link)
        return link

    async def hold(self, link: str, version: Version) -> None:
        """See `weights.bridge.Sender`."""
        self._shards.hold(link, version)

    async def send(self, link: str, version: Version) -> None:
        """See `weights.bridge.Sender`: beside whatever the trainer is at."""
        shards = self._shards
        await asyncio.get_running_loop().run_in_executor(shards.threads, shards.send, link, version)

    async def offer(self, link: str, version: Version) -> tuple[Handle, ...]:
        """See `weights.bridge.Sender`."""
        return self._shards.offer(link, version)

    async def let_go(self, link: str) -> None:
        """See `weights.bridge.Sender`."""
        self._shards.let_go(link)

    async def report(self) -> TrainReport:
        """What it does now, and where its seconds went."""
        account, publishing = self._learner.account, self._learner.publishing
        told: dict[str, Any] = {}
        if isinstance(publishing, Shards):
            told = {"skipped": publishing.skipped, **dataclasses.asdict(publishing.carried)}
        return TrainReport(
            doing=account.cause,
            seconds=account.seconds(),
            steps=self._learner.steps,
            refused=self._learner.refused,
            updates=self._learner.optimizer.updates,
            moved_bytes=self._learner.moved_bytes,
            forms=self._forms,
            **told,
        )

    async def close(self) -> None:
        """Wait for what runs, then remove the published versions."""
        async with self._turn:
            self._uploads.close()
            await self._work(self._learner.close)
            if self._thread is not None:
                self._thread.shutdown()
            self._leave()

    @property
    def _shards(self) -> Shards:
        publishing = self._learner.publishing
        if not isinstance(publishing, Shards):
            raise CarrierError(
                "this trainer publishes whole versions; set weights.carrier = 'collective' to send parts"
            )
        return publishing

    async def _fetch(self, take: Take) -> list[Group]:
        if not take.groups:
            return []
        with self._learner.account.charge("fetch"):
            return await self._buffer.call(self._fetch_deadline_s, Buffer.fetch, take.groups)

    async def _work(self, work: Callable[[], T]) -> T:
        if self._thread is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def make_trainer(
    host: Host,
    *,
    rendezvous: Rendezvous,
    train: config.Train,
    loss: config.Loss,
    weights: config.Weights,
    place: Place,
    buffer: Address,
    engine: config.Engine | None = None,
) -> Trainer:
    """One rank of a trainer, its part of the model loaded (from `place.resume`, if given).

    Collective when there are several: they join, and compare what they were told. Rank 0 claims the carrier.
    `engine` as for `Learner`. Raises ConfigError, ModelError, CheckpointError, CarrierError.
    """
    parallel = train.parallel
    if rendezvous.world != parallel.ranks:
        raise ConfigError(f"a trainer of {rendezvous.world} ranks was started, but {parallel!r} wants {parallel.ranks}")
    account, meeting = Account(host.clock), ExitStack()
    device = device_of(train.device, rendezvous.rank)
    enter_device(device)
    try:
        mesh, told = None, tuple[str, ...]()
        if rendezvous.world > 1:
            joined = open_mesh(parallel, rank=rendezvous.rank, init_method=rendezvous.init_method, device=device)
            mesh = meeting.enter_context(joined)
            told_all = {"train": train, "loss": loss, "weights": weights, "engine": engine or config.Engine()}
            _agree(mesh, told_all, place)
            model, most = read_config(Path(place.model_folder)), train.tokens_per_batch
            mesh, told = choose_forms(mesh, model, {"train": most}, clock=host.clock, dtype=DTYPES[train.compute])
        uploads = Uploads(train, Path(place.run_folder), place.writer, clock=host.clock, threaded=place.threaded)
        learner = Learner(
            account,
            train=train,
            loss=loss,
            weights=weights,
            place=place,
            cuts=uploads.space,
            mesh=mesh,
            engine=engine,
        )
    except BaseException:
        meeting.close()
        raise
    return Trainer(
        learner,
        host.connect(buffer),
        uploads,
        threaded=place.threaded,
        fetch_deadline_s=train.step_deadline_s,
        leave=meeting.close,
        forms=told,
        meeting=rendezvous.init_method,
    )


def _agree(mesh: Mesh, sections: Mapping[str, config.Section], place: Place) -> None:
    """Raise ConfigError, showing both values, unless all ranks were told the same and start from the same model."""
    critic = {} if place.critic is None else {"critic": place.critic}
    told: dict[str, Any] = {
        f"{name}.{key}": value
        for name, section in {**sections, **critic}.items()
        for key, value in section.model_dump(mode="json").items()
    }
    told |= msgspec.structs.asdict(msgspec.structs.replace(place, critic=None)) | {
        "model": read_config(Path(place.model_folder)).digest()
    }
    try:
        agree(links(mesh, mesh.world), told)
    except DispatchError as fault:
        raise ConfigError(str(fault)) from None
