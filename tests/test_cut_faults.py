"""Cuts on a real S3 behind a proxy that fails: each fault is survived, or told; no torn cut is ever seen."""

from collections.abc import Iterator

import numpy as np
import pytest

from contraflow.blobs import open_blobs
from contraflow.cuts import CutId
from contraflow.errors import BlobError, CheckpointError, CutTaken
from tests.cut_writer import attempt, names_whole, space_in
from tests.faulty_proxy import Fault, Proxy, running
from tests.seaweed import environment
from tests.test_cuts import race

pytestmark = [pytest.mark.s3, pytest.mark.timeout(120)]
KINDS = ["throttle", "error", "reset", "upload", "truncate", "lost", "stall"]


@pytest.fixture
def proxy(s3_port: int, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before the S3, which everything opened from here on goes through."""
    with running(Proxy(s3_port)) as proxy:
        for name, value in environment(proxy.port).items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("method", "path"),
    [("PUT", "parts/"), ("PUT", "manifests/"), ("GET", "parts/"), ("GET", "manifests/")],
    ids=["writing a part", "committing", "reading a part", "reading a manifest"],
)
def test_faults_that_pass_are_survived(proxy: Proxy, bucket: str, kind: str, method: str, path: str) -> None:
    space = space_in(bucket, 20.0)
    attempt(space, "line-0-step-1", "w")
    fault = Fault(kind, method, path, times=3)
    proxy.faults.append(fault)
    attempt(space, "line-0-step-2", "w")
    newest = space_in(bucket, 20.0).newest()
    assert newest.refused == ()
    assert newest.manifest is not None
    assert newest.manifest.id.name == "line-0-step-2"
    assert names_whole(space) == ["line-0-step-2", "line-0-step-1"]
    assert fault.met == 3 or (fault.met and kind in ("stall", "truncate"))  # of answers without a body nothing is cut


@pytest.mark.parametrize("kind", ["throttle", "error", "reset", "upload", "lost"])
@pytest.mark.parametrize("path", ["parts/line-0-step-2", "manifests/line-0-step-2"])
def test_faults_that_do_not_pass_are_told_at_the_deadline_and_the_older_cut_stays(
    proxy: Proxy, bucket: str, kind: str, path: str
) -> None:
    attempt(space_in(bucket, 20.0), "line-0-step-1", "w")
    proxy.faults.append(Fault(kind, "PUT", path, times=10**6))
    with pytest.raises(BlobError, match="given up after"):
        attempt(space_in(bucket, 1.0), "line-0-step-2", "w")
    proxy.faults.clear()
    space = space_in(bucket, 20.0)
    names = space.names()
    assert names_whole(space) == names
    # What the store did although it never said so is a cut, and a whole one.
    assert names == (["line-0-step-2"] if (kind, path[0]) == ("lost", "m") else []) + ["line-0-step-1"]


def test_a_lost_answer_to_the_commit_is_found_out_whoever_won(proxy: Proxy, bucket: str) -> None:
    space = space_in(bucket, 20.0)
    mine, other = CutId("line-0-step-1", "mine"), CutId("line-0-step-1", "other")
    parts = [space.put(mine, "a", b"1")]
    proxy.faults.append(Fault("lost", "PUT", "manifests/"))
    assert space.commit(mine, parts, {}).id == mine  # it went through, and nobody said so
    late = [space.put(other, "a", b"2")]
    proxy.faults.append(Fault("lost", "PUT", "manifests/"))
    with pytest.raises(CutTaken, match="belongs to writer mine"):  # it did not, and nobody said so
        space.commit(other, late, {})
    manifest = space.manifest("line-0-step-1")
    assert (manifest.id, space.read(manifest, manifest.part("a"))) == (mine, b"1")


@pytest.mark.parametrize("kind", ["throttle", "reset", "upload", "lost"])
def test_a_part_that_travels_in_pieces_arrives_whole(proxy: Proxy, bucket: str, kind: str) -> None:
    space, here = space_in(bucket, 30.0), CutId("line-0-step-1", "w")
    data = np.random.default_rng(0).bytes(12 << 20)
    proxy.faults.append(Fault(kind, "PUT", "parts/", times=2))
    proxy.faults.append(Fault("truncate", "GET", "parts/"))
    manifest = space.commit(here, [space.put(here, "big", data)], {})
    assert space.read(manifest, manifest.part("big")) == data
    assert len([line for line in proxy.seen if line.startswith("PUT") and "partNumber" in line]) >= 3


def test_wrong_keys_are_told_and_not_tried_for_long(proxy: Proxy, bucket: str) -> None:
    proxy.faults.append(Fault("deny", "PUT", "parts/", times=10**6))
    with pytest.raises(BlobError, match="403"):
        attempt(space_in(bucket, 0.5), "line-0-step-1", "w")


def test_of_racing_writers_on_s3_exactly_one_wins_each_cut(bucket: str) -> None:
    race(bucket, 8)


def test_a_manifest_that_names_a_missing_part_is_refused_and_the_older_cut_found(proxy: Proxy, bucket: str) -> None:
    space = space_in(bucket, 20.0)
    for step in (1, 2):
        attempt(space, f"line-0-step-{step}", "w")
    open_blobs(bucket).delete(["parts/line-0-step-2/w/model/a"])
    newest = space.newest()
    assert newest.manifest is not None
    assert newest.manifest.id.name == "line-0-step-1"
    assert "part 'model/a' is missing; the next older cut is line-0-step-1" in newest.refused[0]
    manifest = space.manifest("line-0-step-2")
    with pytest.raises(CheckpointError, match="missing"):
        space.read(manifest, manifest.part("model/a"))


def test_this_suite_reaches_a_store_that_checks_keys(
    s3_port: int, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(BlobError, match="403"):
        attempt(space_in(bucket, 0.5), "line-0-step-1", "w")
