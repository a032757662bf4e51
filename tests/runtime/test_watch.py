"""The watchdog: who counts as hung is a matter of beats that do not change while the watcher itself was awake."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contraflow.errors import WorkerDied
from contraflow.runtime.drill import Drill, make_drill
from contraflow.runtime.local import LocalRuntime
from contraflow.runtime.status import Status
from contraflow.runtime.watch import LOOK_S, Patient, Pulse, keep_stacks

pytestmark = pytest.mark.usefixtures("fork_server")
HANG_S = 3.0


@given(st.lists(st.tuples(st.floats(0, 1e4), st.booleans()), max_size=50))
def test_a_pulse_is_stale_for_as_long_as_it_was_watched_without_a_beat(looks: list[tuple[float, bool]]) -> None:
    pulse, now, beat, stale = Pulse(), 0.0, 0.0, 0.0
    pulse.look(now, beat)
    for passed, beats in looks:
        now, beat = now + passed, beat + beats
        stale = 0.0 if beats else stale + min(passed, 2 * LOOK_S)
        assert pulse.look(now, beat) == pytest.approx(stale, abs=1e-6)


def test_a_watcher_that_was_itself_stopped_finds_nobody_hung() -> None:
    patient = Patient()
    status = Status(5.0, 5.0, "step")
    assert patient.look(10.0, status, HANG_S) == ""
    assert patient.look(3600.0, status, HANG_S) == ""


def test_a_blocked_loop_is_told_from_a_process_that_does_not_move() -> None:
    for beats, says in ((True, "its event loop has been blocked"), (False, "its process has not moved")):
        patient, told = Patient(), ""
        for look in range(40):
            now = look * LOOK_S
            told = told or patient.look(now, Status(now if beats else 0.0, 0.0, "step, report"), HANG_S)
        assert told == f"hung: {says} for 3 s; was running step, report"


def test_stacks_that_were_not_written_are_not_kept(tmp_path: Path) -> None:
    assert not keep_stacks(tmp_path / "absent", tmp_path / "kept")
    (tmp_path / "empty").touch()
    assert not keep_stacks(tmp_path / "empty", tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def play(scene: Callable[[LocalRuntime], Awaitable[None]], folder: Path) -> None:
    async def whole() -> None:
        runtime = LocalRuntime(folder, hang_s=HANG_S)
        try:
            async with asyncio.timeout(60):
                await scene(runtime)
        finally:
            await runtime.close()

    asyncio.run(whole())


def test_a_hung_worker_is_killed_in_time_and_named_with_what_it_did_and_its_stack(tmp_path: Path) -> None:
    async def scene(runtime: LocalRuntime) -> None:
        await runtime.start("idle", make_drill)
        ref = await runtime.start("busy", make_drill)
        began = time.monotonic()
        with pytest.raises(WorkerDied, match="'busy' died: hung: its event loop has been blocked for 3 s; was running"):
            await ref.call(50, Drill.block, 50)
        assert time.monotonic() - began <= HANG_S + 5
        death = await runtime.next_death()
        assert death.worker == "busy"
        (path,) = (tmp_path / "stacks").iterdir()
        assert death.detail.endswith(f"was running block; its stacks: {path}")
        assert "in block" in path.read_text(encoding="utf-8")

    play(scene, tmp_path)


def test_a_stopped_worker_is_killed_in_time_and_it_is_said_why_it_has_no_stack(tmp_path: Path) -> None:
    async def scene(runtime: LocalRuntime) -> None:
        ref = await runtime.start("cold", make_drill)
        os.kill(await ref.call(5, Drill.process), signal.SIGSTOP)
        began = time.monotonic()
        death = await runtime.next_death()
        assert time.monotonic() - began <= HANG_S + 5
        assert death.detail.startswith("hung: its process has not moved for 3 s; was idle; its stacks: it is stopped")
        assert not (tmp_path / "stacks").exists()

    play(scene, tmp_path)


def test_a_worker_told_to_leave_is_a_notice_once_and_goes_on_working(tmp_path: Path) -> None:
    async def scene(runtime: LocalRuntime) -> None:
        ref = await runtime.start("leaver", make_drill)
        for _ in range(2):
            os.kill(await ref.call(5, Drill.process), signal.SIGTERM)
        assert await runtime.next_notice() == "leaver"
        assert await ref.call(5, Drill.add, 1) == 3
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(runtime.next_notice(), 3 * LOOK_S)

    play(scene, tmp_path)


def test_stacks_of_all_workers_can_be_had_while_they_work(tmp_path: Path) -> None:
    async def scene(runtime: LocalRuntime) -> None:
        refs = [await runtime.start(name, make_drill) for name in ("one", "two")]
        paths = await runtime.stacks()
        assert sorted(path.name.partition("-")[0] for path in paths) == ["one", "two"]
        assert all("Thread" in path.read_text(encoding="utf-8") for path in paths)
        assert [await ref.call(5, Drill.add, 1) for ref in refs] == [3, 3]

    play(scene, tmp_path)
