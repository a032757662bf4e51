"""Payloads of groups in append-only files: what no crash may take, beside the rows of the ledger that name them.

Takes groups, gives their places and, from a place, the group back or why it can't be: every read is held to its digest.
A record is the count and lengths of its frames, then the frames of runtime/wire.py: msgpack and raw arrays, no pickle.
Does not know what became of a group, or when a file may go: retention.py does.
"""

import hashlib
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from contraflow.errors import ChannelError, LedgerError, PayloadError
from contraflow.runtime.wire import Frame, decode, encode
from contraflow.types import Group

FOLDER = "segments"
FORMAT = 1
_MAGIC = b"contraflow groups"
_HEADER = struct.Struct("<17sII")  # magic, format, CRC-32 of both
_VECTOR = 512  # buffers of one write; the system's limit is 1,024


class Place(msgspec.Struct, frozen=True):
    """Where a payload lies; `digest` is the first half of the SHA-256 of its `length` bytes."""

    segment: str
    start: int
    length: int
    digest: bytes


class Segments:
    """Writer of one line. Invariant: a file is written by one line and one process only, from its end, and bytes below
    `_end` are synced: rows may name them."""

    def __init__(self, folder: Path, *, line: int, segment_bytes: int, threaded: bool = False) -> None:
        """`threaded`: digests are computed by a thread while the same bytes are written."""
        self._folder = folder / FOLDER
        self._line = line
        self._segment_bytes = segment_bytes
        self._digests = ThreadPoolExecutor(1, thread_name_prefix="digest") if threaded else None
        self._count = 0
        self._file = -1
        self._end = 0
        self.name = ""  # of the file that is written to

    def write(self, groups: Sequence[Group]) -> list[Place]:
        """Append groups with one sync for all; their places, durable. Raises LedgerError (full disk); then none is."""
        records = [_record(group) for group in groups]
        digests = map(_digest, records) if self._digests is None else self._digests.map(_digest, records)
        places, end = list[tuple[int, int]](), 0
        try:
            if self._file < 0 or self._end >= self._segment_bytes:
                self._begin()
            end = self._end
            for record in records:
                length = sum(len(frame) for frame in record)
                _write_at(self._file, record, end)
                places.append((end, length))
                end += length
            os.fdatasync(self._file)
        except OSError as fault:
            raise LedgerError(
                f"segment {self._folder / (self.name or 'of a first group')} cannot be written: {fault}; free space or"
                " repair the disk, then resume the run"
            ) from fault
        self._end = end
        return [Place(self.name, *place, digest) for place, digest in zip(places, digests, strict=True)]

    def close(self) -> None:
        self._close_file()
        if self._digests is not None:
            self._digests.shutdown()

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _begin(self) -> None:
        """A new file, its name and header durable before anything is in it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"line-{self._line}-{self._count:06d}"
        file = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            header = _header(FORMAT)
            _write_at(file, [header], 0)
            os.fsync(file)
            sync_folder(self._folder)
        except OSError:
            os.close(file)
            raise
        self._close_file()
        self._file, self.name, self._end = file, name, len(header)
        self._count += 1


def read_group(folder: Path, place: Place) -> Group:
    """The group at a place. Raises PayloadError (missing, truncated, altered), LedgerError (another format)."""
    data = _read(folder, place)
    try:
        (count,) = struct.unpack_from("<I", data)
        lengths = struct.unpack_from(f"<{count}Q", data, 4)
        frames, at = [], 4 + 8 * count
        for length in lengths:
            frames.append(memoryview(data)[at : at + length])
            at += length
        group: Group = decode(frames, Group)
    except (struct.error, ChannelError) as fault:
        raise PayloadError(f"segment {place.segment} at {place.start}: not a group: {fault}") from fault
    return group


def damage(folder: Path, place: Place) -> str:
    """What is wrong with a payload; nothing when it is whole. Raises LedgerError for a format of another time."""
    try:
        _read(folder, place)
    except PayloadError as fault:
        return str(fault)
    return ""


def sweep(folder: Path, named: frozenset[str]) -> None:
    """Remove the files that no row names: their groups were never said to be kept. Raises LedgerError."""
    place = folder / FOLDER
    remove(folder, {path.name for path in place.iterdir()} - named if place.is_dir() else ())


def remove(folder: Path, names: Iterable[str]) -> None:
    """Remove files. Raises LedgerError."""
    for name in names:
        try:
            (folder / FOLDER / name).unlink(missing_ok=True)
        except OSError as fault:
            raise LedgerError(f"segment {name} in {folder} cannot be removed: {fault}; repair it and resume") from fault


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(folder: Path, place: Place) -> bytearray:
    path = folder / FOLDER / place.segment
    data = bytearray(place.length)
    try:
        with path.open("rb", buffering=0) as file:
            _check_format(path, file.read(_HEADER.size))
            file.seek(place.start)
            got = 0
            while got < place.length and (more := file.readinto(memoryview(data)[got:])):
                got += more
    except OSError as fault:
        raise PayloadError(f"segment {path} cannot be read: {fault}") from fault
    if got < place.length:
        raise PayloadError(f"segment {path} is truncated: {got} of {place.length} bytes are left at {place.start}")
    if _digest([data]) != place.digest:
        raise PayloadError(f"segment {path} was altered: the {place.length} bytes at {place.start} have another digest")
    return data


def _check_format(path: Path, header: bytes) -> None:
    """A damaged header is no news: each record has its own digest."""
    if len(header) < _HEADER.size:
        return
    magic, found, crc = _HEADER.unpack(header)
    if crc == zlib.crc32(header[:-4]) and (magic, found) != (_MAGIC, FORMAT):
        raise LedgerError(
            f"segment {path} has format {found}; this version of contraflow reads format {FORMAT}: use the version that"
            " wrote it"
        )


def _header(number: int) -> bytes:
    head = _HEADER.pack(_MAGIC, number, 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head))


def _record(group: Group) -> list[memoryview]:
    frames = [memoryview(frame).cast("B") for frame in encode(group)]
    head = struct.pack(f"<I{len(frames)}Q", len(frames), *(len(frame) for frame in frames))
    return [memoryview(head), *frames]


def _digest(record: Sequence[Frame]) -> bytes:
    total = hashlib.sha256()
    for frame in record:
        total.update(frame)
    return total.digest()[:16]


def _write_at(file: int, record: Sequence[Frame], at: int) -> None:
    left = [memoryview(frame) for frame in record if len(frame)]
    while left:
        done = os.pwritev(file, left[:_VECTOR], at)
        at += done
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if done:
            left[0] = left[0][done:]
