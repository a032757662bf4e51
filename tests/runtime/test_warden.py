"""A warden over real processes of this machine: ends with what was last done, in order, once each."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from contraflow.runtime.process import stack_path, status_path
from contraflow.runtime.status import StatusPage
from contraflow.runtime.warden import Warden

STACKED = """
import faulthandler, signal, sys, time
faulthandler.register(signal.SIGUSR1, file=open(sys.argv[1], "a"), all_threads=True)
print("ready", flush=True)
def waits(): time.sleep(60)
waits()
"""


def play(folder: Path, scene: Callable[[Warden], Awaitable[None]]) -> None:
    async def whole() -> None:
        warden = Warden(folder)
        async with asyncio.timeout(30):
            await scene(warden)
        await warden.close()

    folder.mkdir()
    asyncio.run(whole())
    assert not folder.exists()


def sleeper(folder: Path, number: int, doing: str) -> tuple["subprocess.Popen[str]", str]:
    """A process, with the page that a worker of this number would write."""
    files = f"{folder}/{number}"
    page = StatusPage(status_path(files), time.monotonic())
    page.running(doing)
    command = [sys.executable, "-c", STACKED, str(stack_path(files))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process, files


def test_ends_come_at_once_with_what_was_done_and_are_asked_for_again_without_harm(tmp_path: Path) -> None:
    folder = tmp_path / "files"

    async def scene(warden: Warden) -> None:
        first, files_1 = sleeper(folder, 1, "step")
        second, files_2 = sleeper(folder, 2, "")
        await warden.watch(1, first.pid, files_1)
        await warden.watch(2, second.pid, files_2)
        assert {number: status.running for number, status in (await warden.look()).items()} == {1: "step", 2: ""}
        assert await warden.ends(0, 0.05) == []
        waiting = asyncio.ensure_future(warden.ends(0, 20))
        await warden.kill(1)
        (end,) = await waiting
        assert (end.number, end.last and end.last.running) == (1, "step")
        assert await warden.ends(0, 20) == [end]  # an answer that was lost on the way
        second.send_signal(signal.SIGTERM)
        assert [end.number for end in await warden.ends(1, 20)] == [2]
        assert await warden.look() == {}
        await warden.kill(1)  # gone already
        first.wait()
        second.wait()
        await warden.watch(3, first.pid, f"{folder}/3")  # that was gone before it could be watched
        assert [(end.number, end.last) for end in await warden.ends(2, 1)] == [(3, None)]

    play(folder, scene)


def test_stacks_are_had_of_those_that_can_give_them_and_why_not_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "files"

    async def scene(warden: Warden) -> None:
        made = [sleeper(folder, number, "") for number in (1, 2)]
        for number, (process, files) in enumerate(made, 1):
            await warden.watch(number, process.pid, files)
        made[1][0].send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.1)
        stacks = await warden.stacks([1, 2, 7])
        assert set(stacks) == {1, 2}
        assert "in waits" in stacks[1].text
        assert (stacks[2].text, stacks[2].why) == ("", "it is stopped by a signal, so its stack cannot be had")
        for process, _ in made:
            process.kill()
            process.wait()

    play(folder, scene)


def test_a_warden_tells_what_its_machine_has(tmp_path: Path) -> None:
    async def scene(warden: Warden) -> None:
        await warden.make_folder(str(tmp_path / "a" / "b"))
        assert await warden.sees(str(tmp_path / "a" / "b"))
        assert not await warden.sees(str(tmp_path / "a" / "c"))

    play(tmp_path / "files", scene)
