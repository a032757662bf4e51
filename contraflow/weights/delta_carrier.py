"""Versions sent as what changed since the one before, upon any carrier that moves chunks: the publishing side.

Takes chunks like any carrier; stores in the inner one the whole version or, in its place, the changes of its chunks.
The manifest's digests are of the whole bytes either way, so they prove what a reader made and not what travelled. Does
not encode or read: those are delta.py and delta_source.py.
"""

from dataclasses import dataclass

import msgspec
import torch

from contraflow.errors import CarrierError, ConfigError
from contraflow.types import Delta, Manifest, Version
from contraflow.weights.carrier import Carrier, Sink, in_lanes
from contraflow.weights.delta import encode
from contraflow.weights.delta_source import DeltaSource, Held, alike, seal
from contraflow.weights.manifest import digest, spans


@dataclass(frozen=True)
class _Last:
    """What was published last, and what was sent since the last whole version: how many deltas, of how many bytes."""

    held: Held
    deltas: int
    sent: int


class DeltaCarrier:
    """Versions of one run upon `inner`, at most `full_every - 1` deltas from one that is whole to the next.

    Invariants: a delta is there only while all that it is built upon is, down to a whole version, retired or not. The
    deltas since a whole version are together no larger than it: whoever lacks the parent reads at most twice a version.
    Memory: a publisher keeps the bytes published last and, while it publishes, the changes; a reader the bytes that it
    proved last, which are those that its engine was given.
    """

    def __init__(self, inner: Carrier, full_every: int) -> None:
        if full_every < 1:
            raise ConfigError(f"full_every = {full_every}: must be at least 1, which sends every version whole")
        self.kind = f"delta-{inner.kind}"
        self.lanes = inner.lanes
        self.inner = inner
        self._full_every = full_every
        self._claimed = False
        self._last: _Last | None = None  # of the publisher
        self._proven: Held | None = None  # of a reader
        self._parents: dict[Version, Version | None] = {}  # of every version that is stored; None: it is whole
        self._retired: set[Version] = set()

    def claim(self) -> None:
        self.inner.claim()
        self._claimed = True

    def create(self, version: Version, nbytes: int, chunk_bytes: int) -> "_DeltaSink":
        """Start writing a version. The bytes published last are given up, and are back once it is committed."""
        if not self._claimed:
            raise CarrierError(f"cannot write version {version}: only a publisher that claimed its carrier may")
        if version in self._parents:
            raise CarrierError(f"version {version} is there already: a version is published once")
        last, self._last = self._last, None
        if last is None or not alike(last.held.manifest, nbytes, chunk_bytes):
            return _DeltaSink(self, version, torch.empty(nbytes, dtype=torch.uint8), chunk_bytes, None)
        due = last.deltas + 1 >= self._full_every
        return _DeltaSink(self, version, last.held.bytes_B, chunk_bytes, None if due else last)

    def committed(self, last: _Last) -> None:
        """The version of `last` can be read from now on, and the next one be built upon it."""
        manifest, self._last = last.held.manifest, last
        self._parents[manifest.version] = None if manifest.delta is None else manifest.delta.parent

    def open(self, manifest: Manifest) -> DeltaSource:
        return DeltaSource(self.inner, manifest, self._proven, self._settle)

    def versions(self) -> list[Version]:
        """Complete versions, oldest first; among them retired ones that a later delta is built upon."""
        return self.inner.versions()

    def manifest(self, version: Version) -> Manifest:
        return self.inner.manifest(version)

    def retire(self, version: Version) -> None:
        """Its memory is freed as soon as no delta that is not retired is built upon it."""
        self._retired.add(version)
        if self._last is not None and self._last.held.manifest.version == version:
            self._last = None  # nothing more is built upon it
        needed: set[Version] = set()
        for live in self._parents.keys() - self._retired:
            link: Version | None = live
            while link is not None and link not in needed:
                needed.add(link)
                link = self._parents[link]
        for free in sorted(self._parents.keys() - needed, reverse=True):  # what is built upon another goes before it
            self.inner.retire(free)
            del self._parents[free]
            self._retired.discard(free)

    def close(self) -> None:
        self.inner.close()
        self._claimed, self._last, self._proven = False, None, None
        self._parents.clear()

    def _settle(self, held: Held) -> None:
        self._proven = held


class _DeltaSink:
    """Overwrites the bytes published last, chunk by chunk, and keeps the changes."""

    location = ""  # `commit` decides what is stored: see the manifest that it returns

    def __init__(
        self, carrier: DeltaCarrier, version: Version, bytes_B: torch.Tensor, chunk_bytes: int, last: _Last | None
    ) -> None:
        """`last` is what to build upon, its bytes `bytes_B`; without it the version is to be whole."""
        self._carrier = carrier
        self._version = version
        self._bytes_B = bytes_B
        self._chunk_bytes = chunk_bytes
        self._last = last
        self._spans = spans(len(bytes_B), chunk_bytes)
        self._changes: list[torch.Tensor] = [bytes_B[:0]] * len(self._spans)

    def buffer(self, index: int) -> torch.Tensor:
        start, end = self._spans[index]
        return torch.zeros(end - start, dtype=torch.uint8)

    def put(self, index: int, chunk_B: torch.Tensor) -> None:
        start, end = self._spans[index]
        if self._last is not None:
            self._changes[index] = encode(self._bytes_B[start:end], chunk_B)
        self._bytes_B[start:end].copy_(chunk_B)

    def commit(self, manifest: Manifest) -> Manifest:
        lengths = tuple(len(change_B) for change_B in self._changes)
        last, sent = self._last, sum(lengths)
        if last is None or last.sent + sent > len(self._bytes_B):
            deltas = sent = 0
            stored = self._store(manifest, self._bytes_B, None)
        else:
            deltas, sent = last.deltas + 1, last.sent + sent
            parent = last.held.manifest
            delta = Delta(parent=parent.version, seal=seal(parent), lengths=lengths, digests=())
            stored = self._store(manifest, torch.cat([self._bytes_B[:0], *self._changes]), delta)
        self._carrier.committed(_Last(Held(stored, self._bytes_B), deltas, sent))
        return stored

    def discard(self) -> None:
        """Nothing to do: the inner carrier was given nothing, or was told to discard it."""

    def _store(self, manifest: Manifest, payload_B: torch.Tensor, delta: Delta | None) -> Manifest:
        """Write what travels of this version: all of it, or the changes, whose digests `delta` still lacks."""
        inner = self._carrier.inner
        sink = inner.create(self._version, len(payload_B), self._chunk_bytes)
        try:
            pieces = spans(len(payload_B), self._chunk_bytes)
            digests = in_lanes(inner.lanes, len(pieces), lambda index: _write(sink, index, payload_B, pieces[index]))
            if delta is not None:
                delta = msgspec.structs.replace(delta, digests=tuple(digests))
            return sink.commit(msgspec.structs.replace(manifest, location=sink.location, delta=delta))
        except BaseException:
            sink.discard()
            raise


def _write(sink: Sink, index: int, payload_B: torch.Tensor, piece: tuple[int, int]) -> str:
    start, end = piece
    place_B = sink.buffer(index)
    place_B.copy_(payload_B[start:end])
    found = digest(place_B.numpy())
    sink.put(index, place_B)
    return found
