"""Layers on several ranks: losses, gradients, loads and scores are those of one rank."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from contraflow.config import Parallel
from contraflow.errors import DispatchError, WorkerDied
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.families import ModelConfig
from contraflow.parallel.layout import shards
from contraflow.parallel.mesh import Mesh
from contraflow.parallel.pipeline import Passed, Pipeline, add_loss, micro_batches, share_layers
from contraflow.telemetry import Account
from contraflow.train.batcher import pack
from contraflow.train.forward import Reading, Scored, feed, score
from contraflow.train.passes import Balance, PlainPasses
from contraflow.train.staged import StagedPasses
from contraflow.types import Batch, Sample
from tests.parallel import ranks

MIXTURE = ModelConfig(
    family="qwen3_moe", vocab=23, dim=16, layers=4, heads=2, kv_heads=1, head_dim=8, ffn=24, experts=4, top_k=2,
    expert_ffn=8, dense_layers=(1,), renormalise=True,
)  # fmt: skip
CPU = torch.device("cpu")


def batches(seed: int, count: int, budget: int) -> list[Batch]:
    rng, made = np.random.default_rng(seed), []
    for _ in range(count):
        length = int(rng.integers(2, 20))
        mask = np.arange(length) >= int(rng.integers(1, length))
        zeros = np.zeros(length, np.float32)
        tokens = rng.integers(0, 23, length, dtype=np.int32)
        credit = np.where(mask, rng.normal(), 0).astype(np.float32)
        made.append(
            Sample(tokens=tokens, mask=mask, behaviour=zeros, advantages=credit, versions=zeros.astype(np.int32))
        )
    return pack(made, tokens_per_batch=budget, reduction="token")


def loss_of(batch: Batch, scored: Scored) -> Tensor:
    share = torch.from_numpy((batch.weights * batch.advantages)[batch.mask])
    return -(share * scored.logprobs_N.exp()).sum() - 0.01 * scored.entropy_N.sum()


def run_passes(passes: Any, decoder: Decoder, given: list[Batch]) -> dict[str, Any]:
    """One backward pass with a balance loss whose loads are made up: what it is about is who adds what."""
    feds = [feed(batch, CPU) for batch in given]
    loads_ME = torch.arange(12).view(3, 4)
    balance = Balance(0.3, lambda tape: tape.balance_loss(loads_ME=loads_ME, tokens=100))
    passed = passes.run(feds, lambda index, scored: loss_of(given[index], scored), balance)
    grads = {name: weight.grad for name, weight in decoder.named_parameters()}
    return {"values": passed.values_B2, "loads": passed.loads_ME, "grads": grads, "forward": passes.loads(feds)}


def on_rank(mesh: Mesh, given: list[list[Batch]]) -> list[dict[str, Any]]:
    found = []
    for update in given:
        decoder = new_decoder(MIXTURE, seed=1, std=0.2)
        share_layers(decoder, mesh.parallel, mesh.here)
        assert set(dict(decoder.named_parameters())) == set(shards(MIXTURE, mesh.parallel, mesh.here))
        passes = StagedPasses(decoder, mesh, Account(lambda: 0.0), Reading(0.8))
        scores = passes.scored([feed(batch, CPU) for batch in update])
        found.append(run_passes(passes, decoder, update) | {"scores": scores})
    return found


@pytest.mark.parametrize(
    "parallel",
    [Parallel(pp=2), Parallel(pp=2, schedule="interleaved"), Parallel(pp=4)],
    ids=["2 ranks", "2 ranks interleaved", "4 ranks"],
)
def test_a_pipeline_gives_what_one_rank_gives(parallel: Parallel, tmp_path: Path) -> None:
    """One micro-batch alone; as many as fill the pipeline; an odd number of unequal ones."""
    given = [batches(0, 3, 1000), batches(1, 12, 60), batches(2, 20, 1)[:7]]
    by_rank = ranks.run(on_rank, parallel, tmp_path, given)
    for index, update in enumerate(given):
        decoder = new_decoder(MIXTURE, seed=1, std=0.2)
        wanted = run_passes(PlainPasses(decoder, Account(lambda: 0.0), Reading(0.8)), decoder, update)
        found = [of_update[index] for of_update in by_rank]
        torch.testing.assert_close(sum(f["values"] for f in found), wanted["values"], rtol=1e-5, atol=1e-6)
        for what in ("loads", "forward"):
            assert torch.equal(sum(f[what] for f in found), wanted[what])
        grads = {name: grad for f in found for name, grad in f["grads"].items()}
        assert grads.keys() == wanted["grads"].keys()
        for name, grad in wanted["grads"].items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
        with torch.no_grad():
            alone = [score(decoder, feed(batch, CPU), Reading(0.8)) for batch in update]
        for f in found:
            for part, whole in zip(f["scores"], alone, strict=True):
                torch.testing.assert_close(tuple(part), tuple(whole), rtol=1e-5, atol=1e-5)


def failing(mesh: Mesh, update: list[Batch], how: str) -> str:
    """The first stage raises, or the last dies, in the second micro-batch."""
    decoder = new_decoder(MIXTURE, seed=1, std=0.2)
    share_layers(decoder, mesh.parallel, mesh.here)

    def after(seen: Passed) -> Tensor:
        if seen.number == 1 and how == "raises" and mesh.first:
            raise DispatchError("rows were lost")
        if seen.number == 1 and how == "dies" and not mesh.first:
            os.kill(os.getpid(), signal.SIGKILL)
        return seen.hidden_TD if mesh.first else seen.hidden_TD.sum()

    with pytest.raises((DispatchError, WorkerDied)) as raised:
        Pipeline(decoder, mesh).run([feed(batch, CPU) for batch in update], after, backward=True)
    return f"{type(raised.value).__name__}: {raised.value}"


def test_what_a_stage_raises_keeps_its_type(tmp_path: Path) -> None:
    assert ranks.run(failing, Parallel(pp=2), tmp_path, batches(1, 12, 60)[:3], "raises", silent=(1,)) == [
        "DispatchError: rows were lost",
        None,
    ]


def test_a_stage_that_dies_is_named(tmp_path: Path) -> None:
    found, _ = ranks.run(failing, Parallel(pp=2), tmp_path, batches(1, 12, 60)[:3], "dies", silent=(1,))
    assert found.startswith("WorkerDied: worker 'rank 1' died: took no part in the pipeline")


@pytest.mark.parametrize(
    ("schedule", "pp", "wanted"),
    [
        ("1f1b", 4, [4, 4, 4, 4, 5, 6, 7, 8, 9]),
        ("interleaved", 2, [1, 2, 3, 4, 6, 6, 8, 8, 10]),
        ("interleaved", 4, [1, 2, 3, 4, 5, 6, 7, 8, 10]),
    ],
)
def test_no_more_empty_micro_batches_than_the_schedule_needs(schedule: str, pp: int, wanted: list[int]) -> None:
    parallel = Parallel(pp=pp, schedule=schedule)
    assert [micro_batches(count, parallel) for count in range(1, 10)] == wanted


def test_a_loss_added_on_the_way_sends_its_own_gradient_and_leaves_the_other_alone() -> None:
    x, weight = torch.randn(3, 2, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    pull = torch.randn(3, 2)
    assert torch.equal(add_loss(x, weight * x.square().sum()), x)
    got_x, got_weight = torch.autograd.grad(add_loss(x, weight * x.square().sum()), (x, weight), pull)
    torch.testing.assert_close(got_x, pull + 4 * x)
    torch.testing.assert_close(got_weight, x.square().sum())
