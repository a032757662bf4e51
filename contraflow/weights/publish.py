"""Writes a version where engines can read it, and keeps no more versions than are needed.

Takes tensors and a probe, gives the manifest. Each byte is copied once, from the tensor into the carrier's own memory,
and hashed there while it is still in the cache. Does not decide when to publish or make the probe.
"""

from collections.abc import Mapping

import torch

from contraflow.errors import CarrierError, ConfigError
from contraflow.types import Manifest, Probe, Tensor, Version
from contraflow.weights.carrier import Carrier, Sink, in_lanes
from contraflow.weights.manifest import digest, layout, pieces, spans, total_bytes


def publish(
    tensors: Mapping[str, torch.Tensor],
    *,
    version: Version,
    parent: Version | None,
    model: str,
    probe: Probe,
    carrier: Carrier,
    chunk_bytes: int,
    wire: str = "same",
) -> Manifest:
    """Write `tensors` (any device, any strides; their values must stand still meanwhile) as `version`.

    `model` is the digest of the model's configuration, `wire` a fact for engines (see `Manifest`). Nothing can be read
    until all of it is written and hashed; on any failure what was written is freed. Raises: CarrierError, also if
    `version` is not newer than all that are there (a trainer of a dead line cannot publish beside its successor);
    BlobError.
    """
    there = carrier.versions()
    if there and version <= there[-1]:
        raise CarrierError(f"version {version} is not newer than {there[-1]}, which is published already")
    entries = layout(tensors)
    chunks = spans(total_bytes(entries), chunk_bytes)
    flat = [tensors[entry.name].detach().contiguous().reshape(-1).view(torch.uint8) for entry in entries]
    sink = carrier.create(version, total_bytes(entries), chunk_bytes)
    try:
        digests = in_lanes(carrier.lanes, len(chunks), lambda index: _write(sink, index, chunks[index], entries, flat))
        manifest = Manifest(
            version=version,
            parent=parent,
            model=model,
            carrier=carrier.kind,
            location=sink.location,
            tensors=entries,
            chunk_bytes=chunk_bytes,
            digests=tuple(digests),
            probe=probe,
            wire=wire,
        )
        return sink.commit(manifest)
    except BaseException:
        sink.discard()
        raise


class Publisher:
    """The one publisher of a run: publishes versions in rising order and retires the oldest.

    Invariant: the carrier holds the newest `keep` versions and no others.
    Opening removes what an earlier publisher of the run left; closing removes everything.
    """

    def __init__(self, carrier: Carrier, keep: int = 2) -> None:
        if keep < 1:
            raise ConfigError(f"keep = {keep}: a publisher keeps at least the newest version")
        carrier.claim()
        self._carrier = carrier
        self._keep = keep
        self._newest: Version | None = None

    @property
    def newest(self) -> Version | None:
        """The version published last."""
        return self._newest

    def publish(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        version: Version,
        model: str,
        probe: Probe,
        chunk_bytes: int,
        wire: str = "same",
    ) -> Manifest:
        """Publish `version`, whose parent is the one before it; then retire what is beyond the newest `keep`.

        Raises: as `publish`; what was published before stays.
        """
        manifest = publish(
            tensors,
            version=version,
            parent=self._newest,
            model=model,
            probe=probe,
            carrier=self._carrier,
            chunk_bytes=chunk_bytes,
            wire=wire,
        )
        self._newest = version
        self._retire()
        return manifest

    def close(self) -> None:
        """Remove every version. Engines that are reading one may finish where the carrier says so."""
        self._carrier.close()

    def _retire(self) -> None:
        for version in self._carrier.versions()[: -self._keep]:
            self._carrier.retire(version)


def _write(sink: Sink, index: int, span: tuple[int, int], entries: tuple[Tensor, ...], flat: list[torch.Tensor]) -> str:
    """Fill chunk `index` from the tensors that reach into it; the digest of what then lies there."""
    start, end = span
    chunk_B = sink.buffer(index)
    for which, lo, hi in pieces(entries, start, end):
        offset = entries[which].offset
        chunk_B[lo - start : hi - start].copy_(flat[which][lo - offset : hi - offset])
    found = digest(chunk_B.numpy())
    sink.put(index, chunk_B)
    return found
