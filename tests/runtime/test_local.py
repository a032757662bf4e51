"""What only worker processes can show: signals, exit codes, orphans, threads, and a gang that really computes."""

import asyncio
import os
import re
import select
import signal
import stat
import subprocess
import sys
import time
import types
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from contraflow.errors import ChannelError, DeadlineExceeded, RemoteError, WorkerDied
from contraflow.runtime.base import Address
from contraflow.runtime.drill import Drill, make_drill
from contraflow.runtime.local import MAX_PATH, LocalRuntime
from contraflow.runtime.process import status_path
from contraflow.runtime.status import read_status

pytestmark = pytest.mark.usefixtures("fork_server")
Scene = Callable[[LocalRuntime], Awaitable[None]]


def play(scene: Scene, folder: Path, **options: float) -> None:
    async def whole() -> None:
        runtime = LocalRuntime(folder, **options)  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(60):
                await scene(runtime)
        finally:
            await runtime.close()

    asyncio.run(whole())


def list_folder(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def gone(process: int, within_s: float) -> bool:
    """Whether a process that is not a child of ours ends in time."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], within_s)[0])
    finally:
        os.close(handle)


def test_each_worker_is_a_process_of_its_own_with_its_threads(tmp_path: Path) -> None:
    async def scene(runtime: LocalRuntime) -> None:
        refs = [await runtime.start(f"w{i}", make_drill) for i in range(2)]
        processes = {await ref.call(5, Drill.process) for ref in refs}
        assert len(processes - {os.getpid()}) == 2
        assert [await ref.call(5, Drill.threads) for ref in refs] == [2, 2]

    play(scene, tmp_path, threads=2)


def test_workers_have_the_environment_of_their_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(runtime: LocalRuntime) -> None:
        await runtime.start("first", make_drill)
        monkeypatch.setenv("DRILL_WORD", "late")
        ref = await runtime.start("second", make_drill)
        assert await ref.call(5, Drill.variable, "DRILL_WORD") == "late"

    play(scene, tmp_path)


def test_sockets_lie_in_a_private_folder_that_goes_away(tmp_path: Path) -> None:
    async def scene(runtime: LocalRuntime) -> None:
        await runtime.start("drill", make_drill)
        (folder,) = list_folder(tmp_path)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert any(stat.S_ISSOCK(path.stat().st_mode) for path in list_folder(folder))
        runtime.kill("drill")
        await runtime.next_death()
        assert not list_folder(folder)

    play(scene, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_run_folder_with_a_long_path_works_too(tmp_path: Path) -> None:
    async def scene(runtime: LocalRuntime) -> None:
        ref = await runtime.start("drill", make_drill)
        assert len(ref.address.endpoint) <= MAX_PATH + 10
        assert await ref.call(5, Drill.add, 1) == 3

    play(scene, tmp_path / ("long" * 30))


# Ends


def test_the_exit_code_or_signal_of_a_death_is_told(tmp_path: Path) -> None:
    async def scene(runtime: LocalRuntime) -> None:
        ref = await runtime.start("leaver", make_drill)
        with pytest.raises(WorkerDied, match="'leaver' died: exit code 3; was running exit"):
            await ref.call(5, Drill.exit, 3)
        assert (await runtime.next_death()).worker == "leaver"
        ref = await runtime.start("victim", make_drill)
        os.kill(await ref.call(5, Drill.process), signal.SIGHUP)
        death = await runtime.next_death()
        assert (death.worker, death.detail) == ("victim", "SIGHUP; was idle")

    play(scene, tmp_path)


def test_an_exit_with_code_zero_that_nobody_asked_for_is_a_death(tmp_path: Path) -> None:
    async def scene(runtime: LocalRuntime) -> None:
        ref = await runtime.start("drill", make_drill)
        with pytest.raises(WorkerDied, match="exit code 0; was running exit"):
            await ref.call(5, Drill.exit, 0)
        assert (await runtime.next_death()).worker == "drill"

    play(scene, tmp_path)


def test_a_worker_ignores_ctrl_c(tmp_path: Path) -> None:
    async def scene(runtime: LocalRuntime) -> None:
        ref = await runtime.start("drill", make_drill)
        os.kill(await ref.call(5, Drill.process), signal.SIGINT)
        assert await ref.call(5, Drill.add, 1) == 3

    play(scene, tmp_path)


def test_a_blocked_worker_is_told_from_a_frozen_one_and_both_are_ended_by_force(tmp_path: Path) -> None:
    async def scene(runtime: LocalRuntime) -> None:
        busy, cold = [await runtime.start(name, make_drill) for name in ("busy", "cold")]
        processes = [await ref.call(5, Drill.process) for ref in (busy, cold)]
        blocked = asyncio.ensure_future(busy.call(60, Drill.block, 60))
        await asyncio.sleep(0.3)
        os.kill(processes[1], signal.SIGSTOP)
        calls = [ref.call(3, Drill.add, 1) for ref in (busy, cold)]
        causes = [getattr(late, "cause", "") for late in await asyncio.gather(*calls, return_exceptions=True)]
        assert re.fullmatch(r"busy\.add \(its event loop has been blocked for \d+ s; running: block\)", causes[0])
        assert re.fullmatch(r"cold\.add \(its process has not moved for \d+ s\)", causes[1])
        with pytest.raises(DeadlineExceeded, match=r"busy\.stop"):
            await runtime.close()
        assert all(gone(process, 0) for process in processes)
        with pytest.raises(WorkerDied, match="SIGKILL; was running block"):
            await blocked

    play(scene, tmp_path, stop_s=0.2)


def test_no_more_calls_than_allowed_are_in_a_worker_and_all_fail_with_it(tmp_path: Path) -> None:
    async def scene(runtime: LocalRuntime) -> None:
        ref = await runtime.start("drill", make_drill)
        calls = [asyncio.ensure_future(ref.call(60, Drill.wait, 60)) for _ in range(1500)]
        await is_full(ref.address)
        await asyncio.wait(calls, timeout=0.3)  # one too many would get in now
        runtime.kill("drill")
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert {str(outcome) for outcome in outcomes} == {"worker 'drill' died: SIGKILL; was running wait x1024"}

    async def is_full(address: Address) -> None:
        async with asyncio.timeout(30):
            while "wait x1024" not in running(address):  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.05)

    def running(address: Address) -> str:
        status = read_status(status_path(address.endpoint.removeprefix("ipc://")))
        return status.running if status else ""

    play(scene, tmp_path)


# Starts that fail


def test_a_start_past_its_deadline_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    async def warm(runtime: LocalRuntime) -> None:
        await runtime.start("warm", make_drill)

    async def scene(runtime: LocalRuntime) -> None:
        with pytest.raises(DeadlineExceeded, match=r"loop waited 1\.5 s for the start of worker 'drill'"):
            await runtime.start("drill", make_drill, block_s=30)
        ref = await runtime.start("drill", make_drill)
        assert await ref.call(5, Drill.add, 1) == 3

    play(warm, tmp_path)
    play(scene, tmp_path, start_s=1.5)


def test_a_death_or_a_cancel_in_the_factory_fails_the_start(tmp_path: Path) -> None:
    async def scene(runtime: LocalRuntime) -> None:
        await runtime.start("warm", make_drill)
        starting = asyncio.ensure_future(runtime.start("drill", make_drill, block_s=30))
        await asyncio.wait([starting], timeout=0.7)
        runtime.kill("drill")
        with pytest.raises(WorkerDied, match=r"'drill' died: .*SIGKILL; was running its factory"):
            await starting
        starting = asyncio.ensure_future(runtime.start("drill", make_drill, block_s=30))
        await asyncio.wait([starting], timeout=0.7)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        with pytest.raises(TimeoutError):  # neither was a surprise to the one who started it
            await asyncio.wait_for(runtime.next_death(), 0.2)
        await runtime.start("drill", make_drill)

    play(scene, tmp_path)


def test_closing_while_a_worker_is_started_leaves_nothing(tmp_path: Path) -> None:
    async def scene(runtime: LocalRuntime) -> None:
        await runtime.start("warm", make_drill)
        starting = [asyncio.ensure_future(runtime.start(f"w{i}", make_drill, block_s=i + 1)) for i in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(DeadlineExceeded, match=r"w\d\.stop"):
            await runtime.close()
        for outcome in await asyncio.gather(*starting, return_exceptions=True):
            assert isinstance(outcome, ChannelError | WorkerDied)

    play(scene, tmp_path, stop_s=0.3)


def test_a_start_cancelled_at_once_leaves_nothing(tmp_path: Path) -> None:
    async def scene(runtime: LocalRuntime) -> None:
        for turns in range(4):
            starting = asyncio.ensure_future(runtime.start("drill", make_drill))
            for _ in range(turns):
                await asyncio.sleep(0)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
        ref = await runtime.start("drill", make_drill)
        assert await ref.call(5, Drill.add, 1) == 3

    play(scene, tmp_path)


def test_a_factory_that_cannot_reach_another_process_is_refused(tmp_path: Path) -> None:
    async def scene(runtime: LocalRuntime) -> None:
        with pytest.raises(ChannelError, match="cannot send the factory of 'drill'"):
            await runtime.start("drill", lambda host: object())
        hidden = types.ModuleType("only_here")
        exec("def make(host): pass", vars(hidden))
        sys.modules["only_here"] = hidden
        with pytest.raises(RemoteError, match="No module named 'only_here'"):
            await runtime.start("drill", hidden.make)
        del sys.modules["only_here"]

    play(scene, tmp_path)


# Gangs


def test_two_ranks_reduce_a_number_together(tmp_path: Path) -> None:
    async def scene(runtime: LocalRuntime) -> None:
        for _ in range(2):  # a second gang meets at a place of its own
            gang = await runtime.start_gang("ranks", 2, make_drill)
            assert await gang.call(30, Drill.sum, 1.5) == [3.0, 3.0]
            await runtime.stop("ranks")

    play(scene, tmp_path)


def test_a_rank_that_dies_in_a_collective_is_named_and_the_others_are_gone(tmp_path: Path) -> None:
    async def scene(runtime: LocalRuntime) -> None:
        gang = await runtime.start_gang("ranks", 2, make_drill)
        processes = await gang.call(5, Drill.process)
        await gang.call(30, Drill.sum, 1.0)
        begin = time.monotonic()
        with pytest.raises(WorkerDied, match="'ranks-1' died: exit code 7; was running exit_on"):
            await gang.call(30, Drill.exit_on, 1)
        assert (await runtime.next_death()).worker == "ranks-1"
        assert time.monotonic() - begin < 2
        assert all(gone(process, 2) for process in processes)

    play(scene, tmp_path)


# The runtime's own end


SCRIPT = """
import asyncio, multiprocessing.forkserver, os, signal, sys
from pathlib import Path
from contraflow.errors import ChannelError
from contraflow.runtime.drill import Drill, make_drill
from contraflow.runtime.local import LocalRuntime

async def main(folder, what):
    runtime = LocalRuntime(folder)
    try:
        ref = await runtime.start("one", make_drill, marker=str(folder / "one"))
        busy = await runtime.start("two", make_drill)
        ids = [await r.call(5, Drill.process) for r in (ref, busy)]
        server = multiprocessing.forkserver._forkserver._forkserver_pid
        print(*ids, server, flush=True)
        if what == "block":  # one of the two
            await busy.call(60, Drill.block, 60)
        if what == "server":
            os.kill(server, signal.SIGKILL)
            print(*sorted([(await runtime.next_death()).worker for _ in ids]), flush=True)
            try:
                again = await runtime.start("one", make_drill)
            except ChannelError:  # multiprocessing had not noticed yet
                again = await runtime.start("one", make_drill)
            print(await again.call(5, Drill.add, 1), flush=True)
        await asyncio.sleep(60)
    finally:
        await runtime.close()

if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
"""


def launch(folder: Path, what: str) -> tuple[subprocess.Popen[str], list[int]]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(folder), what]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout
    return process, [int(number) for number in process.stdout.readline().split()]


def test_workers_idle_or_blocked_leave_by_themselves_when_their_runtime_is_killed(tmp_path: Path) -> None:
    process, ids = launch(tmp_path, "block")
    process.kill()
    process.communicate()
    assert len(ids) == 3
    assert all(gone(worker, 6) for worker in ids)
    assert (tmp_path / "one").read_text() == "one"  # it still closed itself


def test_ctrl_c_stops_workers_in_order(tmp_path: Path) -> None:
    process, ids = launch(tmp_path, "idle")
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=20)
    assert all(gone(worker, 1) for worker in ids)
    assert (tmp_path / "one").read_text() == "one"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".workers")]


def test_losing_the_fork_server_ends_its_workers_and_a_new_start_works(tmp_path: Path) -> None:
    process, ids = launch(tmp_path, "server")
    assert process.stdout
    assert process.stdout.readline().split() == ["one", "two"]
    assert all(gone(worker, 6) for worker in ids)
    assert process.stdout.readline().strip() == "3"
    process.kill()
    process.communicate()
