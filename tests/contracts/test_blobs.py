"""What every blob space promises, whatever holds the bytes: a folder, and a real S3 where there is one."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contraflow.blobs import Blobs, open_blobs
from contraflow.errors import BlobError, BlobExists, BlobMissing
from tests.racing import Try, race


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.s3)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(request.getfixturevalue("bucket")) if request.param == "s3" else str(tmp_path / "blobs")


@pytest.fixture
def blobs(url: str) -> Blobs:
    return open_blobs(url)


@given(data=st.binary(max_size=300))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
def test_what_is_put_is_what_is_got(blobs: Blobs, data: bytes) -> None:
    blobs.put("a/b", data)
    assert blobs.get("a/b") == data


def test_a_numpy_view_is_written_without_conversion(blobs: Blobs) -> None:
    blobs.put("view", np.arange(256, dtype=np.uint8)[16:32])
    assert blobs.get("view") == bytes(range(16, 32))


def test_twelve_megabytes_come_back_whole_with_and_without_create(blobs: Blobs) -> None:
    data = np.random.default_rng(0).bytes(12 << 20)
    blobs.put("big/over", data)
    blobs.put("big/new", data, create=True)
    assert blobs.get("big/over") == data
    assert blobs.get("big/new") == data


def test_a_second_put_replaces_the_first(blobs: Blobs) -> None:
    blobs.put("k", b"long first value")
    blobs.put("k", b"short")
    assert blobs.get("k") == b"short"


def test_create_on_a_key_that_is_there_is_refused_and_changes_nothing(blobs: Blobs) -> None:
    blobs.put("k", b"first", create=True)
    with pytest.raises(BlobExists, match="'k'"):
        blobs.put("k", b"second", create=True)
    assert blobs.get("k") == b"first"


def test_a_missing_key_is_named(blobs: Blobs) -> None:
    with pytest.raises(BlobMissing, match="no blob 'nope/x'"):
        blobs.get("nope/x")
    with pytest.raises(BlobMissing, match="no blob 'nope/x'"):
        blobs.get_range("nope/x", 0, 1)


@pytest.mark.parametrize(("start", "length"), [(0, 10), (3, 4), (9, 1), (10, 0), (0, 0)])
def test_a_range_is_the_slice_it_names(blobs: Blobs, start: int, length: int) -> None:
    blobs.put("k", bytes(range(10)))
    assert blobs.get_range("k", start, length) == bytes(range(10))[start : start + length]


@pytest.mark.parametrize(("start", "length"), [(0, 11), (9, 2), (10, 1), (50, 1), (-1, 2), (1, -2)])
def test_a_range_beyond_the_blob_is_refused(blobs: Blobs, start: int, length: int) -> None:
    blobs.put("k", bytes(range(10)))
    with pytest.raises(BlobError, match="'k'"):
        blobs.get_range("k", start, length)


def test_list_is_sorted_and_goes_by_whole_path_parts(blobs: Blobs) -> None:
    for key in ("run/2/b", "run/1/a", "run/12/c", "other"):
        blobs.put(key, b"")
    assert blobs.list("run/1") == ["run/1/a"]
    assert blobs.list("run") == ["run/1/a", "run/12/c", "run/2/b"]
    assert blobs.list() == ["other", "run/1/a", "run/12/c", "run/2/b"]
    assert blobs.list("absent") == []


def test_sizes_and_the_next_path_parts_are_told(blobs: Blobs) -> None:
    for key, data in (("parts/b/x", b"12"), ("parts/a/y/z", b""), ("parts/c", b"1"), ("other/d/e", b"1")):
        blobs.put(key, data)
    assert blobs.sizes("parts") == {"parts/b/x": 2, "parts/a/y/z": 0, "parts/c": 1}
    assert blobs.below("parts") == ["a", "b"]
    assert blobs.below("absent") == []


def test_clear_takes_all_below_a_prefix_and_nothing_else(blobs: Blobs) -> None:
    for key in ("run/1/a", "run/1/b/c", "run/12/c", "run/1x"):
        blobs.put(key, b"x")
    blobs.sync(["run/1/a", "run/1/b/c"])
    blobs.clear("run/1")
    assert blobs.list() == ["run/12/c", "run/1x"]
    blobs.clear("run/1")
    for prefix in ("", "../blobs", "run/../run"):
        with pytest.raises(BlobError):
            blobs.clear(prefix)
    assert blobs.list() == ["run/12/c", "run/1x"]


def test_syncing_what_is_not_there_is_refused_in_a_folder(tmp_path: Path) -> None:
    with pytest.raises(BlobMissing, match="'a/b'"):
        open_blobs(str(tmp_path)).sync(["a/b"])


def test_delete_takes_what_is_there_and_passes_over_what_is_not(blobs: Blobs) -> None:
    for key in ("a", "b", "c/d"):
        blobs.put(key, b"x")
    blobs.delete(["gone", "a", "never/was", "c/d"])
    assert blobs.list() == ["b"]
    blobs.delete([])
    assert blobs.list() == ["b"]


@pytest.mark.parametrize("key", ["../out", "a/../../out", "a//b"])
def test_a_key_cannot_leave_its_space(blobs: Blobs, key: str, tmp_path: Path) -> None:
    with pytest.raises(BlobError):
        blobs.put(key, b"x")
    assert not (tmp_path / "out").exists()


def _entered(url: str, name: str) -> Try:
    blobs = open_blobs(url)

    def attempt(key: str) -> bool:
        try:
            blobs.put(key, name.encode() * 1000, create=True)
        except BlobExists:
            return False
        return True

    return attempt


def test_of_racing_creators_of_one_key_exactly_one_wins(blobs: Blobs, url: str) -> None:
    won = race(_entered, url, [f"lease/{i}" for i in range(50)], wait_s=30)
    for name, mine in won.items():
        assert all(blobs.get(key) == name.encode() * 1000 for key in mine)
