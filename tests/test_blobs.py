"""How a blob space is opened, and what a bad url or an unreachable store says."""

from pathlib import Path

import pytest

from contraflow.blobs import open_blobs
from contraflow.errors import BlobError, ConfigError


def test_a_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    blobs = open_blobs(str(tmp_path / "a" / "b"))
    blobs.put("k", b"v")
    assert (tmp_path / "a" / "b" / "k").read_bytes() == b"v"


def test_a_folder_url_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_blobs("here").put("k", b"v")
    assert (tmp_path / "here" / "k").read_bytes() == b"v"


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/", "s3://bucket/prefix", "s3://bucket/a/deep/prefix/"])
def test_an_s3_url_opens_without_a_network(url: str) -> None:
    assert open_blobs(url).url == url


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "is empty"),
        ("s3://", "names no bucket"),
        ("s3:///prefix", "names no bucket"),
        ("s3:/bucket", "lacks a slash"),
        ("gs://b/p", "'gs' is not known"),
    ],
)
def test_a_bad_url_says_what_is_allowed(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_blobs(url)


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("x")
    with pytest.raises(BlobError, match="taken"):
        open_blobs(str(tmp_path / "taken")).put("k", b"v")


def test_an_unreachable_s3_gives_up_within_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_REGION": "eu-west-1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BlobError, match=r"cannot read 'p/k' in s3://bucket/run.*after \d+ retries"):
        open_blobs("s3://bucket/run", retry_s=0.3).get("p/k")
