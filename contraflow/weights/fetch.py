"""Brings a version's bytes to where an engine can copy from them, and proves that they are the ones published.

Takes a manifest, gives its tensors: views of shared memory, or of one buffer filled from blobs. The first proof of the
two; the second, that an engine computes the same with them, is probe.py. Does not touch an engine.
"""

import torch

from contraflow.errors import CarrierError, VersionGone
from contraflow.types import Manifest
from contraflow.weights.carrier import Arrival, Carrier, Source, in_lanes
from contraflow.weights.fp8 import raised
from contraflow.weights.manifest import Expected, check_fit, check_manifest, digest, spans, total_bytes, views


class Fetched:
    """A version that arrived whole. Its memory is held until `close`, and by any tensor taken from it until that goes.

    Invariant: `tensors` is empty, or every byte of it matched the manifest's digests.
    """

    def __init__(self, manifest: Manifest, tensors: dict[str, torch.Tensor], arrival: Arrival) -> None:
        self.manifest = manifest
        self.tensors = tensors
        self.arrival = arrival

    def close(self) -> None:
        """Let go of the memory. Safe to call twice."""
        self.tensors = {}


def fetch(manifest: Manifest, carrier: Carrier, expected: Expected | None = None) -> Fetched:
    """Load and verify `manifest.version`. With `expected`, first make sure that the engine can take it.

    Raises: CarrierError naming version, chunk, expected and found digest for a chunk that is missing, truncated or
    altered, or saying why the manifest is unsound or does not fit. VersionGone if it is retired. BlobError if a store
    fails.
    """
    check_manifest(manifest)
    if expected is not None:
        check_fit(manifest, expected)
    if manifest.carrier != carrier.kind:
        raise CarrierError(
            f"version {manifest.version} travels by {manifest.carrier!r}, this side reads {carrier.kind!r}; "
            "give both sides the same weights.carrier"
        )
    source = carrier.open(manifest)
    chunks = spans(total_bytes(manifest.tensors), manifest.chunk_bytes)
    try:
        in_lanes(carrier.lanes, len(chunks), lambda index: _verify(manifest, source, index, chunks[index]))
    except CarrierError as fault:
        if manifest.version in carrier.versions():
            raise
        raise VersionGone(f"version {manifest.version} was retired while it was being read: {fault}") from fault
    return Fetched(manifest, raised(views(source.bytes_B, manifest.tensors)), source.settle())


def _verify(manifest: Manifest, source: Source, index: int, span: tuple[int, int]) -> None:
    data = source.load(index)
    wanted = manifest.digests[index]
    found = "none: it is missing" if data is None else digest(data)
    if found == wanted:
        return
    mended = source.mend(index)
    if mended is not None and digest(mended) == wanted:
        return
    length = 0 if data is None else len(data)
    raise CarrierError(
        f"version {manifest.version}, chunk {index} of {len(manifest.digests)} (bytes {span[0]} to {span[1]}) did not "
        f"arrive whole: expected digest {wanted}, found {found} over {length} of {span[1] - span[0]} bytes"
    )
