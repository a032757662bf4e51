"""What fetch refuses before it loads, and how it tells a retired version from a torn one."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from contraflow.blobs import open_blobs
from contraflow.errors import CarrierError, VersionGone
from contraflow.types import Manifest, Probe, Version
from contraflow.weights.blob import BlobCarrier
from contraflow.weights.carrier import Bytes
from contraflow.weights.fetch import fetch
from contraflow.weights.manifest import Expected, expect
from contraflow.weights.memory import MemoryCarrier
from contraflow.weights.publish import publish

TENSORS = {"w": torch.arange(1000.0), "b": torch.ones(3, dtype=torch.bfloat16)}


@pytest.fixture
def carrier(tmp_path: Path) -> Iterator[BlobCarrier]:
    carrier = BlobCarrier(open_blobs(str(tmp_path)), "run")
    carrier.claim()
    yield carrier
    carrier.close()


@pytest.fixture
def manifest(carrier: BlobCarrier) -> Manifest:
    return publish(
        TENSORS,
        version=Version(1, 0),
        parent=None,
        model="m",
        probe=Probe((np.array([1, 2], np.int32),), (np.array([0.1], np.float32),), 1e-3),
        carrier=carrier,
        chunk_bytes=512,
    )


class Shut:
    """A carrier that must not be asked for anything."""

    kind = "blob"
    lanes = 1

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"{name} was asked for")


@pytest.mark.parametrize(
    ("expected", "says"),
    [
        (expect("other", TENSORS), "of model 'm', the engine runs 'other'"),
        (Expected("m", {"w": (1000,)}), "not known 'b'"),
        (Expected("m", {"w": (1000,), "b": (3,), "c": (1,)}), "missing 'c'"),
        (Expected("m", {"w": (10, 100), "b": (3,)}), "'w' has shape"),
    ],
)
def test_a_version_that_does_not_fit_is_refused_before_the_carrier_is_touched(
    manifest: Manifest, expected: Expected, says: str
) -> None:
    with pytest.raises(CarrierError, match=says):
        fetch(manifest, Shut(), expected)  # type: ignore[arg-type]


def test_an_unsound_manifest_is_refused_before_the_carrier_is_touched(manifest: Manifest) -> None:
    with pytest.raises(CarrierError, match=r"manifest of 1\.0"):
        fetch(msgspec.structs.replace(manifest, digests=()), Shut())  # type: ignore[arg-type]


def test_a_version_that_fits_arrives(manifest: Manifest, carrier: BlobCarrier) -> None:
    found = fetch(manifest, carrier, expect("m", TENSORS)).tensors
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


def test_the_other_side_must_use_the_same_carrier(manifest: Manifest, tmp_path: Path) -> None:
    with pytest.raises(CarrierError, match=r"travels by 'blob', this side reads 'memory'.*weights\.carrier"):
        fetch(manifest, MemoryCarrier(tmp_path, "run"))


def test_chunks_that_were_exchanged_are_found(manifest: Manifest, carrier: BlobCarrier, tmp_path: Path) -> None:
    first, second = (tmp_path / manifest.location / f"{index:06d}" for index in (0, 1))
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(held)
    with pytest.raises(CarrierError, match="chunk 0"):
        fetch(manifest, carrier)


def test_a_missing_chunk_says_so(manifest: Manifest, carrier: BlobCarrier, tmp_path: Path) -> None:
    (tmp_path / manifest.location / "000003").unlink()
    with pytest.raises(CarrierError, match=rf"chunk 3 .*expected digest {manifest.digests[3]}, found none") as caught:
        fetch(manifest, carrier)
    assert not isinstance(caught.value, VersionGone)


class RetiredMeanwhile(BlobCarrier):
    """A reader's side on which the publisher retires the version once the first chunk is read."""

    def open(self, manifest: Manifest):  # type: ignore[no-untyped-def]
        source = super().open(manifest)
        load = source.load

        def slow(index: int) -> Bytes | None:
            found = load(index)
            self.retire(manifest.version)
            return found

        source.load = slow  # type: ignore[method-assign]
        return source


def test_a_version_retired_while_it_is_read_is_gone_and_not_torn(manifest: Manifest, tmp_path: Path) -> None:
    with pytest.raises(VersionGone, match=r"version 1\.0 was retired while it was being read"):
        fetch(manifest, RetiredMeanwhile(open_blobs(str(tmp_path)), "run", lanes=1))
