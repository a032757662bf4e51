"""A version copied from where it lies: the same parts as by messages; what is no GPU's memory is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from contraflow.config import Parallel
from contraflow.errors import CarrierError
from contraflow.weights.collective import Inbox
from contraflow.weights.ipc import Handle, Opened, Shared
from tests.weights.test_collective import CPU, V1, WIRE, Bench, assert_parts


@pytest.mark.parametrize("engine", [Parallel(), Parallel(dp=2, ep=2), Parallel(tp=2)], ids=["one", "ep", "tp"])
@pytest.mark.parametrize("trainer", [Parallel(), Parallel(dp=2, ep=2), Parallel(tp=2)], ids=["one", "ep", "tp"])
def test_parts_copied_from_where_buckets_lie_are_slices_of_the_whole(
    tmp_path: Path, trainer: Parallel, engine: Parallel
) -> None:
    there = Bench(tmp_path, trainer, engine)
    manifest = there.publish(V1, 1)
    there.hold(V1)
    lying = [outbox.held(V1, "rollout-0") for outbox in there.outboxes]

    def copies(rank: int, at: Callable[[int, int], torch.Tensor]) -> dict[str, torch.Tensor]:
        shapes = {key: piece.shape for key, piece in there.theirs[rank].items()}
        return Inbox(there.plan, rank, shapes, WIRE, kind="collective", device=CPU).copy(manifest, at)

    got = [copies(rank, lambda source, n: lying[source][n]) for rank in range(engine.ranks)]
    assert_parts(there, got, 1)
    lying[0][0][3] ^= 8
    reader = there.plan.buckets[there.plan.sent_by(0)[0]].targets[0]
    with pytest.raises(CarrierError, match=r"version 1\.1, bucket \d+ of .*from rank 0 of the trainer"):
        copies(reader, lambda source, n: lying[source][n])
    there.close()


def test_memory_of_the_cpu_is_not_shared() -> None:
    with pytest.raises(CarrierError, match=r"tensor on cpu cannot be shared.*'memory'"):
        Shared().give("rollout-0", [torch.zeros(4, dtype=torch.uint8)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_memory_of_a_gpu_that_is_not_here_is_refused_by_its_number() -> None:
    with pytest.raises(CarrierError, match=r"memory on GPU 3 cannot be opened here"):
        Opened().tensor(Handle(3, b"x" * 64, 4, 0, b"y", 0, b"z" * 64, True))
