"""Bytes under keys, in a folder or on S3: the only code that knows the difference.

Takes a folder path or `s3://bucket/prefix`, gives a `Blobs`. Every write is atomic: a reader finds all of a blob or
nothing. Does not cache, lock or list folders; S3 credentials, region and endpoint come from the usual AWS_* variables
(AWS_ENDPOINT_URL with AWS_ALLOW_HTTP=true for a plain-HTTP store).
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, S3Store

from contraflow.errors import BlobError, BlobExists, BlobMissing, ConfigError


class Blobs:
    """A flat space of keys such as `run/1.3/000004`; safe to use from several threads and processes at once.

    Invariant: a key never leaves the folder or prefix it was opened with.
    """

    def __init__(self, store: LocalStore | S3Store, url: str) -> None:
        self._store = store
        self.url = url

    def put(self, key: str, data: Any, *, create: bool = False) -> None:
        """Write `data` (bytes or any flat uint8 buffer) under `key`, over what was there.

        With `create`, of all writers that race for one key exactly one succeeds; the others get BlobExists.
        """
        with self._naming("write", key):
            obstore.put(self._store, key, data, mode="create" if create else "overwrite")

    def get(self, key: str) -> bytes:
        """The whole blob. Raises: BlobMissing, BlobError."""
        with self._naming("read", key):
            return bytes(obstore.get(self._store, key).bytes())

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """`length` bytes from byte `start`. Raises: BlobMissing, BlobError when the blob ends before that."""
        if start < 0 or length < 0:
            raise BlobError(f"cannot read {length} bytes at {start} of {key!r} in {self.url}: both must be >= 0")
        if length == 0:
            return b""  # the store refuses an empty range
        with self._naming("read", key):
            data = bytes(obstore.get_range(self._store, key, start=start, length=length))
        if len(data) != length:
            raise BlobError(f"{key!r} in {self.url} ends at byte {start + len(data)}; wanted {length} bytes at {start}")
        return data

    def below(self, prefix: str) -> list[str]:
        """The path parts that come next after `prefix`, sorted: folders only; in a folder even where a writer that was
        killed left nothing whole."""
        with self._naming("list", prefix):
            found = obstore.list_with_delimiter(self._store, prefix)["common_prefixes"]
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def list(self, prefix: str = "") -> list[str]:
        """All keys below `prefix` (whole path parts: `run/1` does not match `run/12`), sorted."""
        with self._naming("list", prefix):
            return sorted(entry["path"] for page in obstore.list(self._store, prefix=prefix) for entry in page)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Bytes of every blob below `prefix`, by key; prefixes as for `list`."""
        with self._naming("list", prefix):
            return {e["path"]: e["size"] for page in obstore.list(self._store, prefix=prefix) for e in page}

    def sync(self, keys: Sequence[str]) -> None:
        """Make written blobs outlast a power loss. S3 has by then answered that they do; a folder's files are synced,
        and so are the folders that name them."""
        if not isinstance(self._store, LocalStore):
            return
        root = Path(self.url).absolute()
        files = [root / key for key in keys]
        above = {parent for file in files for parent in file.parents if parent == root or root in parent.parents}
        for path in [*files, *sorted(above, reverse=True)]:
            with self._naming("sync", str(path.relative_to(root))):
                _sync(path)

    def clear(self, prefix: str) -> None:
        """Delete all below `prefix`, in a folder also what writers that were killed left half written."""
        if any(part in ("", ".", "..") for part in prefix.split("/")):
            raise BlobError(f"cannot clear {prefix!r} in {self.url}: it must name something below")
        if not isinstance(self._store, LocalStore):
            return self.delete(self.list(prefix))
        with self._naming("clear", prefix):
            shutil.rmtree(Path(self.url).absolute() / prefix, onerror=_unless_gone)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete these keys; one that is not there is no error."""
        try:
            with self._naming("delete", f"{len(keys)} keys"):
                obstore.delete(self._store, list(keys))
        except BlobMissing:
            # A folder stops at the first key that is missing (S3 does not), so the rest go one by one.
            for key in keys:
                self._delete_one(key)

    def _delete_one(self, key: str) -> None:
        try:
            with self._naming("delete", key):
                obstore.delete(self._store, key)
        except BlobMissing:
            return

    @contextmanager
    def _naming(self, verb: str, key: str) -> Iterator[None]:
        """Turn a failure of the store into ours, with the key and the place in it."""
        try:
            yield
        except FileNotFoundError:
            raise BlobMissing(f"there is no blob {key!r} in {self.url}") from None
        except AlreadyExistsError:
            raise BlobExists(f"blob {key!r} is already in {self.url}") from None
        except (BaseError, ValueError, OSError) as fault:
            reason = str(fault).split("\n", 1)[0]
            raise BlobError(f"cannot {verb} {key!r} in {self.url}: {reason}") from fault


def open_blobs(url: str, *, retry_s: float = 30.0) -> Blobs:
    """The blob space at `url`: a folder (made if missing) or `s3://bucket/prefix`. Nothing is sent yet.

    `retry_s` bounds how long a failing S3 call is tried again, with back-off, before it raises.

    >>> open_blobs("s3://my-bucket/runs/7").put("note", b"hello", create=True)
    """
    scheme, found, rest = url.partition("://")
    if not found and url.startswith("s3:"):
        raise ConfigError(f"blob url {url!r} lacks a slash; write s3://bucket/prefix")
    if not found:
        return Blobs(_folder(url), url)
    if scheme != "s3":
        raise ConfigError(f"blob url {url!r}: {scheme!r} is not known; give a folder path or s3://bucket/prefix")
    bucket, _, prefix = rest.partition("/")
    if not bucket:
        raise ConfigError(f"blob url {url!r} names no bucket; write s3://bucket/prefix")
    return Blobs(_bucket(bucket, prefix.strip("/"), retry_s), url)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unless_gone(_call: object, _path: str, failure: tuple[type[BaseException], BaseException, object]) -> None:
    if not isinstance(failure[1], FileNotFoundError):
        raise failure[1]


def _folder(url: str) -> LocalStore:
    if not url:
        raise ConfigError("blob url is empty; give a folder path or s3://bucket/prefix")
    try:
        return LocalStore(Path(url).absolute(), automatic_cleanup=True, mkdir=True)
    except (BaseError, OSError) as fault:
        raise BlobError(f"cannot open folder {url!r} for blobs: {str(fault).splitlines()[0]}") from fault


def _bucket(bucket: str, prefix: str, retry_s: float) -> S3Store:
    # No client options here: giving any makes the store forget AWS_ALLOW_HTTP. Its own limits are 30 s a request.
    return S3Store(
        bucket,
        prefix=prefix or None,
        retry_config={"max_retries": 10, "retry_timeout": timedelta(seconds=retry_s)},
    )
