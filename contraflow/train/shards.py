"""Weights and optimizer state as parts of a cut: each rank writes what it holds, any layout reads what it needs.

Takes a spread model and its optimizer; gives a `Copy` on the host, then parts (safetensors files of at most about
`PART_BYTES`, and one index a rank that says which box of which tensor lies where). Reading fills a model and its
moments bit for bit. Does not decide when, or make a cut visible.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from contraflow.cuts import LANES, CutId, CutManifest, CutSpace, Part, in_lanes
from contraflow.errors import CutTorn
from contraflow.model.reading import Box
from contraflow.parallel.data import at_rest, local
from contraflow.parallel.pieces import at
from contraflow.parallel.spread import Spread
from contraflow.train.optimizer import Optimizer

PART_BYTES = 64 << 20
WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = (WEIGHT, *MOMENTS)


class Entry(msgspec.Struct, frozen=True):
    """Where a box of a whole tensor lies: under `key` in a part. `kind`: the weight, or which of its moments."""

    key: str
    name: str
    kind: str
    box: Box


class Index(msgspec.Struct, frozen=True):
    """One rank's: part name -> what is in it; `steps`: parameter -> its count of updates."""

    parts: dict[str, list[Entry]]
    steps: dict[str, float]


class Slab(NamedTuple):
    """A box of a whole tensor, on the host."""

    name: str
    kind: str
    box: Box
    data: Tensor


class Copy:
    """What one rank adds to a cut, copied: training may go on.

    Holds 12 bytes (weight and two moments, fp32) for every element that this rank alone, or first, holds.
    """

    def __init__(self, spread: Spread, optimizer: Optimizer, below: str = "") -> None:
        """`below`: the folder of its parts, with its `/`."""
        self._folder = f"{below}rank-{0 if spread.mesh is None else spread.mesh.here.rank:05d}"
        at_rest(spread.decoder)
        weights = {name: local(parameter).detach() for name, parameter in spread.decoder.named_parameters()}
        moments = optimizer.moments()
        self._slabs: list[Slab] = []
        self._steps: dict[str, float] = {}
        for name, weight in weights.items():
            if f"{name}:step" in moments:
                self._steps[name] = float(moments[f"{name}:step"])
            if not spread.counted(name):
                continue
            for kind in KINDS:
                found = weight if kind == WEIGHT else moments.get(f"{name}:{kind}")
                if found is not None:
                    self._slabs += (
                        Slab(name, kind, there, host(found[at(here)])) for there, here in boxes(spread, name)
                    )

    def write(self, space: CutSpace, cut: CutId) -> list[Part]:
        """Put this rank's parts, `LANES` at once; gives all, the index last. Raises BlobError."""
        files = {f"{self._folder}/{n:05d}": slabs for n, slabs in enumerate(_files(self._slabs))}
        index = Index({name: _entries(slabs) for name, slabs in files.items()}, self._steps)
        written = in_lanes(lambda name: space.put(cut, name, _encoded(files[name])), list(files))
        return [*written, space.put(cut, f"{self._folder}/index", msgspec.json.encode(index))]


class Shards:
    """The tensors of a cut, from the parts of whatever ranks wrote them."""

    def __init__(self, space: CutSpace, manifest: CutManifest, below: str = "") -> None:
        """Reads the indexes of the ranks' parts in the folder `below`. Raises CutTorn, BlobError."""
        self._space, self._manifest = space, manifest
        self._parts = {part.name: part for part in manifest.parts}
        self._where: dict[str, list[Entry]] = {}
        self.steps: dict[str, float] = {}
        for part in manifest.parts:
            if part.name.startswith(f"{below}rank-") and part.name.endswith("/index"):
                index = self._index(part)
                self._where |= index.parts
                self.steps |= index.steps
        if absent := sorted(self._where.keys() - self._parts.keys()):
            raise CutTorn(f"cut {manifest.id.name} in {space.url} has no part {absent[0]!r}, which its index names")

    @property
    def names(self) -> set[str]:
        """Of the parameters."""
        return {entry.name for entries in self._where.values() for entry in entries}

    def fill(self, targets: Mapping[tuple[str, str], Tensor], spread: Spread) -> None:
        """Fill (name, kind) -> this rank's tensor, reading only parts that reach into them.

        Holds `LANES` parts at a time. Raises CutTorn when a part is, or elements of a target are in none; BlobError.
        """
        missing = {target: tensor.numel() for target, tensor in targets.items()}
        mine = {name: boxes(spread, name) for name, _ in targets}
        wanted = [
            part for part, entries in self._where.items() if any(_laps(entry, targets, mine) for entry in entries)
        ]
        with torch.no_grad():
            for start in range(0, len(wanted), LANES):
                names = wanted[start : start + LANES]
                for name, slabs in zip(names, in_lanes(self._slabs, names), strict=True):
                    for entry in self._where[name]:
                        target = (entry.name, entry.kind)
                        for there, here in _laps(entry, targets, mine):
                            targets[target][at(here)] = self._box(slabs, name, entry)[at(there)].to(
                                targets[target].device
                            )
                            missing[target] -= _count(there)
        if lacking := [target for target, count in missing.items() if count]:
            name, kind = lacking[0]
            raise CutTorn(f"cut {self._manifest.id.name} in {self._space.url} does not hold all of {kind} {name!r}")

    def _slabs(self, part: str) -> dict[str, Tensor]:
        try:
            return safetensors.torch.load(self._space.read(self._manifest, self._parts[part]))
        except SafetensorError as fault:
            raise CutTorn(f"cut {self._manifest.id.name}: part {part!r} is no safetensors file: {fault}") from None

    def _box(self, slabs: Mapping[str, Tensor], part: str, entry: Entry) -> Tensor:
        found = slabs.get(entry.key)
        if found is None or tuple(found.shape) != tuple(end - start for start, end in entry.box):
            raise CutTorn(f"cut {self._manifest.id.name}: part {part!r} does not hold {entry} as its index says")
        return found

    def _index(self, part: Part) -> Index:
        try:
            return msgspec.json.decode(self._space.read(self._manifest, part), type=Index)
        except msgspec.MsgspecError as fault:
            raise CutTorn(f"cut {self._manifest.id.name}: part {part.name!r} is no index: {fault}") from None


def boxes(spread: Spread, name: str) -> Sequence[tuple[Box, Box]]:
    """Which boxes of a whole parameter lie in which boxes of this rank's own."""
    if spread.mesh is not None:
        return spread.pieces[name].boxes
    whole = tuple((0, size) for size in spread.shapes[name])
    return ((whole, whole),)


def host(tensor: Tensor) -> Tensor:
    """A copy on the CPU that shares no memory with it."""
    return tensor.to("cpu", copy=True).contiguous()


def _files(slabs: Iterable[Slab]) -> Iterator[list[Slab]]:
    """Slabs, cut by rows where they are large, in files of at most `PART_BYTES` or one row."""
    waiting: list[Slab] = []
    size = 0
    for slab in slabs:
        for piece in _rows(slab):
            if waiting and size + piece.data.nbytes > PART_BYTES:
                yield waiting
                waiting, size = [], 0
            waiting.append(piece)
            size += piece.data.nbytes
    if waiting:
        yield waiting


def _rows(slab: Slab) -> Iterator[Slab]:
    if slab.data.nbytes <= PART_BYTES or slab.data.ndim == 0:
        yield slab
        return
    rows = len(slab.data)
    each = max(1, PART_BYTES * rows // slab.data.nbytes)
    first = slab.box[0][0]
    for start in range(0, rows, each):
        end = min(start + each, rows)
        yield slab._replace(box=((first + start, first + end), *slab.box[1:]), data=slab.data[start:end])


def _entries(slabs: Sequence[Slab]) -> list[Entry]:
    return [Entry(str(key), slab.name, slab.kind, slab.box) for key, slab in enumerate(slabs)]


def _encoded(slabs: Sequence[Slab]) -> bytes:
    return safetensors.torch.save({str(key): slab.data for key, slab in enumerate(slabs)})


def _laps(
    entry: Entry, targets: Mapping[tuple[str, str], Tensor], mine: Mapping[str, Sequence[tuple[Box, Box]]]
) -> list[tuple[Box, Box]]:
    """Where an entry and this rank's tensor overlap: (box of the entry's data, box of the tensor)."""
    if (entry.name, entry.kind) not in targets:
        return []
    found = []
    for there, here in mine[entry.name]:
        if len(there) != len(entry.box):
            continue
        lap = tuple((max(a, b), min(c, d)) for (a, c), (b, d) in zip(there, entry.box, strict=True))
        if all(start < end for start, end in lap):
            found.append((_shifted(lap, entry.box), _shifted(lap, there, here)))
    return found


def _shifted(lap: Box, origin: Box, to: Box | None = None) -> Box:
    """`lap`, counted from the start of `origin`, placed in `to`."""
    base = [start for start, _ in to] if to is not None else [0] * len(lap)
    return tuple(
        (start - zero + more, end - zero + more)
        for (start, end), (zero, _), more in zip(lap, origin, base, strict=True)
    )


def _count(box: Box) -> int:
    count = 1
    for start, end in box:
        count *= end - start
    return count
