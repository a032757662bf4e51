"""Versions that travel as deltas: what is sent, what is kept, and every way in which the parent can be missing."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contraflow.blobs import Blobs, open_blobs
from contraflow.config import Weights
from contraflow.errors import BlobError, CarrierError, ConfigError, VersionGone
from contraflow.types import Delta, Manifest, Probe, Version
from contraflow.weights import open_carrier
from contraflow.weights.blob import BlobCarrier
from contraflow.weights.carrier import Carrier
from contraflow.weights.delta_carrier import DeltaCarrier
from contraflow.weights.fetch import Fetched, fetch
from contraflow.weights.manifest import check_manifest, decode_manifest, digest, encode_manifest, total_bytes
from contraflow.weights.publish import Publisher

PROBE = Probe((np.array([1, 2], np.int32),), (np.array([0.1], np.float32),), 1e-3)
CHUNK = 1000
Open = Callable[[], Carrier]


@pytest.fixture(params=["memory", "blob"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    return lambda: open_carrier(Weights(carrier=request.param, full_every=5), tmp_path)


@pytest.fixture
def publisher(opened: Open) -> Iterator[Publisher]:
    with closing(Publisher(opened(), keep=2)) as publisher:
        yield publisher


def weights_of(n: int) -> dict[str, torch.Tensor]:
    """Version n differs from n - 1 in about one element of a hundred."""
    noise = torch.Generator().manual_seed(0)
    weights = {"a": torch.randn(1501, 3, generator=noise).to(torch.bfloat16), "b": torch.randn(777, generator=noise)}
    for _ in range(n):
        for tensor in weights.values():
            tensor.mul_(1 + 0.01 * (torch.rand(tensor.shape, generator=noise) < 0.01))
    return weights


def send(publisher: Publisher, n: int, tensors: dict[str, torch.Tensor] | None = None) -> Manifest:
    return publisher.publish(
        weights_of(n) if tensors is None else tensors,
        version=Version(1, n),
        model="m",
        probe=PROBE,
        chunk_bytes=CHUNK,
    )


def assert_is(fetched: Fetched, tensors: dict[str, torch.Tensor]) -> None:
    assert fetched.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = fetched.tensors[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert found.contiguous().view(-1).view(torch.uint8).equal(tensor.contiguous().view(-1).view(torch.uint8))


def test_an_engine_that_follows_reads_changes_only_and_gets_every_byte(opened: Open, publisher: Publisher) -> None:
    reader = opened()
    for n in range(12):
        manifest = send(publisher, n)
        fetched = fetch(manifest, reader)
        assert_is(fetched, weights_of(n))
        if n % 5 == 0:
            assert (manifest.delta, fetched.arrival) == (None, (total_bytes(manifest.tensors), "whole"))
        else:
            assert manifest.delta is not None
            assert fetched.arrival == (sum(manifest.delta.lengths), f"1 delta upon 1.{n - 1}")
            assert fetched.arrival.moved < total_bytes(manifest.tensors) / 10


def test_an_engine_that_is_behind_goes_through_the_deltas_since(opened: Open, publisher: Publisher) -> None:
    """Two are published while one travels: the engine asks for the newest when that has come."""
    reader = opened()
    fetch(send(publisher, 0), reader)
    fetch(send(publisher, 1), reader)
    send(publisher, 2)
    manifest = send(publisher, 3)
    fetched = fetch(manifest, reader)
    assert_is(fetched, weights_of(3))
    assert fetched.arrival.via == "2 deltas upon 1.1"


def test_an_engine_that_has_nothing_begins_at_the_last_whole_version(opened: Open, publisher: Publisher) -> None:
    for n in range(4):
        manifest = send(publisher, n)
    fetched = fetch(manifest, opened())
    assert_is(fetched, weights_of(3))
    assert fetched.arrival.via == "3 deltas upon 1.0, whole"
    assert total_bytes(manifest.tensors) < fetched.arrival.moved < 2 * total_bytes(manifest.tensors)


def test_an_engine_behind_the_last_whole_version_reads_that(opened: Open, publisher: Publisher) -> None:
    reader = opened()
    fetch(send(publisher, 0), reader)
    for n in range(1, 7):
        manifest = send(publisher, n)
    fetched = fetch(manifest, reader)
    assert_is(fetched, weights_of(6))
    assert fetched.arrival.via == "1 delta upon 1.5, whole"


def test_a_held_parent_that_was_altered_is_found_and_only_what_was_hit_is_made_anew(
    opened: Open, publisher: Publisher
) -> None:
    reader = opened()
    send(publisher, 0)
    held = fetch(send(publisher, 1), reader)
    held.tensors["b"][5] = 7.0
    held.tensors["a"][0, 0] = torch.nan
    fetched = fetch(send(publisher, 2), reader)
    assert_is(fetched, weights_of(2))
    altered = "2 chunks of what was held were altered, and made anew from 2 deltas upon 1.0, whole"
    assert fetched.arrival.via == f"1 delta upon 1.1; {altered}"
    assert fetch(send(publisher, 3), reader).arrival.via == "1 delta upon 1.2"


def test_what_a_reader_proved_is_built_upon_and_what_it_could_not_is_not(tmp_path: Path) -> None:
    carrier = DeltaCarrier(BlobCarrier(open_blobs(str(tmp_path)), "run"), full_every=9)
    with closing(Publisher(carrier)) as publisher:
        reader = DeltaCarrier(BlobCarrier(open_blobs(str(tmp_path)), "run"), full_every=9)
        fetch(send(publisher, 0), reader)
        torn = send(publisher, 1)
        first = tmp_path / torn.location / "000000"
        whole = first.read_bytes()
        first.write_bytes(whole[:-1])
        with pytest.raises(CarrierError, match=r"version 1\.1, chunk 0 of 1 .*did not arrive whole") as caught:
            fetch(torn, reader)
        assert not isinstance(caught.value, VersionGone)
        first.write_bytes(whole)
        fetched = fetch(send(publisher, 2), reader)
        assert_is(fetched, weights_of(2))
        assert fetched.arrival.via == "2 deltas upon 1.0"


def test_a_delta_with_a_flipped_bit_is_refused_by_name(tmp_path: Path) -> None:
    carrier = DeltaCarrier(BlobCarrier(open_blobs(str(tmp_path)), "run"), full_every=9)
    with closing(Publisher(carrier)) as publisher:
        send(publisher, 0)
        manifest = send(publisher, 1)
        path = tmp_path / manifest.location / "000000"
        data = bytearray(path.read_bytes())
        data[-1] ^= 4
        path.write_bytes(bytes(data))
        with pytest.raises(CarrierError, match=r"version 1\.1, chunk 0"):
            fetch(manifest, carrier)


def test_a_chain_whose_parent_was_taken_away_is_broken_and_says_so(tmp_path: Path) -> None:
    inner = BlobCarrier(open_blobs(str(tmp_path)), "run")
    with closing(Publisher(DeltaCarrier(inner, full_every=9), keep=5)) as publisher:
        for n in range(3):
            manifest = send(publisher, n)
        inner.retire(Version(1, 1))
        with pytest.raises(CarrierError, match=r"1\.2 is there, but not all it is built upon: .*1\.1") as caught:
            fetch(manifest, DeltaCarrier(inner, full_every=9))
        assert not isinstance(caught.value, VersionGone)


def test_a_retired_version_is_gone_as_with_any_carrier(opened: Open, publisher: Publisher) -> None:
    manifests = [send(publisher, n) for n in range(9)]
    for old in manifests[:5]:
        with pytest.raises(VersionGone, match=rf"{old.version} is not there"):
            fetch(old, opened())


def test_what_a_kept_delta_is_built_upon_is_kept_and_no_more(opened: Open, publisher: Publisher) -> None:
    there = []
    for n in range(12):
        send(publisher, n)
        there.append([version.n for version in opened().versions()])
    # Two are kept, and what they are built upon: 0, 5 and 10 are whole.
    assert there[4:9] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [5, 6], [5, 6, 7], [5, 6, 7, 8]]
    assert there[11] == [10, 11]


def test_when_all_of_it_changed_the_version_travels_whole(opened: Open, publisher: Publisher) -> None:
    reader = opened()
    fetch(send(publisher, 0), reader)
    other = {name: torch.rand(tensor.shape).to(tensor.dtype) + 5 for name, tensor in weights_of(0).items()}
    manifest = send(publisher, 1, other)
    assert manifest.delta is None
    assert_is(fetch(manifest, reader), other)
    assert send(publisher, 2, {**other, "b": other["b"] + 1}).delta is not None


def test_deltas_are_together_no_larger_than_the_whole_version_they_begin_at(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(1)
    weights = {"w": torch.randint(0, 1 << 15, (5000,), generator=rng, dtype=torch.int16)}
    whole = []
    with closing(Publisher(open_carrier(Weights(carrier="blob", full_every=99), tmp_path))) as publisher:
        for n in range(8):
            fresh = torch.randint(0, 1 << 15, (5000,), generator=rng, dtype=torch.int16)
            weights["w"] = torch.where(torch.rand(5000, generator=rng) < 0.3, fresh, weights["w"])
            whole.append(send(publisher, n, weights).delta is None)
    assert whole == [True, False, False, True, False, False, True, False]


def test_nothing_changed_moves_nothing(opened: Open, publisher: Publisher) -> None:
    reader = opened()
    fetch(send(publisher, 0), reader)
    fetched = fetch(send(publisher, 1, weights_of(0)), reader)
    assert_is(fetched, weights_of(0))
    assert fetched.arrival == (0, "1 delta upon 1.0")


@pytest.mark.parametrize("tensors", [{}, {"w": torch.zeros(0, 4)}, {"w": torch.zeros(())}])
def test_versions_of_next_to_nothing_travel(
    opened: Open, publisher: Publisher, tensors: dict[str, torch.Tensor]
) -> None:
    reader = opened()
    for n in range(3):
        assert_is(fetch(send(publisher, n, tensors), reader), tensors)


def test_a_version_of_another_size_travels_whole(opened: Open, publisher: Publisher) -> None:
    reader = opened()
    fetch(send(publisher, 0), reader)
    larger = {**weights_of(1), "c": torch.ones(3)}
    manifest = send(publisher, 1, larger)
    assert manifest.delta is None
    assert_is(fetch(manifest, reader), larger)


def test_a_publish_that_failed_leaves_no_bytes_to_build_upon(opened: Open, publisher: Publisher) -> None:
    reader = opened()
    fetch(send(publisher, 0), reader)
    with pytest.raises((NotImplementedError, RuntimeError)):
        send(publisher, 1, {**weights_of(1), "b": torch.empty(777, device="meta")})
    manifest = send(publisher, 1)
    assert manifest.delta is None
    assert_is(fetch(manifest, reader), weights_of(1))


class FullDisk(Blobs):
    """A blob space whose disk is full after so many writes."""

    room = 10_000

    def put(self, key: str, data: object, *, create: bool = False) -> None:
        self.room -= 1
        if self.room < 0:
            raise BlobError(f"cannot write {key!r}: No space left on device")
        super().put(key, data, create=create)


@pytest.mark.parametrize("room", [0, 1])  # for the changes; for those, but not for the manifest
def test_a_disk_that_fills_up_costs_the_new_delta_and_not_the_old_version(tmp_path: Path, room: int) -> None:
    blobs = FullDisk(open_blobs(str(tmp_path))._store, str(tmp_path))
    carrier = DeltaCarrier(BlobCarrier(blobs, "run", lanes=1), full_every=9)
    with closing(Publisher(carrier)) as publisher:
        kept = send(publisher, 0)
        blobs.room = room
        with pytest.raises(BlobError, match="No space left"):
            send(publisher, 1)
        assert carrier.versions() == [Version(1, 0)]
        assert blobs.list("run/chunks/1.1") == []
        assert_is(fetch(kept, carrier), weights_of(0))
        blobs.room = 10_000
        assert_is(fetch(send(publisher, 1), carrier), weights_of(1))


def test_what_is_published_next_does_not_touch_what_an_engine_of_the_same_process_serves(tmp_path: Path) -> None:
    carrier = open_carrier(Weights(carrier="memory", full_every=9), tmp_path)
    with closing(Publisher(carrier)) as publisher:
        served = fetch(send(publisher, 0), carrier)
        later = fetch(send(publisher, 1), carrier)
        send(publisher, 2)
        assert_is(served, weights_of(0))
        assert_is(later, weights_of(1))


def test_a_parent_of_other_bytes_is_not_built_upon(opened: Open, publisher: Publisher) -> None:
    send(publisher, 0)
    manifest = send(publisher, 1)
    assert manifest.delta is not None
    other = msgspec.structs.replace(manifest.delta, seal=digest(b"other"))
    with pytest.raises(CarrierError, match=r"1\.1 was not built upon the 1\.0 that is there"):
        fetch(msgspec.structs.replace(manifest, delta=other), opened())


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"parent": Version(1, 1)}, "built upon 1.1; must be an older version"),
        ({"lengths": (1,)}, "lengths"),
        ({"lengths": (-1, 1)}, "lengths"),
        ({"digests": ()}, "0 digests for 1 pieces"),
    ],
)
def test_an_unsound_delta_is_refused(tmp_path: Path, keys: dict[str, object], says: str) -> None:
    with closing(Publisher(open_carrier(Weights(carrier="blob", full_every=9), tmp_path))) as publisher:
        send(publisher, 0, {"w": torch.ones(500)})
        manifest = send(publisher, 1, {"w": torch.full((500,), 1.5)})
    assert manifest.delta is not None
    unsound = msgspec.structs.replace(manifest.delta, **keys)
    with pytest.raises(CarrierError, match=says):
        check_manifest(msgspec.structs.replace(manifest, delta=unsound))


def test_a_manifest_stored_before_there_were_deltas_is_read(tmp_path: Path) -> None:
    with closing(Publisher(open_carrier(Weights(carrier="blob"), tmp_path))) as publisher:
        manifest = send(publisher, 0)
    sealed = msgspec.json.decode(encode_manifest(manifest))
    body = {key: value for key, value in sealed["manifest"].items() if key != "delta"}
    old = msgspec.json.encode(body)
    found = decode_manifest(b'{"digest":"%s","manifest":%s}' % (digest(old).encode(), old), "an old run")
    assert (found.delta, found.digests) == (None, manifest.digests)


def test_a_delta_is_stored_as_it_is_returned(opened: Open, publisher: Publisher) -> None:
    send(publisher, 0)
    manifest = send(publisher, 1)
    assert isinstance(manifest.delta, Delta)
    assert opened().manifest(manifest.version).delta == manifest.delta


def test_a_carrier_that_sends_nothing_whole_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="full_every = 0"):
        DeltaCarrier(BlobCarrier(open_blobs(str(tmp_path)), "run"), full_every=0)


@given(
    steps=st.lists(st.tuples(st.sampled_from([0.0, 0.02, 0.4, 1.0]), st.booleans()), min_size=1, max_size=12),
    full_every=st.integers(1, 6),
    keep=st.integers(1, 4),
    seed=st.integers(0, 999),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_whatever_changes_and_whichever_versions_an_engine_takes_it_gets_every_byte(
    tmp_path: Path, steps: list[tuple[float, bool]], full_every: int, keep: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, 3001, dtype=np.uint8)
    inner = BlobCarrier(open_blobs(str(tmp_path)), "run", lanes=1)
    reader, newcomer = DeltaCarrier(inner, full_every), DeltaCarrier(inner, full_every)
    with closing(Publisher(DeltaCarrier(inner, full_every), keep=keep)) as publisher:
        for n, (share, takes) in enumerate(steps):
            data = np.where(rng.random(3001) < share, rng.integers(0, 256, 3001, dtype=np.uint8), data)
            manifest = send(publisher, n, {"w": torch.from_numpy(data.copy())})
            for one in [reader] * takes + [newcomer] * (n == len(steps) - 1):
                fetched = fetch(manifest, one)
                assert np.array_equal(fetched.tensors["w"].numpy(), data)
                assert fetched.arrival.moved <= 2 * total_bytes(manifest.tensors)
    assert inner.versions() == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")
def test_tensors_on_a_gpu_travel_as_deltas(opened: Open, publisher: Publisher) -> None:
    reader = opened()
    for n in range(3):
        fetched = fetch(send(publisher, n, {name: tensor.cuda() for name, tensor in weights_of(n).items()}), reader)
        assert_is(fetched, weights_of(n))
    assert fetched.arrival.via == "1 delta upon 1.1"
