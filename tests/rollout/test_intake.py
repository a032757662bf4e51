"""An engine asks the trainer for its part of a version: what is held is let go, whatever becomes of it."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contraflow.config import Parallel
from contraflow.errors import CarrierError, VersionGone, WorkerDied
from contraflow.rollout.intake import Intake, PartFetcher, Route
from contraflow.runtime.base import Address, Host
from contraflow.runtime.inline import InlineRuntime
from contraflow.types import Manifest, Version
from contraflow.weights.bridge import Bridge, Link
from contraflow.weights.collective import Inbox, Outbox
from contraflow.weights.fetch import Fetched
from contraflow.weights.ipc import Handle, Shared
from contraflow.weights.manifest import Expected
from tests.weights.test_collective import CPU, V1, V2, V3, WHOLE, WIRE, Bench


class Rank:
    """A trainer's rank around a real outbox; its sends end as told."""

    def __init__(self, outbox: Outbox, bridge: Bridge | None, faults: list[Exception]) -> None:
        self.outbox, self.bridge, self.faults, self.shared = outbox, bridge, faults, Shared()

    async def hold(self, link: str, version: Version) -> None:
        self.outbox.hold(version, link)

    async def send(self, link: str, version: Version) -> None:
        if self.faults:
            raise self.faults.pop()
        assert self.bridge is not None
        await asyncio.to_thread(self.outbox.send, version, self.bridge)
        self.outbox.drop(link)

    async def offer(self, link: str, version: Version) -> tuple[Handle, ...]:
        return self.shared.give(link, self.outbox.held(version, link))

    async def let_go(self, link: str) -> None:
        self.outbox.drop(link)


def make_rank(host: Host, *, outbox: Outbox, bridge: Bridge | None, faults: list[Exception]) -> Rank:
    return Rank(outbox, bridge, faults)


def rig(bench: Bench, carrier: str, **trainer: Any) -> tuple[Bridge | None, Any]:
    """The engine's bridge, and a coroutine function that fetches a manifest of a bench with one rank on either side."""
    bridges, ends = bench.join() if carrier == "collective" else ([None], [None])
    shapes = {key: piece.shape for key, piece in bench.theirs[0].items()}
    inbox = Inbox(bench.plan, 0, shapes, WIRE, kind=carrier, device=CPU)
    bridge = None if ends[0] is None else ends[0].bridge

    async def fetch(manifest: Manifest, expected: Expected | None = None) -> Fetched:
        runtime = InlineRuntime()
        trainers: list[Address] = []
        for rank, outbox in enumerate(bench.outboxes):
            kwargs = {"outbox": outbox, "bridge": bridges[rank], "faults": trainer.get("faults", [])}
            trainers.append((await runtime.start(f"trainer-{rank}", _holding(kwargs))).address)
        route = Route(carrier, Link("rollout-0", 1, ""), tuple(trainers), Parallel(), "cpu", "bfloat16", 600, 20.0)

        asking: list[PartFetcher] = []

        def make(host: Host) -> object:
            asking.append(PartFetcher(Intake(inbox, bridge), route, host.connect))
            return object()

        await runtime.start("rollout-0", make)
        try:
            return await asking[0].fetch(manifest, expected)
        finally:
            await runtime.close()

    return bridge, fetch


def _holding(kwargs: dict[str, Any]) -> Any:
    return lambda host: make_rank(host, **kwargs)


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    made = Bench(tmp_path, Parallel(), Parallel())
    yield made
    made.close()


def in_use(bench: Bench) -> set[str]:
    return {user for outbox in bench.outboxes for packed in outbox._sets for user in packed.users}


def test_versions_are_fetched_and_nothing_stays_held(bench: Bench) -> None:
    manifest = bench.publish(V1, 1)
    _, fetch = rig(bench, "collective")
    fetched = asyncio.run(fetch(manifest, Expected("m", WHOLE)))
    assert fetched.tensors.keys() == WHOLE.keys()
    assert fetched.arrival.moved == sum(bucket.nbytes for bucket in bench.plan.buckets)
    assert in_use(bench) == set()


def test_a_version_that_was_replaced_is_gone_and_the_next_is_fetched(bench: Bench) -> None:
    first = bench.publish(V1, 1)
    second = bench.publish(V2, 2)
    bridge, fetch = rig(bench, "collective")
    with pytest.raises(VersionGone, match=r"1\.1 is not on rank 0"):
        asyncio.run(fetch(first))
    assert bridge is not None
    assert not bridge.broken  # nothing was under way
    assert asyncio.run(fetch(second)).tensors


def test_a_send_that_fails_breaks_the_link_and_lets_go(bench: Bench) -> None:
    manifest = bench.publish(V1, 1)
    bridge, fetch = rig(bench, "collective", faults=[WorkerDied("trainer-0", "on fire")])
    assert bridge is not None
    bridge.deadline_s = 1.0
    with pytest.raises(WorkerDied, match="on fire"):
        asyncio.run(fetch(manifest))
    assert "on fire" in bridge.broken
    assert in_use(bench) == set()


def test_what_does_not_fit_the_engine_is_refused_before_anything_is_held(bench: Bench) -> None:
    manifest = bench.publish(V3, 3)
    _, fetch = rig(bench, "collective")
    with pytest.raises(CarrierError, match=r"is of model 'm', the engine runs 'other'"):
        asyncio.run(fetch(manifest, expected=Expected("other", WHOLE)))
    wrong = {**WHOLE, "norm": (17,)}
    with pytest.raises(CarrierError, match=r"'norm' has shape \[16\], the engine's has \[17\]"):
        asyncio.run(fetch(manifest, expected=Expected("m", wrong)))
    lost = {name: shape for name, shape in WHOLE.items() if name != "embed"}
    with pytest.raises(CarrierError, match=r"not known 'embed'"):
        asyncio.run(fetch(manifest, expected=Expected("m", lost)))
    assert in_use(bench) == set()


def test_memory_that_cannot_be_shared_is_refused_and_let_go(bench: Bench) -> None:
    manifest = bench.publish(V1, 1)
    _, fetch = rig(bench, "ipc")
    with pytest.raises(CarrierError, match="tensor on cpu cannot be shared"):
        asyncio.run(fetch(msgspec.structs.replace(manifest, carrier="ipc")))
    assert in_use(bench) == set()
