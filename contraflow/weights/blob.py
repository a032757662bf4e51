"""A version as blobs, in a folder or on S3: a chunk a blob, and the manifest last.

Takes chunks, gives them back from anywhere that reaches the store. Does not map or share memory: each reader holds its
own copy. Keys: RUN_ID/chunks/VERSION/INDEX and RUN_ID/manifests/VERSION, apart so that versions list cheaply.
"""

import numpy as np
import torch

from contraflow.blobs import Blobs
from contraflow.errors import BlobExists, BlobMissing, CarrierError, VersionGone
from contraflow.types import Manifest, Version
from contraflow.weights.carrier import Arrival, Bytes, parse_version
from contraflow.weights.manifest import decode_manifest, encode_manifest, spans, total_bytes


class BlobCarrier:
    """Versions of one run in one blob space.

    Invariant: a manifest is there only while all of its chunks are; it is written last and removed first. Nothing tells
    whether another publisher of the run is alive: the lock on the run folder keeps two from starting.
    """

    kind = "blob"

    def __init__(self, blobs: Blobs, run_id: str, *, lanes: int = 8) -> None:
        self.lanes = lanes
        self._blobs = blobs
        self._root = run_id
        self._claimed = False

    def claim(self) -> None:
        self._claimed = True
        self._clear()

    def create(self, version: Version, nbytes: int, chunk_bytes: int) -> "_BlobSink":
        if not self._claimed:
            raise CarrierError(f"cannot write version {version}: only a publisher that claimed {self._blobs.url} may")
        if version in self.versions():
            raise CarrierError(f"version {version} is in {self._blobs.url} already: a version is published once")
        return _BlobSink(self._blobs, self._chunks(version), self._manifest(version), spans(nbytes, chunk_bytes))

    def open(self, manifest: Manifest) -> "_BlobSource":
        location = self._chunks(manifest.version)
        if manifest.location != location:
            raise CarrierError(
                f"version {manifest.version} lies at {manifest.location}, this run's at {location}: of another run"
            )
        if manifest.version not in self.versions():
            raise VersionGone(f"version {manifest.version} is not in {self._blobs.url}: retired, or never completed")
        return _BlobSource(self._blobs, manifest)

    def versions(self) -> list[Version]:
        found = (parse_version(key.rpartition("/")[2]) for key in self._blobs.list(f"{self._root}/manifests"))
        return sorted(version for version in found if version is not None)

    def manifest(self, version: Version) -> Manifest:
        key = self._manifest(version)
        try:
            return decode_manifest(self._blobs.get(key), f"{key} in {self._blobs.url}")
        except BlobMissing:
            raise VersionGone(f"version {version} is not in {self._blobs.url}: retired, or never completed") from None

    def retire(self, version: Version) -> None:
        """Who is reading it meets a missing chunk, keeps what it has and asks for a newer version."""
        self._blobs.delete([self._manifest(version)])
        self._blobs.delete(self._blobs.list(self._chunks(version)))

    def close(self) -> None:
        if self._claimed:
            self._clear()
            self._claimed = False

    def _clear(self) -> None:
        self._blobs.delete(self._blobs.list(f"{self._root}/manifests"))
        self._blobs.delete(self._blobs.list(f"{self._root}/chunks"))

    def _chunks(self, version: Version) -> str:
        return f"{self._root}/chunks/{version}"

    def _manifest(self, version: Version) -> str:
        return f"{self._root}/manifests/{version}"


class _BlobSink:
    """Holds as many chunks in memory as are being written, and no more."""

    def __init__(self, blobs: Blobs, location: str, manifest: str, chunks: list[tuple[int, int]]) -> None:
        self._blobs = blobs
        self.location = location
        self._manifest = manifest
        self._spans = chunks

    def buffer(self, index: int) -> torch.Tensor:
        start, end = self._spans[index]
        return torch.zeros(end - start, dtype=torch.uint8)

    def put(self, index: int, chunk_B: torch.Tensor) -> None:
        self._blobs.put(_key(self.location, index), chunk_B.numpy())

    def commit(self, manifest: Manifest) -> Manifest:
        data = encode_manifest(manifest)
        try:
            self._blobs.put(self._manifest, data, create=True)
        except BlobExists:
            # A write whose answer was lost is tried again and meets itself.
            if self._blobs.get(self._manifest) != data:
                raise CarrierError(f"{self._manifest} is in {self._blobs.url} already: published by another") from None
        return manifest

    def discard(self) -> None:
        self._blobs.delete(self._blobs.list(self.location))


class _BlobSource:
    def __init__(self, blobs: Blobs, manifest: Manifest) -> None:
        self._blobs = blobs
        self._location = manifest.location
        self._spans = spans(total_bytes(manifest.tensors), manifest.chunk_bytes)
        self.bytes_B = torch.empty(total_bytes(manifest.tensors), dtype=torch.uint8)

    def load(self, index: int) -> Bytes | None:
        start, end = self._spans[index]
        try:
            found = np.frombuffer(self._blobs.get(_key(self._location, index)), np.uint8)
        except BlobMissing:
            return None
        if len(found) != end - start:
            return found
        place: Bytes = self.bytes_B[start:end].numpy()
        place[:] = found
        return place

    def mend(self, index: int) -> None:
        """There is no other way."""

    def settle(self) -> Arrival:
        return Arrival(self.bytes_B.numel())


def _key(location: str, index: int) -> str:
    return f"{location}/{index:06d}"
