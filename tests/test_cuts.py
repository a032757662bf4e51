"""The commit protocol of cuts, on a folder: whole or unseen, whoever else writes, deletes or fails meanwhile."""

import hashlib
import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contraflow.blobs import Blobs, open_blobs
from contraflow.cuts import CutId, CutSpace, cut_name, place
from contraflow.cuts.patience import Patience
from contraflow.errors import BlobError, BlobExists, BlobMissing, CheckpointError, CutTaken, CutTorn
from tests import racing
from tests.cut_writer import attempt, names_whole, space_in
from tests.racing import Try


def test_a_cut_is_seen_when_it_is_committed_and_not_before(tmp_path: Path) -> None:
    space, here = space_in(tmp_path), CutId("line-0-step-1", "w")
    parts = [space.put(here, name, data) for name, data in (("b", b""), ("a/x", b"12"), ("a/y", bytes(1000)))]
    assert space.names() == []
    assert space.newest().manifest is None
    space.commit(here, parts, {"step": 1})
    manifest = space.manifest("line-0-step-1")
    assert manifest.about == {"step": 1}
    assert {part.name: space.read(manifest, part) for part in manifest.parts} == {
        "b": b"", "a/x": b"12", "a/y": bytes(1000),
    }  # fmt: skip
    assert [part.name for part in manifest.below("a")] == ["a/x", "a/y"]
    with pytest.raises(CutTorn, match="no part 'c'"):
        manifest.part("c")


def test_committing_twice_is_committing_once(tmp_path: Path) -> None:
    space, here = space_in(tmp_path), CutId("line-0-step-1", "w")
    parts = [space.put(here, "a", b"1")]
    assert space.commit(here, parts, {}) == space.commit(here, parts, {})


def test_names_are_ordered_by_line_and_step_as_numbers(tmp_path: Path) -> None:
    space = space_in(tmp_path)
    for line, step in itertools.product((0, 2, 10), (0, 9, 10)):
        attempt(space, cut_name(line, step), "w", keep=99)
    (tmp_path / "manifests" / "other").write_bytes(b"not a cut")
    assert [place(name) for name in space.names()] == sorted(itertools.product((0, 2, 10), (0, 9, 10)), reverse=True)


def test_a_cut_that_is_not_there_is_told_with_an_older_one(tmp_path: Path) -> None:
    space = space_in(tmp_path)
    with pytest.raises(CutTorn, match=r"no cut line-0-step-9.*there is no older cut"):
        space.manifest("line-0-step-9")
    attempt(space, "line-0-step-3", "w")
    with pytest.raises(CutTorn, match=r"no cut line-0-step-9.*the next older cut is line-0-step-3"):
        space.manifest("line-0-step-9")


def test_a_manifest_of_a_newer_format_or_of_another_name_is_refused(tmp_path: Path) -> None:
    space = space_in(tmp_path)
    attempt(space, "line-0-step-1", "w")
    path = tmp_path / "manifests" / "line-0-step-1"
    (tmp_path / "manifests" / "line-0-step-2").write_bytes(path.read_bytes())
    with pytest.raises(CutTorn, match="is that of line-0-step-1"):
        space.manifest("line-0-step-2")
    body = msgspec.json.encode(msgspec.json.decode(path.read_bytes())["cut"] | {"format": 2})
    path.write_bytes(b'{"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'","cut":' + body + b"}")
    with pytest.raises(CheckpointError, match="format 2; this version of contraflow reads format 1"):
        space.manifest("line-0-step-1")


def test_cuts_of_the_earlier_layout_are_named_and_not_read(tmp_path: Path) -> None:
    (tmp_path / "line-0-step-20").mkdir()
    (tmp_path / "line-0-step-20" / "files.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"line-0-step-20/files.json is a checkpoint of an earlier layout"):
        space_in(tmp_path).newest()


def test_who_is_slower_than_the_retention_finds_its_name_fenced(tmp_path: Path) -> None:
    space, slow = space_in(tmp_path), CutId("line-0-step-1", "slow")
    parts = [space.put(slow, "a", b"1")]
    attempt(space, "line-0-step-2", "w", keep=1)  # sweeps what was never committed
    assert not list((tmp_path / "parts" / "line-0-step-1").rglob("*"))
    with pytest.raises(CutTaken, match="took cut line-0-step-1 for abandoned"):
        space.commit(slow, parts, {})
    with pytest.raises(CutTaken, match="it is fenced off"):
        space.commit(slow, [space.put(slow, "a", b"1")], {})
    late = CutId("line-0-step-2", "late")
    parts = [space.put(late, "a", b"1")]
    attempt(space, "line-0-step-3", "w", keep=1)  # retires step 2, and takes the late one's parts with it
    with pytest.raises(CutTaken, match="took cut line-0-step-2 for abandoned"):
        space.commit(late, parts, {})
    with pytest.raises(CutTaken, match="it is fenced off"):
        space.commit(late, [space.put(late, "a", b"1")], {})
    assert space.names() == names_whole(space) == ["line-0-step-3"]


class Failing:
    """Blobs that fail the first `times` calls of one method, before or after they took effect."""

    def __init__(self, blobs: Blobs, method: str, times: int, *, after: bool, error: type[BlobError]) -> None:
        self._blobs, self._method, self._left, self._after, self._error = blobs, method, times, after, error
        self.url = blobs.url

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*given: Any, **keys: Any) -> Any:
            fails = name == self._method and self._left > 0
            self._left -= fails
            if fails and not self._after:
                raise self._error("503")
            found = getattr(self._blobs, name)(*given, **keys)
            if fails:
                raise self._error("the answer was lost")
            return found

        return call


class Hours:
    """A clock that moves by what is paused."""

    now = 0.0

    def __init__(self) -> None:
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        self.now += seconds
        return False


@pytest.mark.parametrize("after", [False, True], ids=["before it took effect", "after"])
@pytest.mark.parametrize("method", ["put", "get", "below", "sizes", "sync", "clear"])
def test_a_store_that_fails_for_a_while_delays_a_cut_and_nothing_else(tmp_path: Path, method: str, after: bool) -> None:
    hours = Hours()
    attempt(space_in(tmp_path), "line-0-step-1", "w")
    failing = Failing(open_blobs(str(tmp_path)), method, 5, after=after, error=BlobError)
    space = CutSpace(failing, Patience(60.0, hours, hours.pause))  # type: ignore[arg-type]
    attempt(space, "line-0-step-2", "w", keep=1)
    assert space.newest().manifest is not None
    assert names_whole(space_in(tmp_path)) == space.names() == ["line-0-step-2"]
    assert hours.pauses[:5] == [0.1, 0.2, 0.4, 0.8, 1.6]


def test_patience_ends_at_its_deadline_with_the_reason_or_when_it_is_time_to_leave() -> None:
    hours = Hours()

    def fail() -> None:
        raise BlobError("refused")

    with pytest.raises(BlobError, match=r"refused \(given up after \d+ tries in 5\d\.\d s\)"):
        Patience(60.0, hours, hours.pause).keep_on(fail)
    assert max(hours.pauses) == 5.0
    with pytest.raises(BlobError, match="after 1 tries"):
        Patience(60.0, hours, lambda _: True).keep_on(fail)
    for final in (BlobMissing, BlobExists):
        tries = itertools.count()

        def once(kind: type[BlobError] = final, tries: Any = tries) -> None:
            next(tries)
            raise kind("k")

        with pytest.raises(final):
            Patience(60.0, hours, hours.pause).keep_on(once)
        assert next(tries) == 1


def _entered(url: str, writer: str) -> Try:
    space = space_in(url)

    def attempt(name: str) -> bool:
        here = CutId(name, writer)
        parts = [space.put(here, part, f"{writer} {name} {part}".encode()) for part in "ab"]
        try:
            space.commit(here, parts, {"writer": writer})
        except CutTaken:
            return False
        return True

    return attempt


def race(url: str, count: int) -> None:
    """Three processes write the same cuts. Each cut is one writer's, whole, and the others say that they lost."""
    won = racing.race(_entered, url, [cut_name(0, step) for step in range(count)], wait_s=60)
    space = space_in(url)
    for writer, mine in won.items():
        for name in mine:
            manifest = space.manifest(name)
            assert manifest.about == {"writer": writer}
            assert [space.read(manifest, part) for part in manifest.parts] == [
                f"{writer} {name} {part}".encode() for part in "ab"
            ]


def test_of_racing_writers_of_a_cut_exactly_one_wins_and_the_others_say_so(tmp_path: Path) -> None:
    race(str(tmp_path), 20)


class Turns:
    """Blobs whose every call waits for its turn, so that a test decides how several writers interleave."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self.url = blobs.url
        self.go, self.waits, self.done = threading.Semaphore(0), threading.Semaphore(0), False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*given: Any, **keys: Any) -> Any:
            self.waits.release()
            assert self.go.acquire(timeout=30)
            return getattr(self._blobs, name)(*given, **keys)

        return call

    def run(self, work: Callable[[CutSpace], None]) -> threading.Thread:
        def main() -> None:
            try:
                work(CutSpace(self, Patience(0.0, lambda: 0.0, lambda _: True)))  # type: ignore[arg-type]
            except CutTaken:
                return
            finally:
                self.done = True
                self.waits.release()

        thread = threading.Thread(target=main)
        thread.start()
        assert self.waits.acquire(timeout=30)
        return thread

    def turn(self) -> None:
        if not self.done:
            self.go.release()
            assert self.waits.acquire(timeout=30)


def _attempts(names: Sequence[str], writer: str, keep: int, space: CutSpace) -> None:
    for name in names:
        attempt(space, name, writer, keep=keep)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedule=st.lists(st.integers(0, 2), max_size=90), keep=st.integers(1, 2))
def test_however_writers_interleave_what_is_seen_is_whole_at_every_moment(
    tmp_path_factory: pytest.TempPathFactory, schedule: list[int], keep: int
) -> None:
    """A writer left behind on line 0, and two that race on line 1, each with two cuts, retention and sweeping."""
    folder = tmp_path_factory.mktemp("turns")
    seen, places = space_in(folder), [("line-0-step-1", "line-0-step-2"), *[("line-1-step-1", "line-1-step-2")] * 2]
    turns = [Turns(open_blobs(str(folder))) for _ in places]
    threads = [
        one.run(partial(_attempts, names, f"w{index}", keep))
        for index, (one, names) in enumerate(zip(turns, places, strict=True))
    ]
    try:
        for index in [*schedule, *itertools.chain.from_iterable([0, 1, 2] for _ in range(60))]:
            if all(one.done for one in turns):
                break
            turns[index].turn()
            assert names_whole(seen) == seen.names()
    finally:
        for one, thread in zip(turns, threads, strict=True):
            one.go.release(1000)
            thread.join(30)
    assert seen.names()
    assert place(seen.names()[0])[0] == 1
