"""A version from the trainer's ranks to an engine's, part by part, by the plan of `reshard`: no rank holds the whole.

`Outbox` is a trainer rank's end: it packs its part into buckets, which travel while the trainer goes on. `Inbox` is an
engine rank's: it fills its part of the version beside the one in use, and proves every bucket. Neither decides when.

Memory: an outbox holds what this rank sends, as it travels, once, or twice after a version was published while one
travels; an inbox one part, and two buckets while it receives. Digests take four buckets more, for a moment.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from contraflow.errors import CarrierError, DeadlineExceeded, VersionGone
from contraflow.types import Manifest, Version
from contraflow.weights.bridge import Bridge
from contraflow.weights.manifest import layout
from contraflow.weights.reshard import Box, Bucket, Plan, Slice
from contraflow.weights.sums import as_text, bucket_sum

MOST_SETS = 2  # versions that lie on a trainer rank
Dtypes = Mapping[str, torch.dtype]


class _Packed:
    """A version's buckets. `users`: links on which it travels or was promised."""

    def __init__(self, buckets: list[Tensor]) -> None:
        self.version: Version | None = None
        self.buckets = buckets
        self.users = set[str]()
        self.asked = False


class Outbox:
    """One trainer rank's buckets of the versions that may travel.

    Invariant: only a version whose bytes are all in place can be held, and while it is held they do not change.
    """

    def __init__(self, plan: Plan, rank: int, dtypes: Dtypes, *, device: torch.device, deadline_s: float) -> None:
        """`device`: where buckets lie. `deadline_s` bounds the wait for room."""
        self.skipped = 0  # versions that a newer one replaced before any engine asked for them
        self._rank, self._dtypes, self._device, self._deadline_s = rank, dtypes, device, deadline_s
        self._indices = plan.sent_by(rank)
        self._mine = [plan.buckets[index] for index in self._indices]
        self._sets: list[_Packed] = []  # the newest last
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """What lies here now, on `device`."""
        return sum(data_B.nbytes for packed in self._sets for data_B in packed.buckets)

    @torch.no_grad()
    def pack(self, version: Version, parts: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Copy this rank's pieces (`parts` by name, free to change afterwards); the digests of its buckets, in order.

        Raises DeadlineExceeded when two earlier versions travel and neither arrives.
        """
        packed = self._room(version)
        sums = []
        for bucket, data_B in zip(self._mine, packed.buckets, strict=True):
            for piece, view in _views(bucket, data_B, self._dtypes):
                view.copy_(parts[piece.name][_at(piece.there)])
            sums.append(bucket_sum(data_B))
        digests = as_text(torch.stack(sums)) if sums else ()  # waits for the device: all is in place
        with self._changed:
            packed.version = version
        return digests

    def hold(self, version: Version, link: str) -> None:
        """Promise a version to a link; it stays until `drop`. Raises VersionGone if a newer one took its place."""
        with self._changed:
            for packed in self._sets:
                if packed.version == version:
                    packed.users.add(link)
                    packed.asked = True
                    return
            there = ", ".join(str(packed.version) for packed in self._sets if packed.version) or "none"
        raise VersionGone(f"version {version} is not on rank {self._rank} of the trainer any more: there is {there}")

    def drop(self, link: str) -> None:
        """Nothing travels on this link any more."""
        with self._changed:
            for packed in self._sets:
                packed.users.discard(link)
            self._changed.notify_all()

    def send(self, version: Version, bridge: Bridge) -> int:
        """Send this rank's buckets of a version held for its link; how many bytes. Raises as `Message.land`."""
        turns = zip(self._indices, self._mine, self.held(version, bridge.link.name), strict=True)
        with _aside(self._device):
            messages = [bridge.send(data_B, one.source, one.targets, tag=index) for index, one, data_B in turns]
            for message in messages:
                message.land()
        return sum(bucket.nbytes for bucket in self._mine)

    def held(self, version: Version, link: str) -> list[Tensor]:
        """Buckets of a version held for a link, in order, as they lie here. Raises CarrierError if it is not held."""
        for packed in self._sets:
            if packed.version == version and link in packed.users:
                return packed.buckets
        raise CarrierError(f"version {version} is not held for {link}")

    def _room(self, version: Version) -> _Packed:
        """A set to pack into: the newest that is not in use, so that no more than one in use lies beside it."""
        with self._changed:
            if not self._changed.wait_for(self._has_room, self._deadline_s):
                raise DeadlineExceeded(
                    f"rank {self._rank} of the trainer", f"room for version {version}: two travel", self._deadline_s
                )
            idle = [packed for packed in self._sets if not packed.users]
            if not idle:
                made = [torch.zeros(one.nbytes, dtype=torch.uint8, device=self._device) for one in self._mine]
                idle = [_Packed(made)]
            else:
                self.skipped += idle[-1].version is not None and not idle[-1].asked
                self._sets.remove(idle[-1])
            idle[-1].version, idle[-1].asked = None, False
            self._sets.append(idle[-1])
            return idle[-1]

    def _has_room(self) -> bool:
        return len(self._sets) < MOST_SETS or any(not packed.users for packed in self._sets)


class Inbox:
    """One engine rank's end: what arrives for it, version by version. Belongs to one thread at a time."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        shapes: Mapping[str, Sequence[int]],
        dtypes: Dtypes,
        *,
        kind: str,
        device: torch.device,
    ) -> None:
        """`shapes` of this rank's own part; `device` is where that part is to lie; `kind` as manifests must have it."""
        self.plan, self._rank, self._digest = plan, rank, plan.digest()
        self._shapes, self._dtypes, self._kind, self._device = shapes, dtypes, kind, device
        self._indices = plan.received_by(rank)

    def check(self, manifest: Manifest) -> None:
        """Raise CarrierError unless the version was packed for this engine, by the same plan."""
        version, buckets = manifest.version, len(self.plan.buckets)
        if manifest.carrier != self._kind:
            raise CarrierError(
                f"version {version} travels by {manifest.carrier!r}, this side receives {self._kind!r}; give both "
                "sides the same weights.carrier"
            )
        if manifest.location != self._digest:
            raise CarrierError(
                f"version {version} was packed by plan {manifest.location[:12]}, this engine expects "
                f"{self._digest[:12]}: model, layout, precision or weights.bucket_bytes differ between the two"
            )
        if len(manifest.digests) != buckets:
            raise CarrierError(f"manifest of {version}: {len(manifest.digests)} digests for {buckets} buckets")

    def receive(self, manifest: Manifest, bridge: Bridge) -> dict[str, Tensor]:
        """This rank's part of a version, proven. Blocks until it is there.

        Raises: CarrierError naming version, bucket and both digests for what did not arrive as it was packed; as
        `Message.land` when the other end is gone or silent.
        """
        return self._proven(manifest, lambda parts: self._arriving(parts, bridge))

    def copy(self, manifest: Manifest, lying: Callable[[int, int], Tensor]) -> dict[str, Tensor]:
        """The same from where buckets lie: `lying(source, n)` is the n-th of those that trainer rank `source` packed.

        Raises CarrierError as `receive` does.
        """
        packed = {index: n for source in range(self.plan.sources) for n, index in enumerate(self.plan.sent_by(source))}

        def copied(parts: Mapping[str, Tensor]) -> Iterator[Tensor]:
            for index in self._indices:
                bucket = self.plan.buckets[index]
                yield self._lay_out(bucket, lying(bucket.source, packed[index]), parts)

        return self._proven(manifest, copied)

    @torch.no_grad()
    def _proven(
        self, manifest: Manifest, bring: Callable[[Mapping[str, Tensor]], Iterator[Tensor]]
    ) -> dict[str, Tensor]:
        self.check(manifest)
        with _aside(self._device):
            parts = {
                name: torch.empty(tuple(shape), dtype=self._dtypes[name], device=self._device)
                for name, shape in self._shapes.items()
            }
            found = as_text(torch.stack(sums)) if (sums := list(bring(parts))) else ()
        for index, digest in zip(self._indices, found, strict=True):
            if digest != manifest.digests[index]:
                raise CarrierError(self._altered(manifest, index, digest))
        return parts

    def _arriving(self, parts: Mapping[str, Tensor], bridge: Bridge) -> Iterator[Tensor]:
        """Digests, bucket by bucket: the next one arrives while this one is laid out."""
        mine = [self.plan.buckets[index] for index in self._indices]
        most = max((bucket.nbytes for bucket in mine), default=0)
        spare = [torch.empty(most, dtype=torch.uint8, device=bridge.device) for _ in range(2)]
        messages = []
        for turn in range(len(mine) + 1):
            if turn < len(mine):
                bucket = mine[turn]
                room_B = spare[turn % 2][: bucket.nbytes]
                message = bridge.receive(room_B, bucket.source, bucket.targets, tag=self._indices[turn])
                messages.append(message)
            if turn > 0:
                messages[turn - 1].order()
                yield self._lay_out(mine[turn - 1], spare[(turn - 1) % 2], parts)
        for message in messages:
            message.land()

    def _lay_out(self, bucket: Bucket, spare_B: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        data_B = spare_B[: bucket.nbytes]
        place = bucket.targets.index(self._rank)
        for piece, view in _views(bucket, data_B, self._dtypes):
            parts[piece.name][_at(piece.here[place])].copy_(view)
        return bucket_sum(data_B)

    def _altered(self, manifest: Manifest, index: int, found: str) -> str:
        bucket = self.plan.buckets[index]
        names = ", ".join(dict.fromkeys(piece.name for piece in bucket.slices[:3]))
        return (
            f"version {manifest.version}, bucket {index} of {len(manifest.digests)} (from rank {bucket.source} of the "
            f"trainer, with {names}) did not arrive as it was packed: expected digest {manifest.digests[index]}, found "
            f"{found}"
        )


def contents(
    plan: Plan,
    digests: Sequence[Sequence[str]],
    shapes: Mapping[str, Sequence[int]],
    dtypes: Dtypes,
    *,
    kind: str = "collective",
) -> dict[str, Any]:
    """What a manifest says of a version that lies packed; `digests` as `pack` gave them, by trainer rank.

    `shapes` are those of whole tensors, `kind` is the carrier.
    """
    by_bucket = dict[int, str]()
    for rank, theirs in enumerate(digests):
        by_bucket |= dict(zip(plan.sent_by(rank), theirs, strict=True))
    whole = {name: torch.empty(tuple(shape), dtype=dtypes[name], device="meta") for name, shape in shapes.items()}
    return {
        "carrier": kind,
        "location": plan.digest(),
        "tensors": layout(whole),
        "digests": tuple(by_bucket[index] for index in range(len(plan.buckets))),
    }


def circles(plan: Plan) -> list[tuple[int, tuple[int, ...]]]:
    """Sources with the targets of what they send to several at once: each such set is a group of its own."""
    found = dict.fromkeys((one.source, one.targets) for one in plan.buckets if len(one.targets) > 1)
    return sorted(found)


def _views(bucket: Bucket, data_B: Tensor, dtypes: Dtypes) -> Iterator[tuple[Slice, Tensor]]:
    for piece in bucket.slices:
        shape = [end - start for start, end in piece.there]
        yield piece, data_B[piece.start : piece.start + piece.nbytes].view(dtypes[piece.name]).view(shape)


def _at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in box)


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """On a GPU a stream of its own: begun after what this thread has queued so far, and through at the end."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
