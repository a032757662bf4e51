"""The seam that moves a version's bytes from the trainer to engines.

A carrier knows versions and chunks, and nothing of tensors, digests or probes: those are manifest.py, publish.py and
fetch.py, the same for every carrier. One contract suite, tests/contracts/test_carrier.py, holds for all of them.
"""

import hashlib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from contraflow.errors import ConfigError
from contraflow.types import Manifest, Version

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")


class Sink(Protocol):
    """A version being written. Nobody can read it before `commit`."""

    @property
    def location(self) -> str: ...

    def buffer(self, index: int) -> torch.Tensor:
        """Zeroed uint8 memory for chunk `index`, of its exact length; chunks may be written in parallel."""
        ...

    def put(self, index: int, chunk_B: torch.Tensor) -> None:
        """Chunk `index` is written: hand it over."""
        ...

    def commit(self, manifest: Manifest) -> Manifest:
        """All chunks are handed over: the version can be read from here on. The manifest as it is stored.

        Raises: CarrierError if it could be read before.
        """
        ...

    def discard(self) -> None:
        """Give up: free what was written."""
        ...


class Arrival(NamedTuple):
    """What it took to bring a version."""

    moved: int  # bytes that were read from the carrier
    via: str = ""  # how, where there is a choice


class Source(Protocol):
    """A version being read. Its memory lives as long as anything refers to it, retired or not."""

    @property
    def bytes_B(self) -> torch.Tensor:
        """Where the version's bytes are, uint8; chunk by chunk meaningful after `load`."""
        ...

    def load(self, index: int) -> Bytes | None:
        """Chunk `index` as it was found, of whatever length; None if it is missing. Chunks may be loaded in parallel.

        If it is of the right length, what is returned is its place in `bytes_B`.
        """
        ...

    def mend(self, index: int) -> Bytes | None:
        """Chunk `index`, which was not as published, as `load` but by another way; None if there is no other."""
        ...

    def settle(self) -> Arrival:
        """All chunks are proven. Called once; never if one is not."""
        ...


class Carrier(Protocol):
    """A way to move versions. One process publishes, after `claim`; any number of processes read."""

    @property
    def kind(self) -> str:
        """What a manifest calls it."""
        ...

    @property
    def lanes(self) -> int:
        """How many chunks are worth working on at once."""
        ...

    def claim(self) -> None:
        """Become the publisher of this run: whatever an earlier one left is removed.

        Raises: CarrierError if another publisher of the run is known to be alive.
        """
        ...

    def create(self, version: Version, nbytes: int, chunk_bytes: int) -> Sink:
        """Start writing a version.

        Raises: CarrierError if this side has not claimed, the version is there already, or there is no room for it.
        """
        ...

    def open(self, manifest: Manifest) -> Source:
        """Start reading a version. Raises: VersionGone if it was retired or not completed; CarrierError if not ours."""
        ...

    def versions(self) -> list[Version]:
        """Complete versions, oldest first."""
        ...

    def manifest(self, version: Version) -> Manifest:
        """The stored manifest. Raises: VersionGone if there is none, CarrierError if it is torn."""
        ...

    def retire(self, version: Version) -> None:
        """Free a version; who is reading it may finish where the carrier says so. Retiring twice is no error."""
        ...

    def close(self) -> None:
        """The publisher's side removes everything; a reader's side removes nothing. Safe to call twice."""
        ...


def in_lanes(lanes: int, count: int, work: Callable[[int], T]) -> list[T]:
    """`work(0) ... work(count - 1)`, up to `lanes` at once, results in order; the first failure stops the rest."""
    if lanes == 1 or count <= 1:
        return [work(index) for index in range(count)]
    with ThreadPoolExecutor(min(lanes, count)) as pool:
        waiting = [pool.submit(work, index) for index in range(count)]
        try:
            return [one.result() for one in waiting]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def derive_run_id(run_folder: Path) -> str:
    """A name for the run in this folder: the same in every process of the run, different for every folder."""
    full = str(run_folder.resolve())
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", run_folder.resolve().name)[:24]
    return f"{readable}-{hashlib.sha256(full.encode()).hexdigest()[:16]}"


def check_run_id(run_id: str) -> str:
    """`run_id` itself, if it can be part of a file name and of a blob key."""
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", run_id):
        raise ConfigError(f"run id {run_id!r}: use 1 to 64 of letters, digits, '-', '_' and '.', not starting with '.'")
    return run_id


def parse_version(text: str) -> Version | None:
    """The version that prints as `text`, or None."""
    match = re.fullmatch(r"(\d+)\.(\d+)", text)
    return Version(int(match[1]), int(match[2])) if match else None
