"""A version in shared memory: written once by the trainer, mapped by the engines of the same host.

Takes chunks, gives maps of files in the memory file system. Files are used, not multiprocessing.shared_memory: before
Python 3.13 that module's tracker unlinks a segment when any process that attached it ends, and it cannot map without
leave to write. Does not cross hosts. A killed run's memory stays until this user's next run on the host begins.
"""

import fcntl
import mmap
import os
import shutil
import tempfile
from pathlib import Path

import torch

from contraflow.errors import CarrierError, VersionGone
from contraflow.types import Manifest, Version
from contraflow.weights.carrier import Arrival, Bytes, parse_version
from contraflow.weights.manifest import decode_manifest, encode_manifest, spans, total_bytes

SHARED = Path("/dev/shm")


def shared_folder() -> Path:
    """Where this host keeps shared memory; a folder for temporary files (mapped all the same) where there is none."""
    return SHARED if SHARED.is_dir() else Path(tempfile.gettempdir())


class MemoryCarrier:
    """Versions of one run on one host, in the folder `contraflow-RUN_ID` that only this user can enter.

    Invariant: `V.manifest` exists only while `V.weights` is whole; it is written last and removed first.
    """

    kind = "memory"

    def __init__(self, root: Path, run_id: str, *, lanes: int = 2) -> None:
        self.lanes = lanes
        self.folder = root / f"contraflow-{run_id}"
        self._claimed: int | None = None  # descriptor that holds the lock on the folder

    def claim(self) -> None:
        """Lock the folder, which the kernel undoes however this process ends, and remove what killed runs left."""
        if self._claimed is not None:
            return
        self._claimed = own(self.folder)
        for left in self.folder.iterdir():
            left.unlink()
        sweep(self.folder.parent)

    def create(self, version: Version, nbytes: int, chunk_bytes: int) -> "_MemorySink":
        if self._claimed is None:
            raise CarrierError(f"cannot write version {version}: only a publisher that claimed {self.folder} may")
        return _MemorySink(self._weights(version), self._manifest(version), nbytes, chunk_bytes)

    def open(self, manifest: Manifest) -> "_MemorySource":
        path = self._weights(manifest.version)
        if manifest.location != str(path):
            raise CarrierError(
                f"version {manifest.version} lies at {manifest.location}, this run's at {path}: of another run"
            )
        if not self._manifest(manifest.version).exists():
            raise VersionGone(f"version {manifest.version} is not at {path}: retired, or never completed")
        try:
            return _MemorySource(path, manifest)
        except FileNotFoundError:
            raise VersionGone(f"version {manifest.version} was retired from {path} just now") from None

    def versions(self) -> list[Version]:
        found = (parse_version(path.name.removesuffix(".manifest")) for path in self.folder.glob("*.manifest"))
        return sorted(version for version in found if version is not None)

    def manifest(self, version: Version) -> Manifest:
        path = self._manifest(version)
        try:
            return decode_manifest(path.read_bytes(), str(path))
        except FileNotFoundError:
            raise VersionGone(f"version {version} is not at {path}: retired, or never completed") from None

    def retire(self, version: Version) -> None:
        """Readers that have it mapped keep it: the memory goes when the last of them lets go."""
        self._manifest(version).unlink(missing_ok=True)
        self._weights(version).unlink(missing_ok=True)

    def close(self) -> None:
        if self._claimed is None:
            return
        if self.folder.exists():
            shutil.rmtree(self.folder)
        os.close(self._claimed)
        self._claimed = None

    def _weights(self, version: Version) -> Path:
        return self.folder / f"{version}.weights"

    def _manifest(self, version: Version) -> Path:
        return self.folder / f"{version}.manifest"


class _MemorySink:
    """Invariant: the file has all of its memory from the start, so no write can run into a full memory file system."""

    def __init__(self, weights: Path, manifest: Path, nbytes: int, chunk_bytes: int) -> None:
        self._weights, self._manifest = weights, manifest
        self._spans = spans(nbytes, chunk_bytes)
        self.location = str(weights)
        try:
            descriptor = os.open(weights, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise CarrierError(f"{weights} is there already: a version is published once") from None
        try:
            self._bytes_B = _allocate(descriptor, nbytes)
        except OSError as fault:
            weights.unlink()
            raise CarrierError(_no_room(weights, nbytes, fault)) from fault
        finally:
            os.close(descriptor)

    def buffer(self, index: int) -> torch.Tensor:
        start, end = self._spans[index]
        return self._bytes_B[start:end]

    def put(self, index: int, chunk_B: torch.Tensor) -> None:
        """Nothing to do: the chunk was written where it is read."""

    def commit(self, manifest: Manifest) -> Manifest:
        partial = self._manifest.with_suffix(".partial")
        data = encode_manifest(manifest)
        try:
            partial.write_bytes(data)
            partial.rename(self._manifest)  # a manifest is seen whole or not at all
        except OSError as fault:
            raise CarrierError(_no_room(self._manifest, len(data), fault)) from fault
        self._bytes_B = torch.empty(0, dtype=torch.uint8)  # from here on nobody has it mapped for writing
        return manifest

    def discard(self) -> None:
        self._manifest.with_suffix(".partial").unlink(missing_ok=True)
        self._weights.unlink(missing_ok=True)


class _MemorySource:
    """A private map: pages are shared with the file until written to, so a reader cannot alter what others read.

    Plainly read-only maps would do, but torch takes no memory that it may not write. The map is undone when the last
    tensor in it goes, never before: torch would read freed memory. A file found short is reported; one cut short while
    it is mapped kills the reader (bus error).
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._spans = spans(total_bytes(manifest.tensors), manifest.chunk_bytes)
        with path.open("rb") as file:
            length = min(os.fstat(file.fileno()).st_size, total_bytes(manifest.tensors))
            self.bytes_B = _mapped(file.fileno(), length, mmap.ACCESS_COPY)

    def load(self, index: int) -> Bytes | None:
        start, end = self._spans[index]
        found: Bytes = self.bytes_B[start:end].numpy()  # short or empty where the file was truncated
        return found

    def mend(self, index: int) -> None:
        """There is no other way."""

    def settle(self) -> Arrival:
        return Arrival(self.bytes_B.numel())


def own(folder: Path) -> int:
    """Make `folder` this process's own; the descriptor that holds the lock on it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            return _lock(folder)
        except FileNotFoundError:
            fresh = Path(tempfile.mkdtemp(prefix=".contraflow-", dir=folder.parent))
            descriptor = _lock(fresh)
            fresh.rename(folder)  # it appears locked, so nobody takes it for what a killed run left
            return descriptor
    except OSError as fault:
        raise CarrierError(f"cannot use {folder} for shared memory: {fault}") from fault


def _lock(folder: Path) -> int:
    """Lock a folder. Raises: CarrierError if it is another publisher's or user's, OSError if there is none."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise CarrierError(f"{folder} belongs to another user; give this run another run id")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise FileNotFoundError(f"{folder} was removed while it was being locked")
    except BlockingIOError:
        os.close(descriptor)
        raise CarrierError(
            f"{folder} belongs to a publisher that is alive; stop that run, or give this one another run id"
        ) from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def sweep(root: Path) -> None:
    """Remove the folders of this user's runs whose publisher is dead: nobody else would, and they hold memory."""
    for left in root.glob("contraflow-*"):
        try:
            descriptor = _lock(left)
        except (CarrierError, OSError):
            continue  # alive, another user's, no folder, or removed meanwhile
        shutil.rmtree(left, ignore_errors=True)  # what cannot go must not keep a new run from beginning
        os.close(descriptor)


def _allocate(descriptor: int, nbytes: int) -> torch.Tensor:
    if nbytes and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)  # full now, with an error; later it would be a bus error
    else:
        os.ftruncate(descriptor, nbytes)
    return _mapped(descriptor, nbytes, mmap.ACCESS_WRITE)


def _mapped(descriptor: int, length: int, access: int) -> torch.Tensor:
    if length == 0:  # an empty map is refused
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(descriptor, length, access=access), dtype=torch.uint8)


def _no_room(weights: Path, nbytes: int, fault: OSError) -> str:
    free = shutil.disk_usage(weights.parent).free
    return (
        f"no room for {nbytes} bytes at {weights} ({free} free): {fault}; give the machine more shared memory "
        '(docker: --shm-size) or set weights.carrier = "blob"'
    )
