"""The plan of a version's way from the ranks that train a model to the ranks that serve it: who sends what to whom.

Takes what each rank holds of each tensor, gives buckets of slices; pure. Every byte that an engine's rank holds is
written once, by one of the trainer's ranks that hold it, and no rank sees more than its own part. Moves no bytes.
"""

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec
import torch

from contraflow.errors import CarrierError, ConfigError

ALIGNMENT = 16  # of a slice in its bucket: more than any dtype asks for
Range = tuple[int, int]  # from, up to
Box = tuple[Range, ...]  # one range a dimension


class Held(Protocol):
    """A rank's own part of a tensor: which box of the whole lies in which box of the part."""

    @property
    def boxes(self) -> tuple[tuple[Box, Box], ...]: ...


class Slice(msgspec.Struct, frozen=True):
    """A box of tensor `name` as it lies in the source's own part, and in that of each target of its bucket.

    `start` is its first byte in the bucket.
    """

    name: str
    there: Box
    here: tuple[Box, ...]
    start: int
    nbytes: int


class Bucket(msgspec.Struct, frozen=True):
    """What travels as one message from trainer rank `source` to engine ranks `targets`, in order."""

    source: int
    targets: tuple[int, ...]
    slices: tuple[Slice, ...]
    nbytes: int


class Plan(msgspec.Struct, frozen=True):
    """All buckets, in the order in which every rank takes part in its own: so that no two ranks wait for each other."""

    sources: int
    targets: int
    buckets: tuple[Bucket, ...]

    def sent_by(self, source: int) -> list[int]:
        """Indices of a trainer rank's buckets."""
        return [index for index, bucket in enumerate(self.buckets) if bucket.source == source]

    def received_by(self, target: int) -> list[int]:
        """Indices of an engine rank's buckets."""
        return [index for index, bucket in enumerate(self.buckets) if target in bucket.targets]

    def digest(self) -> str:
        """Of all of it: both sides must work by the same plan."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()


def plan(
    sources: Sequence[Mapping[str, Held]],
    targets: Sequence[Mapping[str, Held]],
    dtypes: Mapping[str, torch.dtype],
    *,
    bucket_bytes: int,
) -> Plan:
    """The plan for tensors in `dtypes` (in which they travel), in buckets of at most `bucket_bytes`.

    Of several ranks that hold the same bytes, the one that has least to send so far sends them: ranks with equal parts
    differ by one bucket at most. Raises: CarrierError for a part that an engine wants and nobody has; ConfigError for a
    bucket too small for one element.
    """
    widest = max((dtype.itemsize for dtype in dtypes.values()), default=1)
    if bucket_bytes < widest:
        raise ConfigError(f"weights.bucket_bytes = {bucket_bytes}: one element takes {widest}")
    load = [0] * len(sources)
    slices: dict[tuple[int, tuple[int, ...]], list[Slice]] = {}
    for name, dtype in dtypes.items():
        having = [rank[name].boxes if name in rank else () for rank in sources]
        wanting = [rank[name].boxes if name in rank else () for rank in targets]
        for cell in _cells([*having, *wanting]):
            wanted = {rank: box for rank, boxes in enumerate(wanting) if (box := _own(boxes, cell)) is not None}
            if not wanted:
                continue
            held = {rank: box for rank, boxes in enumerate(having) if (box := _own(boxes, cell)) is not None}
            if not held:
                raise CarrierError(f"tensor {name!r}, box {list(cell)}: no rank of the trainer holds it")
            for part in _split(cell, bucket_bytes // dtype.itemsize):
                source = min(held, key=lambda rank: (load[rank], rank))
                nbytes = _count(part) * dtype.itemsize
                load[source] += nbytes
                there = _moved(part, cell, held[source])
                here = tuple(_moved(part, cell, box) for box in wanted.values())
                slices.setdefault((source, tuple(wanted)), []).append(Slice(name, there, here, 0, nbytes))
    filled = [list(_fill(*key, found, bucket_bytes)) for key, found in slices.items()]
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*filled))  # so that all sources send at once
    return Plan(len(sources), len(targets), tuple(bucket for bucket in in_turn if bucket is not None))


def _cells(held: Iterable[tuple[tuple[Box, Box], ...]]) -> Iterator[Box]:
    """Boxes of the whole, cut wherever anybody's part begins or ends: each lies in a part whole, or not at all."""
    wholes = [whole for boxes in held for whole, _ in boxes]
    if not wholes:
        return
    edges = [sorted({edge for box in wholes for edge in box[dim]}) for dim in range(len(wholes[0]))]
    yield from itertools.product(*(list(itertools.pairwise(along)) for along in edges))


def _own(boxes: tuple[tuple[Box, Box], ...], cell: Box) -> Box | None:
    """Where in a rank's own part a cell lies; None if it is not in it."""
    for whole, own in boxes:
        if all(lo >= start and hi <= end for (lo, hi), (start, end) in zip(cell, whole, strict=True)):
            return _moved(cell, whole, own)
    return None


def _moved(box: Box, frame: Box, to: Box) -> Box:
    """`box`, which lies in `frame`, where `frame` lies at `to`."""
    return tuple(
        (lo - start + begin, hi - start + begin)
        for (lo, hi), (start, _), (begin, _) in zip(box, frame, to, strict=True)
    )


def _split(box: Box, most: int) -> Iterator[Box]:
    """`box` in pieces of at most `most` elements, cut along as few dimensions as will do."""
    if _count(box) <= most:
        yield box
        return
    (start, end), *rest = box
    row = _count(tuple(rest))
    if row > most:
        for index in range(start, end):
            yield from (((index, index + 1), *tail) for tail in _split(tuple(rest), most))
        return
    for low in range(start, end, most // row):
        yield (low, min(low + most // row, end)), *rest


def _fill(source: int, targets: tuple[int, ...], slices: list[Slice], most: int) -> Iterator[Bucket]:
    """Slices between the same ranks, packed into buckets in their order."""
    packed: list[Slice] = []
    end = 0
    for one in slices:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if packed and start + one.nbytes > most:
            yield Bucket(source, targets, tuple(packed), end)
            packed, start = [], 0
        packed.append(msgspec.structs.replace(one, start=start))
        end = start + one.nbytes
    yield Bucket(source, targets, tuple(packed), end)


def _count(box: Box) -> int:
    return math.prod(end - start for start, end in box)
