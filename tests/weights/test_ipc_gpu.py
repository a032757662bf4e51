"""Two processes on one GPU: a version is copied from where it lies, its memory is given back, nothing piles up."""

import multiprocessing as mp
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from contraflow.errors import ContraflowError
from contraflow.telemetry import read_journal
from contraflow.types import Manifest, Version
from contraflow.weights.collective import Inbox, Outbox, contents
from contraflow.weights.ipc import Opened, Shared
from tests.slow.test_learning_gpu import RECIPES, run
from tests.weights.carried import BUCKET, PROBE, WAIT_S, WHOLE, WIRE, planned, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device"),
]
GPU = torch.device("cuda:0")


def serve(orders: Connection, reader: str) -> None:
    """An engine's rank."""
    here = torch.device(reader)
    torch.cuda.set_device(here)
    inbox, opened = Inbox(planned(), 0, WHOLE, WIRE, kind="ipc", device=here), Opened()
    while (order := orders.recv()) is not None:
        manifest, handles, seed = order
        try:
            got = inbox.copy(manifest, lambda source, n: opened.tensor(handles[n]))  # noqa: B023
        except ContraflowError as fault:
            orders.send(str(fault))
            continue
        wanted = weights(seed, here)
        orders.send(all(torch.equal(got[name], wanted[name].to(WIRE[name])) for name in WHOLE))


class Side:
    """The trainer's."""

    def __init__(self) -> None:
        torch.cuda.set_device(GPU)
        self.plan, self.shared = planned(), Shared()
        self.outbox = Outbox(self.plan, 0, WIRE, device=GPU, deadline_s=5.0)
        self.engines: list[BaseProcess] = []

    def start(self, reader: str = "cuda:0") -> Connection:
        here, there = mp.get_context("spawn").Pipe()
        self.engines.append(mp.get_context("spawn").Process(target=serve, args=(there, reader)))
        self.engines[-1].start()
        return here

    def carry(self, n: int, engine: Connection, *, harm: bool = False) -> object:
        version = Version(1, n)
        digests = self.outbox.pack(version, weights(n, GPU))
        self.outbox.hold(version, "rollout-0")
        lying = self.outbox.held(version, "rollout-0")
        if harm:
            lying[1][7] ^= 1
        inside = contents(self.plan, [digests], WHOLE, WIRE, kind="ipc")
        manifest = Manifest(version=version, parent=None, model="m", chunk_bytes=BUCKET, probe=PROBE, **inside)
        engine.send((manifest, self.shared.give("rollout-0", lying), n))
        assert engine.poll(WAIT_S)
        told = engine.recv()
        self.outbox.drop("rollout-0")
        return told


@pytest.fixture
def side() -> Iterator[Side]:
    made = Side()
    yield made
    for engine in made.engines:
        engine.kill()
        engine.join()


@pytest.mark.parametrize("reader", ["cuda:0", "cuda:1"])
def test_versions_are_copied_damage_is_named_and_memory_does_not_grow(side: Side, reader: str) -> None:
    if int(reader[-1]) >= torch.cuda.device_count():
        pytest.skip("needs two CUDA devices")
    engine = side.start(reader)
    assert side.carry(1, engine) is True
    held = torch.cuda.memory_allocated()
    assert [side.carry(n, engine) for n in range(2, 20)] == [True] * 18
    assert torch.cuda.memory_allocated() == held
    assert "version 1.20, bucket 1 of" in str(side.carry(20, engine, harm=True))
    assert side.carry(21, engine) is True
    engine.send(None)
    side.engines[0].join(WAIT_S)
    assert side.engines[0].exitcode == 0


def test_an_engine_that_was_killed_leaves_a_successor_all_it_needs(side: Side) -> None:
    assert side.carry(1, side.start()) is True
    side.engines[0].kill()
    side.engines[0].join()
    side.shared.forget("rollout-0")
    assert side.carry(2, side.start()) is True


def test_a_run_on_one_gpu_learns_from_what_is_copied(tmp_path: Path) -> None:
    settings = ["train.device=cuda", "engine.device=cuda", "weights.carrier=ipc", "run.steps=10", "run.eval_every=5"]
    run(RECIPES / "tiny_cpu.toml", tmp_path / "run", *settings)
    records = read_journal(tmp_path / "run" / "metrics.jsonl")
    looks = [record["accuracy"] for record in records if record["kind"] == "eval"]
    assert looks[-1] > looks[0] + 0.05
    refreshes = [record for record in records if record["kind"] == "refresh" and record["served"]]
    assert refreshes[-1]["version"] == {"line": 0, "n": 10}
