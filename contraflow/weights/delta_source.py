"""Makes the whole bytes of a version from deltas: the reading side of `DeltaCarrier`.

Takes a manifest and, if there is any, the version proven last; gives chunks of the whole version. If the deltas lead
back to what is held, they are all that is read; if not, the last whole version is read too. A held chunk that was
altered shows in the digest of what is made of it, and is made anew from the whole version. Does not verify the result.
"""

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from contraflow.errors import CarrierError, VersionGone
from contraflow.types import Manifest, Tensor
from contraflow.weights.carrier import Arrival, Bytes, Carrier, Source
from contraflow.weights.delta import apply
from contraflow.weights.fetch import fetch
from contraflow.weights.manifest import digest, spans, total_bytes


@dataclass(frozen=True)
class Held:
    """A version whose bytes are at hand."""

    manifest: Manifest
    bytes_B: torch.Tensor


class DeltaSource:
    """Invariant: `load` reads no byte of a whole version as long as what is held leads to this one, unaltered."""

    def __init__(self, inner: Carrier, manifest: Manifest, held: Held | None, settled: Callable[[Held], None]) -> None:
        """`settled` is told when all is proven. Raises: VersionGone; CarrierError if a delta is torn or missing."""
        self._inner = inner
        self._manifest = manifest
        self._settled = settled
        self._spans = spans(total_bytes(manifest.tensors), manifest.chunk_bytes)
        self._route = _find(inner, manifest, held)
        self._detour: _Route | None = None
        self._mended = 0
        self._lock = threading.Lock()  # of the detour: chunks are mended in parallel
        self.bytes_B = self._route.room(total_bytes(manifest.tensors))

    def load(self, index: int) -> Bytes | None:
        return self._make(self._route, index)

    def mend(self, index: int) -> Bytes | None:
        """From the last whole version, if what was loaded is made of what was held."""
        if self._route.held is None:
            return None
        with self._lock:
            self._detour = self._detour or _find(self._inner, self._manifest, None)
            self._mended += 1
        return self._make(self._detour, index)

    def settle(self) -> Arrival:
        self._settled(Held(self._manifest, self.bytes_B))
        if self._detour is None:
            return Arrival(self._route.moved, self._route.via)
        altered = f"{self._mended} chunks of what was held were altered, and made anew from {self._detour.via}"
        return Arrival(self._route.moved + self._detour.moved, f"{self._route.via}; {altered}")

    def _make(self, route: "_Route", index: int) -> Bytes | None:
        """Chunk `index` by way of `route`; what it begins with, if that is no chunk or there is nothing to apply."""
        start, end = self._spans[index]
        found = route.base(index, (start, end))
        if found is None or len(found) != end - start or not route.steps:
            return found
        place_B = self.bytes_B[start:end]
        place_B.copy_(torch.from_numpy(found))
        for step in route.steps:
            apply(place_B, step.change(index))
        made: Bytes = place_B.numpy()
        return made


@dataclass(frozen=True)
class _Step:
    """One delta, all of it here."""

    changes_B: torch.Tensor
    ends: tuple[int, ...]  # 0, and where each chunk's change ends

    def change(self, index: int) -> torch.Tensor:
        return self.changes_B[self.ends[index] : self.ends[index + 1]]


@dataclass(frozen=True)
class _Route:
    """What a version is made from: a whole one to begin with, and the deltas from there, in order."""

    held: Held | None
    whole: Source | None  # in the inner carrier, where nothing is held that would do
    steps: tuple[_Step, ...]
    moved: int
    via: str

    def room(self, nbytes: int) -> torch.Tensor:
        """Where the version's bytes are to be: where they are already, if it is whole."""
        if self.whole is not None and not self.steps:
            return self.whole.bytes_B
        return torch.empty(nbytes, dtype=torch.uint8)

    def base(self, index: int, span: tuple[int, int]) -> Bytes | None:
        """Chunk `index` of the version to begin with."""
        if self.whole is not None:
            return self.whole.load(index)
        assert self.held is not None, "a route begins somewhere"
        found: Bytes = self.held.bytes_B[span[0] : span[1]].numpy()
        return found


def seal(manifest: Manifest) -> str:
    """Names the bytes of a version: the digest of its digests."""
    return digest("".join(manifest.digests).encode())


def alike(manifest: Manifest, nbytes: int, chunk_bytes: int) -> bool:
    """Whether a version has so many bytes, in chunks of this size: only then can a delta lead from it."""
    return (total_bytes(manifest.tensors), manifest.chunk_bytes) == (nbytes, chunk_bytes)


def _find(inner: Carrier, manifest: Manifest, held: Held | None) -> _Route:
    """The way to a version from `held`, or else from the last whole one; all that travels of its deltas is read."""
    try:
        links, begin = _back(inner, manifest, None if held is None else held.manifest)
        near = bool(links) and held is not None and begin is held.manifest
        whole = None if near else inner.open(_travelling(begin, inner))
        steps = tuple(_step(inner, link) for link in reversed(links))
    except VersionGone as gone:
        if manifest.version in inner.versions():
            raise CarrierError(f"version {manifest.version} is there, but not all it is built upon: {gone}") from gone
        raise VersionGone(f"version {manifest.version} is not there: retired, or never completed") from gone
    moved = sum(step.ends[-1] for step in steps) + (0 if near else total_bytes(manifest.tensors))
    via = f"{len(steps)} delta{'s'[: len(steps) != 1]} upon {begin.version}{'' if near else ', whole'}"
    return _Route(held if near else None, whole, steps, moved, via if steps else "whole")


def _back(inner: Carrier, manifest: Manifest, held: Manifest | None) -> tuple[list[Manifest], Manifest]:
    """The deltas that a version is made by, newest first, and the version to begin with: `held` or a whole one."""
    links, link = list[Manifest](), manifest
    while link.delta is not None:
        links.append(link)
        if held is not None and _upon(link, held):
            return links, held
        parent = inner.manifest(link.delta.parent)
        if not _upon(link, parent):
            raise CarrierError(f"version {link.version} was not built upon the {parent.version} that is there")
        link = parent
    return links, link


def _upon(manifest: Manifest, parent: Manifest) -> bool:
    """Whether the delta of `manifest` leads from the bytes of `parent`."""
    delta, nbytes = manifest.delta, total_bytes(manifest.tensors)
    named = delta is not None and (parent.version, seal(parent)) == (delta.parent, delta.seal)
    return named and alike(parent, nbytes, manifest.chunk_bytes)


def _step(inner: Carrier, manifest: Manifest) -> _Step:
    delta = manifest.delta
    assert delta is not None, "a whole version is no step"
    changes = fetch(_travelling(manifest, inner), inner).tensors
    return _Step(changes["changes"], tuple(itertools.accumulate(delta.lengths, initial=0)))


def _travelling(manifest: Manifest, inner: Carrier) -> Manifest:
    """The manifest of what lies in the inner carrier: of the whole version, or of a single tensor, the changes."""
    delta = manifest.delta
    if delta is None:
        return msgspec.structs.replace(manifest, carrier=inner.kind)
    nbytes = sum(delta.lengths)
    return msgspec.structs.replace(
        manifest,
        carrier=inner.kind,
        tensors=(Tensor("changes", (nbytes,), "uint8", 0, nbytes),),
        digests=delta.digests,
        delta=None,
    )
