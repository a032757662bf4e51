"""What only a cluster can show: other machines, a head that goes, tokens, and that nothing is left behind."""

import asyncio
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import zmq

from contraflow.errors import ClusterError, DeadlineExceeded, WorkerDied
from contraflow.runtime.channel import Caller
from contraflow.runtime.drill import Drill, make_drill
from contraflow.runtime.remote import RemoteRuntime
from contraflow.runtime.seal import new_key
from tests.ray_head import Head, needs_ray

pytestmark = [pytest.mark.ray, needs_ray, pytest.mark.timeout(300)]

Scene = Callable[[RemoteRuntime], Awaitable[None]]


def play(scene: Scene, folder: Path, head: Head, **options: float) -> None:
    from contraflow.runtime.ray import RayCluster

    async def whole() -> None:
        runtime = RemoteRuntime(RayCluster(head.address), folder, **options)  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(150):
                await scene(runtime)
        finally:
            await runtime.close()

    asyncio.run(whole())


@pytest.fixture
def head(ray_head: Head, monkeypatch: pytest.MonkeyPatch) -> Head:
    ray_head.point(monkeypatch)
    return ray_head


@pytest.fixture
def own_head(monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    """A head that a test may kill; it does not let workers live on it."""
    mine = Head(cpus=0)
    try:
        mine.until_ready().point(monkeypatch)
        yield mine
    finally:
        mine.close()


@pytest.fixture
def machine(own_head: Head) -> Iterator[Head]:
    """One more machine of that head, for the trainer's pool and others."""
    mine = Head(join=own_head, resources='{"contraflow_train": 2, "contraflow_rollout": 2}')
    try:
        yield mine.until_ready()
    finally:
        mine.close()


def gone(process: int, within_s: float) -> bool:
    """Whether a process ends in time."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], within_s)[0])
    finally:
        os.close(handle)


def folders() -> set[Path]:
    return set(Path("/tmp").glob("contraflow-*"))


def test_workers_are_processes_with_sealed_ports_and_nothing_is_left_of_them(tmp_path: Path, head: Head) -> None:
    before, processes = folders(), set[int]()

    async def scene(runtime: RemoteRuntime) -> None:
        refs = [await runtime.start(f"w{i}", make_drill, marker=str(tmp_path / f"w{i}")) for i in range(2)]
        processes.update([await ref.call(5, Drill.process) for ref in refs])
        assert len(processes - {os.getpid()}) == 2
        assert await refs[0].call(5, Drill.threads) == 2
        for ref in refs:
            assert re.fullmatch(r"tcp://[\d.]+:\d+#[0-9a-f]{64}", ref.address.endpoint)
        assert await refs[0].call(5, Drill.relay_add, refs[1].address, 40) == 42
        assert len(folders() - before) == 1  # of the machine's warden

    play(scene, tmp_path, head, threads=2)
    assert all(gone(process, 5) for process in processes)
    assert [(tmp_path / name).read_text() for name in ("w0", "w1")] == ["w0", "w1"]
    assert folders() == before


def test_a_stranger_on_the_network_can_call_no_worker(tmp_path: Path, head: Head) -> None:
    async def scene(runtime: RemoteRuntime) -> None:
        ref = await runtime.start("drill", make_drill)
        context = zmq.Context()
        stranger = Caller(context, owner="stranger", identity="stranger", trouble=lambda a: "", key=new_key())
        with pytest.raises((DeadlineExceeded, WorkerDied)):
            await stranger.connect(ref.address).call(1.5, Drill.exit, 3)
        stranger.close()
        context.destroy(linger=0)
        assert await ref.call(5, Drill.add, 1) == 3

    play(scene, tmp_path, head)


def test_a_worker_killed_from_outside_is_named_in_time_with_what_it_did_and_can_start_again(
    tmp_path: Path, head: Head
) -> None:
    async def scene(runtime: RemoteRuntime) -> None:
        ref = await runtime.start("drill", make_drill)
        process = await ref.call(5, Drill.process)
        call = asyncio.ensure_future(ref.call(60, Drill.wait, 60))
        await asyncio.sleep(0.2)
        began = time.monotonic()
        os.kill(process, signal.SIGKILL)
        death = await runtime.next_death()
        assert time.monotonic() - began < 2
        assert (death.worker, death.detail) == ("drill", "its process ended; was running wait")
        with pytest.raises(WorkerDied, match="was running wait"):
            await call
        again = await runtime.start("drill", make_drill)
        assert await again.call(5, Drill.add, 1) == 3
        with pytest.raises(WorkerDied, match="its process ended; was running exit"):
            await again.call(5, Drill.exit, 0)

    play(scene, tmp_path, head)


def test_a_hung_worker_is_killed_its_stacks_are_kept_here_and_a_notice_is_passed_on(tmp_path: Path, head: Head) -> None:
    async def scene(runtime: RemoteRuntime) -> None:
        leaver, busy = [await runtime.start(name, make_drill) for name in ("leaver", "busy")]
        os.kill(await leaver.call(5, Drill.process), signal.SIGTERM)
        assert await runtime.next_notice() == "leaver"
        with pytest.raises(WorkerDied, match="'busy' died: hung: its event loop has been blocked for 3 s; was running"):
            await busy.call(50, Drill.block, 50)
        (path,) = (tmp_path / "stacks").iterdir()
        assert (await runtime.next_death()).detail.endswith(f"was running block; its stacks: {path}")
        assert "in block" in path.read_text(encoding="utf-8")
        assert await leaver.call(5, Drill.add, 1) == 3
        assert [path.name.partition("-")[0] for path in await runtime.stacks("leaver")] == ["leaver"]

    play(scene, tmp_path, head, hang_s=3.0)


def test_two_ranks_reduce_a_number_over_tcp_and_one_death_ends_both(tmp_path: Path, head: Head) -> None:
    async def scene(runtime: RemoteRuntime) -> None:
        gang = await runtime.start_gang("ranks", 2, make_drill)
        processes = await gang.call(5, Drill.process)
        assert await gang.call(60, Drill.sum, 1.5) == [3.0, 3.0]
        began = time.monotonic()
        with pytest.raises(WorkerDied, match="'ranks-1' died: its process ended; was running exit_on"):
            await gang.call(30, Drill.exit_on, 1)
        assert (await runtime.next_death()).worker == "ranks-1"
        assert time.monotonic() - began < 2
        assert all(gone(process, 2) for process in processes)

    play(scene, tmp_path, head)


def test_workers_live_in_their_pool_gangs_all_or_nothing(tmp_path: Path, own_head: Head, machine: Head) -> None:
    async def scene(runtime: RemoteRuntime) -> None:
        gang = await runtime.start_gang("trainer", 2, make_drill)
        for process in await gang.call(5, Drill.process):
            assert os.getsid(process) in {os.getsid(member) for member in machine.members("raylet")}
        with pytest.raises(ClusterError, match=r"no machine of the cluster has \{'contraflow_train': 1.0\} free"):
            await runtime.start("trainer-9", make_drill)
        with pytest.raises(ClusterError, match=r"no place for 3 workers of 'rollout-0'.* has room for 2"):
            await runtime.start_gang("rollout-0", 3, make_drill)
        await runtime.stop("trainer")
        again = await runtime.start_gang("trainer", 2, make_drill)  # its places were given back
        assert await again.call(5, Drill.rank) == [0, 1]

    play(scene, tmp_path, own_head, start_s=30.0)


def test_a_machine_whose_raylet_is_killed_is_lost_with_its_workers_and_no_other(
    tmp_path: Path, own_head: Head, machine: Head
) -> None:
    other = Head(join=own_head, resources='{"contraflow_buffer": 1}')

    async def scene(runtime: RemoteRuntime) -> None:
        kept = await runtime.start("buffer", make_drill)
        refs = [await runtime.start(f"rollout-{n}", make_drill) for n in range(2)]
        processes = [await ref.call(5, Drill.process) for ref in refs]
        call = asyncio.ensure_future(refs[0].call(60, Drill.wait, 60))
        await asyncio.sleep(0.2)
        began = time.monotonic()
        machine.kill("raylet")
        deaths = [await runtime.next_death() for _ in refs]
        took = time.monotonic() - began
        assert {death.worker for death in deaths} == {"rollout-0", "rollout-1"}
        with pytest.raises(WorkerDied):
            await call
        assert all(gone(process, 5) for process in processes)
        assert took < 6  # the warden closes first, which takes its workers' time to leave in order
        assert await kept.call(5, Drill.add, 1) == 3

    try:
        other.until_ready()
        play(scene, tmp_path, own_head)
    finally:
        other.close()


def test_a_head_that_goes_is_a_typed_error_in_time_and_workers_still_close(
    tmp_path: Path, own_head: Head, machine: Head
) -> None:
    async def scene(runtime: RemoteRuntime) -> None:
        ref = await runtime.start("rollout-0", make_drill, marker=str(tmp_path / "closed"))
        own_head.kill("gcs_server")
        began = time.monotonic()
        with pytest.raises(ClusterError, match=r"the cluster's head at [\d.]+:\d+ is gone.*resume"):
            await runtime.next_death()
        assert time.monotonic() - began < 3
        assert await ref.call(5, Drill.add, 1) == 3  # calls do not go through Ray

    play(scene, tmp_path, own_head)
    assert (tmp_path / "closed").read_text() == "rollout-0"


SCRIPT = """
import asyncio, sys
from pathlib import Path
from contraflow.errors import ContraflowError
from contraflow.runtime.drill import Drill, make_drill
from contraflow.runtime import open_runtime

class Section:
    kind, threads, hang_s = "ray", 1, 60.0

async def main(folder):
    runtime = open_runtime(Section, folder)
    try:
        ref = await runtime.start("one", make_drill, marker=str(folder / "one"))
        print(await ref.call(5, Drill.process), flush=True)
        await asyncio.sleep(60)
    except ContraflowError as fault:
        print(type(fault).__name__, fault, flush=True)
    finally:
        await runtime.close()

if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
"""


def launch(folder: Path, environment: dict[str, str]) -> "subprocess.Popen[str]":
    script = folder / "script.py"
    script.write_text(SCRIPT)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_A")}
    return subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env=clean | environment,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"RAY_AUTH_TOKEN": "another-token-0123456789-0123456789"}, "is RAY_AUTH_TOKEN the token of its head?"),
        ({"RAY_AUTH_MODE": ""}, "without tokens anybody who reaches"),
        ({"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": ""}, "could run code by the Ray of this run; leave it out"),
        ({"RAY_ADDRESS": "127.0.0.1:9"}, "nobody listens there; start the head, or correct the address"),
        ({"RAY_ADDRESS": "ray://127.0.0.1:10001"}, "write HOST:PORT of the head"),
    ],
    ids=["wrong token", "no tokens", "no tokens here", "no head", "client"],
)
def test_a_cluster_that_cannot_be_joined_is_refused_by_name(
    tmp_path: Path, ray_head: Head, change: dict[str, str], said: str
) -> None:
    process = launch(tmp_path, ray_head.environment | change)
    told = process.communicate(timeout=120)[0]
    assert told.startswith("ClusterError "), told
    assert said in told


def test_workers_leave_by_themselves_when_the_process_that_started_them_is_killed(
    tmp_path: Path, ray_head: Head
) -> None:
    before = folders()
    process = launch(tmp_path, ray_head.environment)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    process.kill()
    process.communicate()
    assert gone(worker, 15)
    assert len(folders() - before) <= 1


def test_a_run_without_an_address_has_a_ray_of_its_own_with_tokens_that_goes_with_it(tmp_path: Path) -> None:
    process = launch(tmp_path, {})
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    environment = dict(
        line.partition("=")[::2] for line in Path(f"/proc/{worker}/environ").read_text().split("\0") if "=" in line
    )
    assert environment["RAY_AUTH_MODE"] == "token"
    assert len(environment["RAY_AUTH_TOKEN"]) == 64
    assert os.getpriority(os.PRIO_PROCESS, worker) == os.getpriority(os.PRIO_PROCESS, 0)  # Ray's own would be 15 more
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert gone(worker, 5)
    assert (tmp_path / "one").read_text() == "one"
