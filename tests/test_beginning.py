"""Of all starts of a run, in whatever folders, the newest goes on: it has the line, and older ones commit nothing."""

import ast
import asyncio
import itertools
import shutil
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest

import contraflow
from contraflow.blobs import Blobs, open_blobs
from contraflow.buffer.accounts import accounts
from contraflow.buffer.audit import audit
from contraflow.buffer.ledger import FILE
from contraflow.buffer.riding import position
from contraflow.config import Recipe
from contraflow.cuts.lines import Lines
from contraflow.cuts.patience import Patience
from contraflow.errors import BlobError, CheckpointError, CutTaken, RunFolderError
from contraflow.loop import Loop
from contraflow.restoring import restore
from contraflow.run import run_recipe
from tests.cut_writer import attempt, claimer, never, space_in
from tests.racing import race
from tests.test_loop import Silent, Ticks, parts_of, recipe_of, run, until_step


def recipe(model: Path, url: str, steps: int, *, deadline_s: float = 5.0) -> Recipe:
    train = {"checkpoint_every": 2, "keep_checkpoints": 9, "checkpoint_url": url, "checkpoint_deadline_s": deadline_s}
    return recipe_of(model, train=train, run={"steps": steps, "eval_tasks": 0})


def twin_of(url: str, folder: Path, change: str = "") -> None:
    restore(url, folder, [change] if change else [], clock=Ticks(), pause=never)


def at_step(step: int, work: Callable[[], None]) -> Callable[[Loop], Awaitable[None]]:
    async def meddle(loop: Loop) -> None:
        await until_step(loop, step)
        await asyncio.to_thread(work)

    return meddle


def check_that_the_newer_of_two_loops_goes_on(url: str, model: Path, tmp_path: Path) -> None:
    """A run whose cuts are at `url`, and, while it lives, its twin in another folder."""
    twin = tmp_path / "twin"

    def begin_twin() -> None:
        twin_of(url, twin)
        run(recipe(model, url, 8), twin, resume=True)

    with pytest.raises(CutTaken, match=r"line 1 in .* was begun by writer \w+ after line 0: .* stop this one"):
        run(recipe(model, url, 8), tmp_path / "first", meddle=at_step(3, begin_twin))
    names = space_in(url).names()
    assert names[0] == "line-1-step-8"
    assert "line-0-step-2" in names
    assert "line-0-step-4" not in names
    assert accounts(twin).trained == 8 * 4
    assert not audit(twin)


def test_of_two_loops_on_one_place_of_cuts_the_newer_goes_on(tiny_moe: Path, tmp_path: Path) -> None:
    check_that_the_newer_of_two_loops_goes_on(str(tmp_path / "cuts"), tiny_moe, tmp_path)


@pytest.mark.s3
def test_of_two_loops_on_one_s3_address_the_newer_goes_on(bucket: str, tiny_moe: Path, tmp_path: Path) -> None:
    check_that_the_newer_of_two_loops_goes_on(bucket, tiny_moe, tmp_path)


def test_a_folder_that_was_left_behind_cannot_go_on_over_its_twin(tiny_moe: Path, tmp_path: Path) -> None:
    url, first = str(tmp_path / "cuts"), tmp_path / "first"
    run(recipe(tiny_moe, url, 4), first)
    twin_of(url, tmp_path / "twin")
    run(recipe(tiny_moe, url, 6), tmp_path / "twin", resume=True)
    with pytest.raises(RunFolderError, match="knows of no checkpoint of step 6"):
        run(recipe(tiny_moe, url, 8), first, resume=True)
    run(recipe(tiny_moe, url, 8), tmp_path / "twin", resume=True)  # it took a line and lost nothing by it
    assert space_in(url).names()[0] == "line-3-step-8"
    assert accounts(tmp_path / "twin").trained == 8 * 4
    assert not audit(tmp_path / "twin")


def test_another_run_does_not_begin_where_one_has_its_cuts(tiny_moe: Path, tmp_path: Path) -> None:
    url = str(tmp_path / "cuts")
    run(recipe(tiny_moe, url, 2), tmp_path / "first")
    with pytest.raises(CutTaken, match=r"line 0 in .*cuts was begun by writer .* a train\.checkpoint_url of its own"):
        run(recipe(tiny_moe, url, 2), tmp_path / "second")


def test_a_ledger_of_another_run_is_refused_and_left_as_it_was(tiny_moe: Path, tmp_path: Path) -> None:
    for name in ("mine", "other"):
        run(recipe(tiny_moe, "", 4), tmp_path / name)
    mine, other = tmp_path / "mine" / FILE, tmp_path / "other" / FILE
    shutil.copy(mine, tmp_path / "kept")
    shutil.copy(other, mine)
    before = mine.read_bytes()
    with pytest.raises(
        RunFolderError, match=r"is the ledger of run \w{8}, but cut line-0-step-4 in .* is of run \w{8}"
    ):
        run(recipe(tiny_moe, "", 6), tmp_path / "mine", resume=True)
    assert mine.read_bytes() == before
    shutil.copy(tmp_path / "kept", mine)
    run(recipe(tiny_moe, "", 6), tmp_path / "mine", resume=True)
    assert accounts(tmp_path / "mine").trained == 6 * 4


def test_a_run_that_comes_back_from_a_cut_keeps_its_name(tiny_moe: Path, tmp_path: Path) -> None:
    run(recipe(tiny_moe, "", 4), tmp_path / "run")
    twin_of(str(tmp_path / "run"), tmp_path / "again")
    assert position(tmp_path / "again")["run"] == position(tmp_path / "run")["run"] > 0


def test_a_ledger_of_a_newer_layout_is_refused_before_a_line_is_taken(tiny_moe: Path, tmp_path: Path) -> None:
    run(recipe(tiny_moe, "", 2), tmp_path / "run")
    with closing(sqlite3.connect(tmp_path / "run" / FILE)) as db, db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(Exception, match="has layout 99; this version of contraflow reads layout"):
        run(recipe(tiny_moe, "", 4), tmp_path / "run", resume=True)
    assert space_in(tmp_path / "run" / "checkpoints").lines.newest() == 0


def test_of_racing_starts_exactly_one_has_each_line(tmp_path: Path) -> None:
    race(claimer, str(tmp_path), [str(line) for line in range(20)], wait_s=60.0)


@pytest.mark.s3
def test_of_racing_starts_on_s3_exactly_one_has_each_line(bucket: str) -> None:
    race(claimer, bucket, [str(line) for line in range(8)], wait_s=60.0)


class Jumping(Ticks):
    """A clock that leaps an hour ahead now and then, and sometimes two hours back: a machine that slept, or was set."""

    def __init__(self) -> None:
        super().__init__()
        self._looks = itertools.count(1)
        self._off = 0.0

    def __call__(self) -> float:
        look = next(self._looks)
        self._off += 3600.0 * (look % 23 == 0) - 7200.0 * (look % 61 == 0)
        return super().__call__() + self._off


def test_a_clock_that_jumps_changes_no_group_and_no_weight(tiny_moe: Path, tmp_path: Path) -> None:
    for name, clock in (("steady", Ticks()), ("jumping", Jumping())):
        folder, settings = tmp_path / name, recipe(tiny_moe, "", 4)
        outcome = run_recipe(settings, folder, resume=False, clock=clock, view=Silent())
        assert outcome.steps == 4
    steady, jumping = (parts_of(tmp_path / name) for name in ("steady", "jumping"))
    assert steady == jumping
    assert accounts(tmp_path / "jumping").trained == 4 * 4
    assert not audit(tmp_path / "jumping")


def test_no_part_of_a_run_reads_the_time_of_day() -> None:
    """It can be set; what waits and measures does so by a clock that is handed in and only goes forward."""
    for path in Path(contraflow.__file__).parent.rglob("*.py"):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Attribute)}
        assert not names & {"time_ns", "now", "utcnow", "today", "localtime", "gmtime"}, path
        assert "time.time(" not in path.read_text("utf-8"), path


class Forgetful:
    """Blobs that lose the answer to each write."""

    def __init__(self, blobs: Blobs) -> None:
        self.url, self._blobs, self.sync, self.get, self.list = blobs.url, blobs, blobs.sync, blobs.get, blobs.list
        self._lost = False

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        self._blobs.put(key, data, create=create)
        if not self._lost:
            self._lost = True
            raise BlobError("no answer")


def test_a_claim_whose_answer_was_lost_is_known_as_ours(tmp_path: Path) -> None:
    lines = Lines(Forgetful(open_blobs(str(tmp_path))), Patience(9.0, Ticks(), never))  # type: ignore[arg-type]
    lines.claim(0, "mine")
    with pytest.raises(CutTaken, match="begun by writer mine"):
        lines.claim(0, "other")


def test_an_older_line_commits_nothing_and_a_place_without_lines_is_as_before(tmp_path: Path) -> None:
    space = space_in(tmp_path)
    attempt(space, "line-3-step-1", "w")
    space.lines.claim(4, "newer")
    with pytest.raises(CutTaken, match=r"line 4 in .* was begun by writer newer after line 3"):
        attempt(space, "line-3-step-2", "w")
    attempt(space, "line-4-step-2", "newer")
    assert space.names() == ["line-4-step-2", "line-3-step-1"]


def test_a_store_that_does_not_answer_ends_the_start_by_name(tiny_moe: Path, tmp_path: Path) -> None:
    (tmp_path / "cuts").mkdir()
    (tmp_path / "cuts" / "lines").write_text("in the way", encoding="utf-8")
    with pytest.raises(CheckpointError, match="cuts, where cuts are kept, does not answer"):
        run(recipe(tiny_moe, str(tmp_path / "cuts"), 2, deadline_s=0.3), tmp_path / "run")
