"""A trainer's rank that sends parts: links come and go with engines, and what failed is counted and named."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from contraflow import config
from contraflow.errors import CarrierError, DeadlineExceeded, WorkerDied
from contraflow.model.decoder import new_decoder
from contraflow.parallel.spread import Spread
from contraflow.parallel.team import Team
from contraflow.rollout.intake import Intake, Route, open_intake
from contraflow.train.publishing import Shards
from contraflow.weights.bridge import Link
from tests.weights.test_collective import MOE, PROBE, V1, V2

ENGINE = config.Engine()


@pytest.fixture
def open_shards() -> Any:
    opened: list[Shards] = []

    def build(**weights: Any) -> Shards:
        keys = {"carrier": "collective", "bucket_bytes": 600, "refresh_deadline_s": 5.0, **weights}
        spread = Spread(new_decoder(MOE, seed=3, std=0.2))
        made = Shards(spread, Team(), train=config.Train(), engine=ENGINE, weights=config.Weights(**keys))
        opened.append(made)
        return made

    yield build
    for shards in opened:
        shards.close()


def meet(shards: Shards, folder: Path, number: int = 1) -> Intake:
    """An engine's rank that joined the trainer's."""
    link = Link("rollout-0", number, f"file://{folder}/links")
    shards.join(link)
    route = Route("collective", link, (), config.Parallel(), "cpu", "float32", 600, 5.0)
    return open_intake(route, ENGINE, MOE, rank=0)


def bring(shards: Shards, intake: Intake, manifest: Any) -> dict[str, torch.Tensor]:
    shards.hold("rollout-0", manifest.version)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(shards.send, "rollout-0", manifest.version)
        intake.receive(manifest)
        sent.result(20)
    return intake.take(manifest.version)


def test_a_started_engine_is_brought_versions_and_one_started_again_too(
    open_shards: Callable[..., Shards], tmp_path: Path
) -> None:
    shards = open_shards()
    weights = dict(shards._spread.decoder.state_dict())
    first = shards.publish(V1, PROBE)
    assert first is not None
    assert (first.parent, first.carrier, first.model) == (None, "collective", MOE.digest())
    before = meet(shards, tmp_path, 1)
    assert all(torch.equal(part, weights[name]) for name, part in bring(shards, before, first).items())
    second = shards.publish(V2, PROBE)
    assert second is not None
    assert second.parent == V1
    again = meet(shards, tmp_path, 2)
    assert bring(shards, again, second).keys() == weights.keys()
    assert (shards.carried.sent, shards.carried.failed, shards.skipped) == (2, 0, 0)
    before.close()
    again.close()


def test_a_part_is_given_once(open_shards: Callable[..., Shards], tmp_path: Path) -> None:
    shards = open_shards()
    manifest = shards.publish(V1, PROBE)
    intake = meet(shards, tmp_path)
    assert bring(shards, intake, manifest)
    assert intake.take(V1) == {}
    assert intake.take(V2) == {}
    intake.close()


def test_an_engine_that_takes_nothing_is_named_counted_and_its_version_let_go(
    open_shards: Callable[..., Shards], tmp_path: Path
) -> None:
    shards = open_shards(refresh_deadline_s=0.5)
    shards.publish(V1, PROBE)
    intake = meet(shards, tmp_path)
    shards.hold("rollout-0", V1)
    with pytest.raises((WorkerDied, DeadlineExceeded), match="rank 0 of rollout-0"):
        shards.send("rollout-0", V1)
    assert shards.carried.failed == 1
    assert "rank 0 of rollout-0" in shards.carried.fault
    shards.hold("rollout-0", V1)
    with pytest.raises(WorkerDied, match="its link was broken"):
        shards.send("rollout-0", V1)
    assert not any(packed.users for packed in shards._outbox._sets)
    intake.close()


def test_a_link_that_nobody_made_or_joins_is_named(open_shards: Callable[..., Shards], tmp_path: Path) -> None:
    shards = open_shards(refresh_deadline_s=0.3)
    shards.publish(V1, PROBE)
    with pytest.raises(CarrierError, match=r"knows no engine 'rollout-7'; its links are none"):
        shards.send("rollout-7", V1)
    link = Link("rollout-0", 1, f"file://{tmp_path}/links")
    shards.join(link)
    with pytest.raises(DeadlineExceeded, match="rollout-0 to join its link"):
        shards.send("rollout-0", V1)
    route = Route("collective", link, (), config.Parallel(), "cpu", "float32", 600, 5.0)
    open_intake(route, ENGINE, MOE, rank=0).close()  # late, so that the trainer's wait ends
