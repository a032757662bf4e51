"""What publish takes, whatever carries it: any strides, sharing, gradients, devices; and how it ends when it cannot."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from contraflow.blobs import Blobs, open_blobs
from contraflow.errors import BlobError, CarrierError, ConfigError
from contraflow.types import Probe, Version
from contraflow.weights.blob import BlobCarrier
from contraflow.weights.carrier import Carrier, derive_run_id
from contraflow.weights.fetch import fetch
from contraflow.weights.memory import MemoryCarrier, shared_folder
from contraflow.weights.publish import Publisher

PROBE = Probe((np.array([1, 2], np.int32),), (np.array([0.1], np.float32),), 1e-3)


@pytest.fixture
def carrier(tmp_path: Path) -> Carrier:
    return MemoryCarrier(shared_folder(), derive_run_id(tmp_path))


@pytest.fixture
def publisher(carrier: Carrier) -> Iterator[Publisher]:
    with closing(Publisher(carrier)) as publisher:
        yield publisher


def roundtrip(publisher: Publisher, carrier: Carrier, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    manifest = publisher.publish(tensors, version=Version(1, 0), model="m", probe=PROBE, chunk_bytes=100)
    return fetch(manifest, carrier).tensors


def test_strided_expanded_shared_and_trained_tensors_arrive_as_their_values(
    publisher: Publisher, carrier: Carrier
) -> None:
    base = torch.arange(60.0).reshape(5, 12)
    tensors = {
        "transposed": base.T,
        "strided": base[::2, 1::3],
        "expanded": torch.arange(3.0)[:, None].expand(3, 4),
        "shared": base,
        "shared too": base,
        "trained": torch.nn.Parameter(base * 2),
        "empty slice": base[2:2],
    }
    found = roundtrip(publisher, carrier, tensors)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name
        assert not found[name].requires_grad


def test_a_version_of_nothing_can_be_published(publisher: Publisher, carrier: Carrier) -> None:
    assert roundtrip(publisher, carrier, {}) == {}


def test_what_is_trained_on_after_a_publish_does_not_reach_what_was_published(
    publisher: Publisher, carrier: Carrier
) -> None:
    weights = torch.ones(1000)
    found = roundtrip(publisher, carrier, {"w": weights})
    weights.zero_()
    assert torch.equal(found["w"], torch.ones(1000))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")
def test_tensors_on_a_gpu_arrive(publisher: Publisher, carrier: Carrier) -> None:
    tensors = {"w": torch.randn(300, 7, device="cuda"), "b": torch.randn(9, device="cuda", dtype=torch.bfloat16)}
    found = roundtrip(publisher, carrier, tensors)
    assert all(torch.equal(found[name], tensor.cpu()) for name, tensor in tensors.items())


class FullDisk(Blobs):
    """A blob space whose disk is full after so many writes."""

    room = 3

    def put(self, key: str, data: object, *, create: bool = False) -> None:
        self.room -= 1
        if self.room < 0:
            raise BlobError(f"cannot write {key!r}: No space left on device")
        super().put(key, data, create=create)


def test_a_disk_that_fills_up_costs_the_new_version_and_not_the_old(tmp_path: Path) -> None:
    inner = open_blobs(str(tmp_path))
    blobs = FullDisk(inner._store, inner.url)
    carrier = BlobCarrier(blobs, "run", lanes=1)
    with closing(Publisher(carrier)) as publisher:
        small, large = {"w": torch.ones(20)}, {"w": torch.ones(200)}
        kept = publisher.publish(small, version=Version(1, 0), model="m", probe=PROBE, chunk_bytes=100)
        with pytest.raises(BlobError, match="No space left"):
            publisher.publish(large, version=Version(1, 1), model="m", probe=PROBE, chunk_bytes=100)
        assert carrier.versions() == [Version(1, 0)]
        assert inner.list("run/chunks/1.1") == []
        assert torch.equal(fetch(kept, carrier).tensors["w"], small["w"])
        blobs.room = 100
        there = publisher.publish(large, version=Version(1, 1), model="m", probe=PROBE, chunk_bytes=100)
        assert there.parent == Version(1, 0)
        assert torch.equal(fetch(there, carrier).tensors["w"], large["w"])


def test_a_trainer_of_a_dead_line_cannot_publish_beside_its_successor(tmp_path: Path) -> None:
    zombie = Publisher(BlobCarrier(open_blobs(str(tmp_path)), "run"))
    successor = Publisher(BlobCarrier(open_blobs(str(tmp_path)), "run"))
    successor.publish({"w": torch.ones(3)}, version=Version(2, 5), model="m", probe=PROBE, chunk_bytes=100)
    with pytest.raises(CarrierError, match=r"1\.6 is not newer than 2\.5"):
        zombie.publish({"w": torch.zeros(3)}, version=Version(1, 6), model="m", probe=PROBE, chunk_bytes=100)
    successor.close()


def test_a_publisher_keeps_at_least_one(carrier: Carrier) -> None:
    with pytest.raises(ConfigError, match="keep = 0"):
        Publisher(carrier, keep=0)
