"""Cuts as blobs: parts written in parallel, then one conditional put of a small manifest, so a cut is whole or unseen.

Takes bytes by name, gives them back verified; knows nothing of models. Keys: manifests/NAME, parts/NAME/WRITER/PART;
lines/N says who may commit, see lines.py.
An empty manifest is a fence: nobody can commit a cut of that name any more, and its parts may go. Does not decide when
to cut or what belongs in one.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from contraflow.blobs import Blobs, open_blobs
from contraflow.cuts.lines import Lines
from contraflow.cuts.patience import Patience
from contraflow.errors import BlobExists, BlobMissing, CheckpointError, CutTaken, CutTorn

FORMAT = 1
LANES = 4  # parts read or written at once
STORE_RETRY_S = 10.0  # how long one call to S3 may try again by itself, before ours counts it as failed
NAME = re.compile(r"line-(\d+)-step-(\d+)")
EARLIER = "earlier cuts are untouched; free some space or mend the store, and resume"
T = TypeVar("T")
S = TypeVar("S")


class CutId(msgspec.Struct, frozen=True):
    """One writer's attempt at a cut. `writer` is of that run's start alone, so no two write to the same keys."""

    name: str
    writer: str


class Part(msgspec.Struct, frozen=True):
    """One blob of a cut; `sha256` in hex."""

    name: str
    size: int
    sha256: str


class CutManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a cut consists of. `about` is the owner's: JSON values."""

    format: int
    id: CutId
    about: dict[str, Any]
    parts: tuple[Part, ...]

    def part(self, name: str) -> Part:
        """Raises CutTorn when the manifest does not name it."""
        found = next((part for part in self.parts if part.name == name), None)
        if found is None:
            raise CutTorn(f"cut {self.id.name} has no part {name!r}")
        return found

    def below(self, folder: str) -> list[Part]:
        """Parts whose names begin with `folder/`."""
        return [part for part in self.parts if part.name.startswith(f"{folder}/")]


class _Signed(msgspec.Struct, frozen=True):
    """A manifest as stored; `sha256` of the bytes of `cut`."""

    sha256: str
    cut: msgspec.Raw


class Newest(NamedTuple):
    """The newest whole cut, if any, and what was said of newer ones that are not."""

    manifest: CutManifest | None
    refused: tuple[str, ...]


class CutSpace:
    """All cuts of a run in one blob space; safe to use from several threads and processes at once.

    Invariant: a manifest that is not empty names parts that are there. It is put last, when they are; and before any
    are deleted it is made empty, or, of a cut that was never committed, an empty one is put in its place.
    """

    def __init__(self, blobs: Blobs, patience: Patience) -> None:
        self.url = blobs.url
        self.lines = Lines(blobs, patience)
        self._blobs = blobs
        self._patience = patience

    def put(self, cut: CutId, name: str, data: Any) -> Part:
        """Write one part (bytes or any flat uint8 buffer). Raises BlobError when that fails to the deadline."""
        key = _part(cut, name)
        self._patience.keep_on(lambda: self._blobs.put(key, data))
        return Part(name, memoryview(data).nbytes, hashlib.sha256(data).hexdigest())

    def commit(self, cut: CutId, parts: Sequence[Part], about: dict[str, Any]) -> CutManifest:
        """Make the cut visible, all at once. Committing again what is committed is no error.

        Raises CutTaken when another writer was first or a newer line was begun, BlobError when the store does not say
        which: the cut is then whole or not there, and its parts must stay.
        """
        self.lines.check(place(cut.name)[0])
        manifest = CutManifest(format=FORMAT, id=cut, about=about, parts=tuple(sorted(parts, key=lambda p: p.name)))
        body = msgspec.json.encode(manifest)
        data = msgspec.json.encode(_Signed(hashlib.sha256(body).hexdigest(), msgspec.Raw(body)))
        try:
            self._patience.keep_on(lambda: self._blobs.sync([_part(cut, part.name) for part in parts]))
        except BlobMissing as swept:
            raise CutTaken(f"{swept}: a run that goes on took cut {cut.name} for abandoned; stop this one") from None
        self._claim(cut.name, data)
        self._patience.keep_on(lambda: self._blobs.sync([_manifest(cut.name)]))
        return manifest

    def names(self) -> list[str]:
        """Committed cuts, newest first: a later line is newer, whatever its step."""
        return _sorted(name for name, size in self._manifests().items() if size)

    def manifest(self, name: str) -> CutManifest:
        """Raises CutTorn when there is none or it was altered, CheckpointError when it is of another format."""
        try:
            data = self._patience.keep_on(lambda: self._blobs.get(_manifest(name)))
        except BlobMissing:
            raise CutTorn(f"there is no cut {name} in {self.url}{self._others(name)}") from None
        if not data:
            raise CutTorn(f"cut {name} in {self.url} was retired{self._others(name)}")
        try:
            return _decode(data, f"cut {name} in {self.url}", name)
        except CutTorn as torn:
            raise CutTorn(f"{torn}{self._others(name)}") from None

    def read(self, manifest: CutManifest, part: Part) -> bytes:
        """One part, verified. Raises CutTorn when it is missing, truncated or altered, BlobError."""
        what = f"cut {manifest.id.name} in {self.url}: part {part.name!r}"
        try:
            data = self._patience.keep_on(lambda: self._blobs.get(_part(manifest.id, part.name)))
        except BlobMissing:
            raise CutTorn(f"{what} is missing{self._others(manifest.id.name)}") from None
        if len(data) != part.size:
            raise CutTorn(f"{what} has {len(data)} bytes of {part.size}{self._others(manifest.id.name)}")
        if (found := hashlib.sha256(data).hexdigest()) != part.sha256:
            raise CutTorn(f"{what} was altered (sha256 {found}, was {part.sha256}){self._others(manifest.id.name)}")
        return data

    def newest(self) -> Newest:
        """The newest cut of which every part is there as it was written: all of it is read.

        Raises CheckpointError when there are cuts of an earlier layout only, BlobError when the store does not answer.
        """
        refused: list[str] = []
        names = self.names()
        if not names:
            self._refuse_old()
        for name in names:
            try:
                manifest = self.manifest(name)
                in_lanes(partial(self._check, manifest), manifest.parts)
                return Newest(manifest, tuple(refused))
            except CutTorn as torn:
                refused.append(str(torn))
        return Newest(None, tuple(refused))

    def _check(self, manifest: CutManifest, part: Part) -> None:
        self.read(manifest, part)

    def retire(self, name: str) -> None:
        """Make a cut unseen, then delete its parts."""
        self._patience.keep_on(lambda: self._blobs.put(_manifest(name), b""))
        self._patience.keep_on(lambda: self._blobs.sync([_manifest(name)]))
        self._patience.keep_on(lambda: self._blobs.clear(f"parts/{name}"))

    def tidy(self, cut: CutId, keep: int) -> None:
        """Forget all but the newest `keep` cuts, and what older attempts than `cut` left without committing.

        An attempt that still runs somewhere finds its name fenced, and can't commit what is deleted here.
        """
        for name in self.names()[keep:]:
            self.retire(name)
        manifests = self._manifests()
        for name in self._patience.keep_on(lambda: self._blobs.below("parts")):
            if NAME.fullmatch(name) and place(name) < place(cut.name) and not manifests.get(name):
                self._sweep(name, fenced=name in manifests)

    def discard(self, cut: CutId) -> None:
        """Delete the parts of an attempt that will not be committed. One attempt: the store may be what failed."""
        self._blobs.clear(f"parts/{cut.name}/{cut.writer}")

    def _sweep(self, name: str, *, fenced: bool) -> None:
        if not fenced:
            try:
                self._claim(name, b"")
            except CutTaken:  # committed just now
                return
        self._patience.keep_on(lambda: self._blobs.clear(f"parts/{name}"))

    def _claim(self, name: str, data: bytes) -> None:
        """Put a manifest where there is none. After an answer that was lost, what is there says who won."""
        try:
            self._patience.keep_on(lambda: self._blobs.put(_manifest(name), data, create=True))
        except BlobExists:
            found = self._patience.keep_on(lambda: self._blobs.get(_manifest(name)))
            if found != data:
                owner = _decode(found, f"cut {name}", name).id.writer if found else "nobody: it is fenced off"
                raise CutTaken(
                    f"cut {name} in {self.url} belongs to writer {owner}; another run of this line goes on, stop this"
                ) from None

    def _manifests(self) -> dict[str, int]:
        sizes = self._patience.keep_on(lambda: self._blobs.sizes("manifests"))
        return {key.rpartition("/")[2]: size for key, size in sizes.items() if NAME.fullmatch(key.rpartition("/")[2])}

    def _others(self, name: str) -> str:
        older = [other for other in self.names() if NAME.fullmatch(name) and place(other) < place(name)]
        return f"; the next older cut is {older[0]}" if older else "; there is no older cut"

    def _refuse_old(self) -> None:
        keys = self._patience.keep_on(self._blobs.list)
        old = next((key for key in keys if re.fullmatch(NAME.pattern + "/files.json", key)), None)
        if old is not None:
            raise CheckpointError(
                f"{self.url}/{old} is a checkpoint of an earlier layout, which this version does not read; resume with "
                "the version that wrote it, or start anew from its model/ folder"
            )


def open_cuts(
    url: str, *, clock: Callable[[], float], pause: Callable[[float], bool], deadline_s: float = 60.0
) -> CutSpace:
    """The cuts at a folder or `s3://bucket/prefix`; each call to it tries again for `deadline_s`."""
    return CutSpace(open_blobs(url, retry_s=min(STORE_RETRY_S, deadline_s)), Patience(deadline_s, clock, pause))


def cut_name(line: int, step: int) -> str:
    """Of the cut before `step` on `line`."""
    return f"line-{line}-step-{step}"


def place(name: str) -> tuple[int, int]:
    """(line, step) of a cut's name, by which cuts are ordered."""
    match = NAME.fullmatch(name)
    if match is None:
        raise CheckpointError(f"{name!r} is not the name of a cut; they are called line-L-step-N")
    return int(match[1]), int(match[2])


def in_lanes(work: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """`work` of each, `LANES` at once, results in order; the first failure stops what has not begun."""
    with ThreadPoolExecutor(LANES, thread_name_prefix="cut") as pool:
        waiting = [pool.submit(work, item) for item in items]
        try:
            return [one.result() for one in waiting]
        finally:
            pool.shutdown(cancel_futures=True)


def _decode(data: bytes, what: str, name: str) -> CutManifest:
    try:
        signed = msgspec.json.decode(data, type=_Signed)
        if hashlib.sha256(signed.cut).hexdigest() != signed.sha256:
            raise CutTorn(f"{what}: its manifest was altered")
        found = msgspec.json.decode(signed.cut, type=dict[str, Any]).get("format")
        if found != FORMAT:
            raise CheckpointError(f"{what} has format {found}; this version of contraflow reads format {FORMAT}")
        manifest = msgspec.json.decode(signed.cut, type=CutManifest)
    except msgspec.MsgspecError as fault:
        raise CutTorn(f"{what}: its manifest is torn: {fault}") from None
    if manifest.id.name != name:
        raise CutTorn(f"{what}: its manifest is that of {manifest.id.name}")
    return manifest


def _sorted(names: Iterable[str]) -> list[str]:
    return sorted(names, key=place, reverse=True)


def _manifest(name: str) -> str:
    return f"manifests/{name}"


def _part(cut: CutId, name: str) -> str:
    return f"parts/{cut.name}/{cut.writer}/{name}"
