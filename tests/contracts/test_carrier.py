"""What every carrier promises: a version is read whole and unaltered by any process, or refused by name."""

import hashlib
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contraflow.blobs import open_blobs
from contraflow.errors import CarrierError, VersionGone
from contraflow.types import Manifest, Probe, Version
from contraflow.weights.blob import BlobCarrier
from contraflow.weights.carrier import Carrier, derive_run_id
from contraflow.weights.delta_carrier import DeltaCarrier
from contraflow.weights.fetch import fetch
from contraflow.weights.manifest import DTYPES, digest
from contraflow.weights.memory import MemoryCarrier, shared_folder
from contraflow.weights.publish import Publisher, publish
from tests.processes import forking

PROBE = Probe((np.array([3, 1, 4], np.int32),), (np.array([-0.5, -1.25], np.float32),), 1e-3)
WAIT_S = 60.0


@dataclass
class Place:
    """One run's carrier as its processes see it, and hands that reach the bytes behind it."""

    kind: str
    folder: Path

    def open(self) -> Carrier:
        run_id = derive_run_id(self.folder)
        inner: Carrier = BlobCarrier(open_blobs(str(self.folder / "weights")), run_id)
        if "memory" in self.kind:
            inner = MemoryCarrier(self.shared(), run_id)
        return DeltaCarrier(inner, full_every=3) if "delta" in self.kind else inner

    def shared(self) -> Path:
        """A corner of this test's own: runs that begin elsewhere on the host remove what a killed publisher left."""
        return shared_folder() / f"test-{derive_run_id(self.folder)}"

    def root(self) -> Path:
        run_id = derive_run_id(self.folder)
        return self.shared() / f"contraflow-{run_id}" if "memory" in self.kind else self.folder / "weights" / run_id

    def file(self, manifest: Manifest, index: int) -> tuple[Path, int]:
        """The file that holds chunk `index`, and where in it the chunk starts."""
        if "memory" in self.kind:
            return Path(manifest.location), index * manifest.chunk_bytes
        return self.folder / "weights" / manifest.location / f"{index:06d}", 0

    def files(self) -> list[Path]:
        return [path for path in self.root().rglob("*") if path.is_file()]


@pytest.fixture(params=["memory", "blob", "delta-memory", "delta-blob"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = Place(request.param, tmp_path)
    yield place
    shutil.rmtree(place.shared(), ignore_errors=True)


@pytest.fixture
def carrier(place: Place) -> Iterator[Carrier]:
    """The publishing side."""
    carrier = place.open()
    carrier.claim()
    yield carrier
    carrier.close()
    assert place.files() == []


def send(carrier: Carrier, tensors: dict[str, torch.Tensor], n: int = 0, chunk_bytes: int = 256) -> Manifest:
    return publish(
        tensors,
        version=Version(1, n),
        parent=None,
        model="m",
        probe=PROBE,
        carrier=carrier,
        chunk_bytes=chunk_bytes,
    )


def some_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(33, 8, generator=noise),
        "norm": torch.randn(8, generator=noise).to(torch.bfloat16),
        "scale": torch.randn((), generator=noise),
        "none": torch.empty(0, 8),
    }


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (found[name], tensor)]
        assert torch.equal(*flat), name


@st.composite
def tensor_sets(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    names = draw(st.lists(st.text("abc.0", min_size=1, max_size=6), unique=True, max_size=6))
    tensors = {}
    for name in names:
        shape = draw(st.lists(st.integers(0, 7), max_size=3))
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        bits = torch.frombuffer(bytearray(draw(st.binary(min_size=8, max_size=8)) * 400), dtype=torch.uint8)
        count = int(np.prod(shape)) if shape else 1
        raw = bits[: count * dtype.itemsize].clone()
        tensor = (raw % 2).bool() if dtype is torch.bool else raw.view(dtype)
        tensor = tensor.reshape(shape)
        tensors[name] = tensor.transpose(0, -1) if draw(st.booleans()) and len(shape) > 1 else tensor
    return tensors


@given(tensors=tensor_sets(), chunk_bytes=st.sampled_from([13, 64, 100, 4096, 1 << 20]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
def test_any_tensors_of_any_shape_and_dtype_arrive_bit_equal(
    place: Place, carrier: Carrier, tensors: dict[str, torch.Tensor], chunk_bytes: int
) -> None:
    manifest = send(carrier, tensors, chunk_bytes=chunk_bytes)
    assert_same(fetch(manifest, place.open()).tensors, tensors)
    carrier.retire(manifest.version)


def test_a_version_larger_than_many_chunks_arrives_bit_equal(place: Place, carrier: Carrier) -> None:
    tensors = {f"w{i}": torch.randn(1000 + i, 37, generator=torch.Generator().manual_seed(i)) for i in range(12)}
    manifest = send(carrier, tensors, chunk_bytes=1 << 16)
    assert len(manifest.digests) > 20
    assert_same(fetch(manifest, place.open()).tensors, tensors)


def test_the_stored_manifest_is_the_returned_one(place: Place, carrier: Carrier) -> None:
    manifest = send(carrier, some_tensors())
    stored = place.open().manifest(manifest.version)
    assert [(t.name, t.shape, t.offset) for t in stored.tensors] == [
        (t.name, t.shape, t.offset) for t in manifest.tensors
    ]
    assert (stored.version, stored.digests, stored.location) == (manifest.version, manifest.digests, manifest.location)
    assert stored.probe.logprobs[0].dtype == np.float32
    np.testing.assert_array_equal(stored.probe.logprobs[0], PROBE.logprobs[0])
    np.testing.assert_array_equal(stored.probe.prompts[0], PROBE.prompts[0])


def test_the_digests_are_those_of_the_bytes_laid_out_by_hand_with_zeros_between(carrier: Carrier) -> None:
    tensors = {"b": torch.arange(5, dtype=torch.int32), "a": torch.ones(3, dtype=torch.float64)}
    laid = np.ones(3).tobytes() + bytes(64 - 24) + np.arange(5, dtype=np.int32).tobytes()
    manifest = send(carrier, tensors, chunk_bytes=50)
    assert manifest.digests == tuple(hashlib.sha256(laid[i : i + 50]).hexdigest() for i in range(0, len(laid), 50))


def test_the_same_tensors_give_the_same_digests_whatever_their_order(place: Place, carrier: Carrier) -> None:
    tensors = some_tensors()
    first = send(carrier, tensors, 0)
    second = send(carrier, dict(reversed(tensors.items())), 1)
    assert first.digests == second.digests
    assert first.tensors == second.tensors


def test_a_version_can_be_read_only_when_all_of_it_is_there(place: Place, carrier: Carrier) -> None:
    manifest = send(carrier, some_tensors(), 0)
    carrier.retire(manifest.version)
    sink = carrier.create(Version(1, 0), 2000, manifest.chunk_bytes)
    for index in range(len(manifest.digests)):
        sink.put(index, sink.buffer(index))
        assert place.open().versions() == []
        with pytest.raises(VersionGone, match=r"version 1\.0 .*never completed"):
            fetch(manifest, place.open())
    sink.discard()
    assert [path.name for path in place.files()] == []


def test_a_publish_that_fails_half_way_leaves_nothing(place: Place, carrier: Carrier) -> None:
    broken = {**some_tensors(), "zz": torch.empty(4, 4, device="meta")}
    with pytest.raises((NotImplementedError, RuntimeError)):
        send(carrier, broken)
    assert place.files() == []
    assert_same(fetch(send(carrier, some_tensors()), place.open()).tensors, some_tensors())


def test_versions_are_listed_in_their_order(place: Place, carrier: Carrier) -> None:
    for n in (2, 9, 10):
        send(carrier, some_tensors(), n)
    assert place.open().versions() == [Version(1, 2), Version(1, 9), Version(1, 10)]


@pytest.mark.parametrize("version", [Version(2, 5), Version(2, 4), Version(1, 99)])
def test_a_version_that_is_not_newer_is_refused_and_the_old_one_stays(
    place: Place, carrier: Carrier, version: Version
) -> None:
    there = publish(
        some_tensors(), version=Version(2, 5), parent=None, model="m", probe=PROBE, carrier=carrier, chunk_bytes=64
    )
    with pytest.raises(CarrierError, match=rf"{version} is not newer than 2\.5"):
        publish(some_tensors(1), version=version, parent=None, model="m", probe=PROBE, carrier=carrier, chunk_bytes=64)
    with pytest.raises(CarrierError, match="published once"):
        carrier.create(Version(2, 5), 10, 10)
    assert_same(fetch(there, place.open()).tensors, some_tensors())


def test_only_a_side_that_claimed_may_write(place: Place, carrier: Carrier) -> None:
    with pytest.raises(CarrierError, match="claimed"):
        place.open().create(Version(1, 0), 10, 10)


def test_a_retired_version_is_gone_but_who_has_it_keeps_it(place: Place, carrier: Carrier) -> None:
    manifest = send(carrier, some_tensors())
    fetched = fetch(manifest, place.open())
    carrier.retire(manifest.version)
    carrier.retire(manifest.version)
    assert place.files() == []
    assert_same(fetched.tensors, some_tensors())
    with pytest.raises(VersionGone, match=r"version 1\.0"):
        fetch(manifest, place.open())
    with pytest.raises(VersionGone, match=r"version 1\.0"):
        place.open().manifest(manifest.version)


def test_a_tensor_outlives_the_fetch_it_came_from_and_the_carrier(place: Place) -> None:
    carrier = place.open()
    carrier.claim()
    fetched = fetch(send(carrier, some_tensors()), place.open())
    kept = fetched.tensors["embed"]
    fetched.close()
    fetched.close()
    carrier.close()
    assert fetched.tensors == {}
    assert torch.equal(kept, some_tensors()["embed"])


def test_a_reader_that_writes_to_its_tensors_alters_nobody_elses(place: Place, carrier: Carrier) -> None:
    manifest = send(carrier, some_tensors())
    careless = fetch(manifest, place.open())
    careless.tensors["embed"].fill_(7.0)
    assert_same(fetch(manifest, place.open()).tensors, some_tensors())


def test_closing_a_reader_removes_nothing_and_closing_the_publisher_everything(place: Place) -> None:
    publisher, reader = place.open(), place.open()
    publisher.claim()
    manifest = send(publisher, some_tensors())
    reader.close()
    reader.close()
    assert_same(fetch(manifest, reader).tensors, some_tensors())
    publisher.close()
    publisher.close()
    assert place.files() == []
    with pytest.raises(VersionGone):
        fetch(manifest, reader)


def test_two_runs_do_not_see_each_other(place: Place, carrier: Carrier, tmp_path: Path) -> None:
    elsewhere = Place(place.kind, tmp_path / "other")
    other = elsewhere.open()
    other.claim()
    manifest = send(carrier, some_tensors(0))
    theirs = send(other, some_tensors(1))
    with pytest.raises(CarrierError, match="of another run"):
        fetch(theirs, place.open())
    other.close()
    shutil.rmtree(elsewhere.shared(), ignore_errors=True)
    assert_same(fetch(manifest, place.open()).tensors, some_tensors(0))


def test_an_altered_byte_is_found_and_its_chunk_named(place: Place, carrier: Carrier) -> None:
    manifest = send(carrier, some_tensors())
    path, start = place.file(manifest, 2)
    data = bytearray(path.read_bytes())
    data[start + 5] ^= 1
    path.write_bytes(bytes(data))
    found = digest(bytes(data[start : start + manifest.chunk_bytes]))
    with pytest.raises(CarrierError, match=rf"version 1\.0, chunk 2 .*{manifest.digests[2]}.*{found}"):
        fetch(manifest, place.open())


def test_a_truncated_chunk_is_found_and_named(place: Place, carrier: Carrier) -> None:
    manifest = send(carrier, some_tensors())
    path, start = place.file(manifest, 1)
    data = path.read_bytes()[: start + 100]
    os.truncate(path, start + 100)
    found = digest(data[start:])
    with pytest.raises(
        CarrierError, match=rf"version 1\.0, chunk 1 .*{manifest.digests[1]}.*{found} over 100 of 256 bytes"
    ):
        fetch(manifest, place.open())


def test_bytes_of_length_zero_are_found_and_named(place: Place, carrier: Carrier) -> None:
    manifest = send(carrier, some_tensors())
    os.truncate(place.file(manifest, 0)[0], 0)
    with pytest.raises(CarrierError, match=r"version 1\.0, chunk 0 .*over 0 of 256 bytes"):
        fetch(manifest, place.open())


def test_missing_bytes_are_found_and_named(place: Place, carrier: Carrier) -> None:
    manifest = send(carrier, some_tensors())
    place.file(manifest, 1)[0].unlink()
    with pytest.raises(CarrierError, match=r"version 1\.0"):
        fetch(manifest, place.open())


def test_a_torn_or_altered_manifest_is_refused(place: Place, carrier: Carrier) -> None:
    manifest = send(carrier, some_tensors())
    (path,) = [path for path in place.files() if "manifest" in str(path)]
    whole = path.read_bytes()
    for data in (whole[:-40], b"", whole.replace(b'"chunk_bytes":256', b'"chunk_bytes":128'), b"\xff" + whole):
        path.write_bytes(data)
        with pytest.raises(CarrierError, match=r"torn or not a manifest|was altered"):
            place.open().manifest(manifest.version)


def _read(place: Place, manifests: Connection, answers: Connection) -> None:
    carrier = place.open()
    while (manifest := manifests.recv()) is not None:
        fetched = fetch(manifest, carrier)
        answers.send({name: tensor.double().sum().item() for name, tensor in fetched.tensors.items()})
    carrier.close()


def test_other_processes_read_what_this_one_publishes(place: Place, carrier: Carrier) -> None:
    readers = []
    for _ in range(2):
        (manifests, theirs), (answers, given) = forking().Pipe(), forking().Pipe()
        process = forking().Process(target=_read, args=(place, theirs, given))
        process.start()
        readers.append((process, manifests, answers))
    for n in range(3):
        manifest = send(carrier, some_tensors(n), n)
        for _, manifests, _ in readers:
            manifests.send(manifest)
        for _, _, answers in readers:
            assert answers.poll(WAIT_S)
            assert answers.recv() == {name: tensor.double().sum().item() for name, tensor in some_tensors(n).items()}
    for process, manifests, _ in readers:
        manifests.send(None)
        process.join(WAIT_S)
        assert process.exitcode == 0
    assert_same(fetch(manifest, place.open()).tensors, some_tensors(2))


def _publish_and_die(place: Place, answers: Connection) -> None:
    carrier = place.open()
    carrier.claim()
    manifest = send(carrier, some_tensors(), 0)
    sink = carrier.create(Version(1, 1), 2000, 256)
    sink.buffer(0).fill_(1)
    sink.put(0, sink.buffer(0))
    answers.send(manifest)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_publisher_killed_in_mid_write_leaves_whole_versions_and_its_successor_clears_up(place: Place) -> None:
    answers, given = forking().Pipe()
    process = forking().Process(target=_publish_and_die, args=(place, given))
    process.start()
    assert answers.poll(WAIT_S)
    manifest = answers.recv()
    process.join(WAIT_S)
    assert process.exitcode == -signal.SIGKILL
    assert place.open().versions() == [Version(1, 0)]
    assert_same(fetch(manifest, place.open()).tensors, some_tensors())
    with closing(Publisher(place.open())) as publisher:
        assert place.files() == []
        there = publisher.publish(some_tensors(3), version=Version(2, 0), model="m", probe=PROBE, chunk_bytes=256)
        assert_same(fetch(there, place.open()).tensors, some_tensors(3))
    assert place.files() == []


def test_a_publisher_keeps_the_newest_two(place: Place) -> None:
    with closing(Publisher(place.open())) as publisher:

        def step(n: int) -> list[int]:
            manifest = publisher.publish(
                some_tensors(n), version=Version(1, n), model="m", probe=PROBE, chunk_bytes=256
            )
            assert manifest.parent == (Version(1, n - 1) if n else None)
            assert publisher.newest == manifest.version
            return [version.n for version in place.open().versions()]

        built_upon = 2 if "delta" in place.kind else 0  # so many older ones stay while a delta needs them
        for n in range(7):
            there = step(n)
            assert there[-2:] == list(range(n + 1))[-2:]
            assert len(there) <= 2 + built_upon
    assert place.files() == []
