"""What every way of bringing a version to an engine promises: it comes as it was published, or is refused by name."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest
import torch

from contraflow.blobs import open_blobs
from contraflow.config import Parallel
from contraflow.errors import CarrierError, VersionGone
from contraflow.rollout.refresh import ChunkFetcher
from contraflow.types import Manifest, Version
from contraflow.weights.blob import BlobCarrier
from contraflow.weights.carrier import Carrier
from contraflow.weights.fetch import Fetched
from contraflow.weights.manifest import Expected
from contraflow.weights.memory import MemoryCarrier
from contraflow.weights.publish import Publisher
from tests.rollout.test_intake import rig
from tests.weights.test_collective import PROBE, V1, V2, V3, WHOLE, WIRE, Bench, weights

FITS = Expected("m", WHOLE)


class Way(Protocol):
    """Both ends of a carrier."""

    def publish(self, version: Version, seed: int) -> Manifest: ...

    def fetch(self, manifest: Manifest, expected: Expected | None = None) -> Awaitable[Fetched]: ...

    def damage(self, manifest: Manifest) -> None: ...

    def close(self) -> None: ...


class Chunks:
    """Whole versions by a carrier of chunks. The publisher keeps one."""

    def __init__(self, folder: Path, open_carrier: Callable[[], Carrier]) -> None:
        self._folder = folder
        self._publisher = Publisher(open_carrier(), keep=1)
        self._fetcher = ChunkFetcher(open_carrier())

    def publish(self, version: Version, seed: int) -> Manifest:
        tensors = {name: tensor.to(WIRE[name]) for name, tensor in weights(seed).items()}
        return self._publisher.publish(tensors, version=version, model="m", probe=PROBE, chunk_bytes=512)

    def fetch(self, manifest: Manifest, expected: Expected | None = None) -> Awaitable[Fetched]:
        return self._fetcher.fetch(manifest, expected)

    def damage(self, manifest: Manifest) -> None:
        for path in self._folder.rglob("*"):
            if path.is_file() and "manifest" not in str(path):
                data = bytearray(path.read_bytes())
                data[5] ^= 1
                path.write_bytes(data)

    def close(self) -> None:
        self._publisher.close()


class Parts:
    """Each rank's part by a process group of its own."""

    def __init__(self, folder: Path) -> None:
        self._bench = Bench(folder, Parallel(), Parallel())
        _, self._fetch = rig(self._bench, "collective")

    def publish(self, version: Version, seed: int) -> Manifest:
        return self._bench.publish(version, seed)

    def fetch(self, manifest: Manifest, expected: Expected | None = None) -> Awaitable[Fetched]:
        fetched: Awaitable[Fetched] = self._fetch(manifest, expected)
        return fetched

    def damage(self, manifest: Manifest) -> None:
        self._bench.outboxes[0]._sets[-1].buckets[0][5] ^= 1

    def close(self) -> None:
        self._bench.close()


@pytest.fixture(params=["memory", "blob", "collective"])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Way]:
    ways: dict[str, Callable[[], Way]] = {
        "memory": lambda: Chunks(tmp_path, lambda: MemoryCarrier(tmp_path, "run")),
        "blob": lambda: Chunks(tmp_path, lambda: BlobCarrier(open_blobs(str(tmp_path)), "run")),
        "collective": lambda: Parts(tmp_path),
    }
    opened = ways[request.param]()
    yield opened
    opened.close()


def fetched(way: Way, manifest: Manifest, expected: Expected | None = FITS) -> Fetched:
    async def run() -> Fetched:
        return await way.fetch(manifest, expected)

    return asyncio.run(run())


def assert_same(found: dict[str, torch.Tensor], seed: int) -> None:
    wanted = weights(seed)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == WIRE[name]
        assert torch.equal(found[name], tensor.to(WIRE[name])), name


def test_versions_come_as_they_were_published(way: Way) -> None:
    for n, version in enumerate((V1, V2, V3)):
        assert_same(fetched(way, way.publish(version, n)).tensors, n)


def test_a_version_that_was_brought_outlives_its_successors(way: Way) -> None:
    first = fetched(way, way.publish(V1, 1))
    fetched(way, way.publish(V2, 2))
    way.publish(V3, 3)
    assert_same(first.tensors, 1)
    first.close()
    first.close()
    assert first.tensors == {}


def test_a_replaced_version_is_gone_and_the_newest_comes(way: Way) -> None:
    old = way.publish(V1, 1)
    new = way.publish(V2, 2)
    with pytest.raises(VersionGone, match=r"1\.1"):
        fetched(way, old)
    assert_same(fetched(way, new).tensors, 2)


def test_what_moved_is_told(way: Way) -> None:
    held = sum(tensor.numel() * WIRE[name].itemsize for name, tensor in weights(1).items())
    assert held <= fetched(way, way.publish(V1, 1)).arrival.moved <= 1.2 * held


def test_an_altered_byte_is_found_and_named_with_both_digests(way: Way) -> None:
    manifest = way.publish(V1, 1)
    way.damage(manifest)
    with pytest.raises(CarrierError, match=rf"version 1\.1, .*expected digest {manifest.digests[0]}, found"):
        fetched(way, manifest)


@pytest.mark.parametrize(
    ("expected", "says"),
    [
        (Expected("other", WHOLE), "is of model 'm', the engine runs 'other'"),
        (Expected("m", {**WHOLE, "norm": (17,)}), r"'norm' has shape \[16\], the engine's has \[17\]"),
        (Expected("m", {**WHOLE, "extra": (1,)}), "missing 'extra'"),
        (Expected("m", {name: shape for name, shape in WHOLE.items() if name != "embed"}), "not known 'embed'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(way: Way, expected: Expected, says: str) -> None:
    manifest = way.publish(V1, 1)
    with pytest.raises(CarrierError, match=says):
        fetched(way, manifest, expected)
    assert_same(fetched(way, manifest).tensors, 1)
