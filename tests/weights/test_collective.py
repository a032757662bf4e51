"""A version goes from trainer ranks to engine ranks in parts: bit-equal to slices, proven, or refused by name."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import pytest
import torch

from contraflow.config import Parallel
from contraflow.errors import CarrierError, ConfigError, DeadlineExceeded, VersionGone, WorkerDied
from contraflow.model.families import ModelConfig
from contraflow.parallel.pieces import dtypes, served, shapes, take, trained
from contraflow.types import Manifest, Probe, Version
from contraflow.weights.bridge import Bridge, Link, open_bridge
from contraflow.weights.collective import Inbox, Outbox, circles, contents
from contraflow.weights.reshard import plan

T = TypeVar("T")
MOE = ModelConfig(
    family="qwen3_moe", vocab=11, dim=16, layers=2, heads=4, kv_heads=2, head_dim=4, ffn=12, experts=4, top_k=2,
    expert_ffn=8, dense_layers=(1,),
)  # fmt: skip
WHOLE = shapes(MOE)
WIRE = dtypes(MOE, torch.bfloat16)
PROBE = Probe((np.array([3, 1], np.int32),), (np.array([-0.5], np.float32),), 1e-3)
CPU = torch.device("cpu")
V1, V2, V3, V4 = (Version(1, n) for n in range(1, 5))


def weights(seed: int) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=noise) for name, shape in WHOLE.items()}


class End(NamedTuple):
    """An engine rank's."""

    inbox: Inbox
    bridge: Bridge

    def receive(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        return self.inbox.receive(manifest, self.bridge)


class Bench:
    """Trainer ranks and those of engines, each a thread of this process with its own end of real groups."""

    def __init__(self, folder: Path, trainer: Parallel, engine: Parallel, *, bucket_bytes: int = 600) -> None:
        self.trainer, self.engine, self.bucket_bytes, self.folder = trainer, engine, bucket_bytes, folder
        self.mine, self.theirs = trained(MOE, trainer), served(MOE, engine)
        self.plan = plan(self.mine, self.theirs, WIRE, bucket_bytes=bucket_bytes)
        self.outboxes = [Outbox(self.plan, rank, WIRE, device=CPU, deadline_s=0.2) for rank in range(trainer.ranks)]
        self.pool = ThreadPoolExecutor(32)
        self.bridges: list[Bridge] = []

    def publish(self, version: Version, seed: int) -> Manifest:
        whole = weights(seed)
        digests = [
            outbox.pack(version, {name: take(whole[name], piece) for name, piece in rank.items()})
            for outbox, rank in zip(self.outboxes, self.mine, strict=True)
        ]
        return Manifest(
            version=version,
            parent=None,
            model="m",
            chunk_bytes=self.bucket_bytes,
            probe=PROBE,
            **contents(self.plan, digests, WHOLE, WIRE),
        )

    def join(self, name: str = "rollout-0", *, deadline_s: float = 20.0) -> tuple[list[Bridge], list[End]]:
        link = Link(name, 1, f"file://{self.folder}/{name}")
        sources, targets = self.trainer.ranks, self.engine.ranks

        def end(rank: int) -> Bridge:
            return open_bridge(
                link, circles(self.plan), rank=rank, sources=sources, targets=targets, device=CPU, deadline_s=deadline_s
            )

        bridges = self.together([lambda rank=rank: end(rank) for rank in range(sources + targets)])
        self.bridges += bridges
        inboxes = [
            Inbox(
                self.plan,
                rank,
                {key: piece.shape for key, piece in held.items()},
                WIRE,
                kind="collective",
                device=CPU,
            )
            for rank, held in enumerate(self.theirs)
        ]
        return bridges[:sources], [End(*end) for end in zip(inboxes, bridges[sources:], strict=True)]

    def hold(self, version: Version, name: str = "rollout-0") -> None:
        for outbox in self.outboxes:
            outbox.hold(version, name)

    def carry(self, manifest: Manifest, bridges: list[Bridge], inboxes: list[End]) -> list[dict[str, torch.Tensor]]:
        self.hold(manifest.version, bridges[0].link.name)
        sends = [
            lambda outbox=outbox, bridge=bridge: outbox.send(manifest.version, bridge)
            for outbox, bridge in zip(self.outboxes, bridges, strict=True)
        ]
        *_, got = self.together([*sends, lambda: self.together([lambda i=i: i.receive(manifest) for i in inboxes])])
        for outbox in self.outboxes:
            outbox.drop(bridges[0].link.name)
        return got

    def together(self, calls: list[Callable[[], T]]) -> list[Any]:
        return [future.result(60) for future in [self.pool.submit(call) for call in calls]]

    def close(self) -> None:
        for bridge in self.bridges:
            bridge.abort("the test is over")
        self.pool.shutdown()


Open = Callable[..., Bench]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Open]:
    made: list[Bench] = []

    def build(trainer: Parallel = Parallel(), engine: Parallel = Parallel(), **how: Any) -> Bench:  # noqa: B008
        made.append(Bench(tmp_path, trainer, engine, **how))
        return made[-1]

    yield build
    for one in made:
        one.close()


def brief(layout: Parallel) -> str:
    return "-".join(f"{key}{getattr(layout, key)}" for key in ("dp", "ep", "tp", "pp") if getattr(layout, key) > 1)


LAYOUTS = [Parallel(), Parallel(dp=2, ep=2), Parallel(dp=2), Parallel(tp=2), Parallel(pp=2)]


def assert_parts(bench: Bench, got: list[dict[str, torch.Tensor]], seed: int) -> None:
    whole = weights(seed)
    for held, found in zip(bench.theirs, got, strict=True):
        assert found.keys() == held.keys()
        for name, piece in held.items():
            assert found[name].dtype == WIRE[name]
            assert torch.equal(found[name], take(whole[name], piece).to(WIRE[name])), name


@pytest.mark.parametrize("engine", [Parallel(), Parallel(dp=2, ep=2), Parallel(tp=2), Parallel(dp=2)], ids=brief)
@pytest.mark.parametrize("trainer", LAYOUTS, ids=brief)
def test_each_engine_rank_gets_its_slice_of_every_version(bench: Open, trainer: Parallel, engine: Parallel) -> None:
    there = bench(trainer, engine)
    manifest = there.publish(V1, 1)
    bridges, inboxes = there.join()
    assert_parts(there, there.carry(manifest, bridges, inboxes), 1)
    assert_parts(there, there.carry(there.publish(V2, 2), bridges, inboxes), 2)


def test_the_manifest_lists_whole_tensors_and_a_digest_a_bucket(bench: Open) -> None:
    there = bench(Parallel(dp=2, ep=2), Parallel(tp=2))
    manifest = there.publish(V1, 1)
    assert {entry.name: entry.shape for entry in manifest.tensors} == WHOLE
    assert len(manifest.digests) == len(there.plan.buckets) > 4


def test_two_engines_are_sent_the_same_version_each_at_its_own_time(bench: Open) -> None:
    there = bench(Parallel(dp=2), Parallel(tp=2))
    manifest = there.publish(V1, 1)
    for name in ("rollout-0", "rollout-1"):
        assert_parts(there, there.carry(manifest, *there.join(name)), 1)


def test_a_bucket_that_was_altered_on_its_way_is_named_and_nothing_is_given(bench: Open) -> None:
    there = bench()
    manifest = there.publish(V1, 1)
    bridges, inboxes = there.join()
    there.outboxes[0]._sets[0].buckets[3][5] ^= 1
    with pytest.raises(
        CarrierError, match=rf"version 1\.1, bucket 3 of .*expected digest {manifest.digests[3]}, found"
    ):
        there.carry(manifest, bridges, inboxes)


def test_a_version_of_another_plan_carrier_or_number_of_buckets_is_refused_before_anything_moves(bench: Open) -> None:
    there, other = bench(), bench(bucket_bytes=700)
    manifest = there.publish(V1, 1)
    _, (inbox,) = there.join()
    with pytest.raises(CarrierError, match=r"packed by plan .*bucket_bytes"):
        inbox.receive(other.publish(V1, 1))
    with pytest.raises(CarrierError, match=r"travels by 'memory'"):
        inbox.receive(msgspec.structs.replace(manifest, carrier="memory"))
    with pytest.raises(CarrierError, match=r"1 digests for"):
        inbox.receive(msgspec.structs.replace(manifest, digests=manifest.digests[:1]))


def test_of_two_versions_published_while_one_travels_the_older_is_skipped_and_counted(bench: Open) -> None:
    there = bench()
    (outbox,) = there.outboxes
    first = there.publish(V1, 1)
    bridges, inboxes = there.join()
    there.hold(V1)
    there.publish(V2, 2)
    one = outbox.nbytes
    third = there.publish(V3, 3)
    assert outbox.skipped == 1
    assert outbox.nbytes == one  # two sets, however many versions were published
    with pytest.raises(VersionGone, match=r"1\.2 is not .*there is 1\.1, 1\.3"):
        there.hold(V2)
    assert_parts(there, there.carry(first, bridges, inboxes), 1)  # as it was, though newer ones lie beside it
    assert_parts(there, there.carry(third, bridges, inboxes), 3)
    there.publish(V4, 4)
    assert outbox.skipped == 1


def test_nothing_lies_twice_while_nothing_travels(bench: Open) -> None:
    there = bench(Parallel(dp=2, ep=2))
    for version in (V1, V2, V3):
        there.publish(version, 1)
    assert [outbox.skipped for outbox in there.outboxes] == [2, 2]
    wired = sum(bucket.nbytes for bucket in there.plan.buckets)
    assert sum(outbox.nbytes for outbox in there.outboxes) == wired


def test_a_third_version_waits_while_two_travel_and_not_for_ever(bench: Open) -> None:
    there = bench()
    (outbox,) = there.outboxes
    for version, name in ((V1, "rollout-0"), (V2, "rollout-1")):
        there.publish(version, 1)
        there.hold(version, name)
    with pytest.raises(DeadlineExceeded, match=r"room for version 1\.3: two travel"):
        there.publish(V3, 3)
    leaving = threading.Timer(0.05, lambda: outbox.drop("rollout-0"))
    leaving.start()
    there.publish(V3, 3)
    leaving.join()


def test_a_version_cannot_be_held_while_another_is_written_over_it(bench: Open) -> None:
    there = bench()
    (outbox,), whole = there.outboxes, weights(2)
    there.publish(V1, 1)

    class Watched(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            for version in (V1, V2):
                with pytest.raises(VersionGone):
                    outbox.hold(version, "rollout-0")
            return super().__getitem__(name)

    outbox.pack(V2, Watched(whole))
    there.hold(V2)


def test_a_version_is_sent_only_while_it_is_held(bench: Open) -> None:
    there = bench()
    there.publish(V1, 1)
    bridges, _ = there.join()
    with pytest.raises(CarrierError, match=r"not held for rollout-0"):
        there.outboxes[0].send(V1, bridges[0])


def test_an_engine_that_ends_in_mid_transfer_is_named_and_others_get_the_version(bench: Open) -> None:
    there = bench(Parallel(dp=2), bucket_bytes=5000)
    manifest = there.publish(V1, 1)
    bridges, inboxes = there.join("rollout-0", deadline_s=0.7)
    there.hold(V1, "rollout-0")
    there.bridges[-1].abort("killed")
    for outbox, bridge in zip(there.outboxes, bridges, strict=True):
        with pytest.raises((WorkerDied, DeadlineExceeded), match=r"rank 0 of rollout-0"):
            outbox.send(V1, bridge)
        bridge.abort("its engine is gone")
        with pytest.raises(WorkerDied, match=r"'rollout-0' died: its link was broken: its engine is gone"):
            outbox.send(V1, bridge)
    with pytest.raises(WorkerDied, match="killed"):
        inboxes[0].receive(manifest)
    assert_parts(there, there.carry(manifest, *there.join("rollout-1")), 1)


def test_a_trainer_rank_that_is_silent_is_named_within_the_deadline(bench: Open) -> None:
    there = bench(Parallel(dp=2))
    manifest = there.publish(V1, 1)
    bridges, (inbox,) = there.join(deadline_s=0.5)
    there.hold(V1)
    sending = there.pool.submit(there.outboxes[0].send, V1, bridges[0])
    with pytest.raises(DeadlineExceeded, match=r"rank 1 of the trainer to take part"):
        inbox.receive(manifest)
    there.close()
    with pytest.raises((WorkerDied, DeadlineExceeded)):
        sending.result(20)


def test_ranks_that_do_not_join_end_the_wait_by_name(tmp_path: Path) -> None:
    link = Link("rollout-3", 1, f"file://{tmp_path}/meeting")
    with pytest.raises(DeadlineExceeded, match=r"rollout-3 waited 0\.5 s for the other ranks"):
        open_bridge(link, [], rank=0, sources=1, targets=1, device=CPU, deadline_s=9.0, join_s=0.5)


def test_a_link_that_is_not_a_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a file"):
        open_bridge(Link("a", 1, "tcp://h:1"), [], rank=0, sources=1, targets=1, device=CPU, deadline_s=0.5)
