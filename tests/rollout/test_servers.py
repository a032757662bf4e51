"""Servers as processes: started, killed, started anew, and never left behind. And where versions are laid for them."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contraflow.config import Engine as EngineSection
from contraflow.config import Server as ServerSection
from contraflow.config import check_recipe
from contraflow.errors import CarrierError, ConfigError, ServerError
from contraflow.model.decoder import new_decoder
from contraflow.model.folder import load_folder
from contraflow.rollout.fleet import Server
from contraflow.rollout.http import HttpClient
from contraflow.rollout.open_served import PACKAGE, key_of, open_servers
from contraflow.rollout.release import Releases
from contraflow.rollout.served import ServedEngine
from contraflow.rollout.servers import Attached, Started
from contraflow.rollout.vllm import Vllm, command, environment
from contraflow.system import open_system
from contraflow.types import Request, Span, Version
from contraflow.weights.memory import sweep
from tests.rollout.served_lab import model_folder, served_section
from tests.rollout.test_served import CONFIG, release

V1, V2 = Version(1, 1), Version(1, 2)
SLEEP = (sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)")


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(body(), 60)

    asyncio.run(bounded())


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in found.read_text().split()] if found.exists() else []


def gone(pid: int, within_s: float = 10.0) -> bool:
    """Whether a process ends, by itself, in time."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def twin_process(folder: Path, place: Path) -> Started:
    url = f"unix:{place}/sock/s"
    words = (sys.executable, "-m", "contraflow.rollout.vllm_twin", str(folder), f"{place}/sock/s", "256")
    return Started(url, words, environment(os.environ, PACKAGE, ""), place / "logs/0.log", deadline_s=30.0)


@pytest.mark.slow
def test_a_server_that_is_killed_in_mid_generation_and_again_in_mid_refresh_comes_back_each_time(
    tmp_path: Path,
) -> None:
    async def body() -> None:
        folder = model_folder(CONFIG, tmp_path / "model")
        process = twin_process(folder, tmp_path)
        server = Server(Vllm(HttpClient(f"unix:{tmp_path}/sock/s", deadline_s=20.0)), process)
        section = served_section(routes=False)
        engine = ServedEngine([server], section, CONFIG, folder, clock=time.perf_counter, version=V1)
        request = Request(id="a", prompt=np.array([1, 2], np.int32), seed=3, max_new_tokens=100)
        calm = (await engine.generate(request)).tokens.tolist()

        async def kill() -> int:
            keeper = process._keeper
            assert keeper is not None
            (pid,) = children(keeper.pid)
            os.kill(pid, signal.SIGKILL)
            return pid

        flying = asyncio.create_task(engine.generate(request))
        while engine.report().tokens < 130:  # noqa: ASYNC110 - an engine says nothing between completions
            await asyncio.sleep(0)
        await kill()
        assert (await flying).tokens.tolist() == calm
        swap = asyncio.create_task(engine.swap(V2, *release(7)))
        while engine.report().doing != "swap":  # noqa: ASYNC110 - it says so nowhere else
            await asyncio.sleep(0)
        await kill()
        await swap
        assert (await engine.generate(request)).spans == (Span(V2, 0, 100),)
        assert engine.report().faults == {"unreachable": 2}
        keeper = process._keeper
        assert keeper is not None
        (pid,) = children(keeper.pid)
        await engine.close()
        assert gone(pid)
        assert not (tmp_path / "sock").exists()

    run(body)


@pytest.mark.parametrize("how", ["parent", "group"])
def test_a_server_dies_with_the_process_that_started_it_however_that_ends(how: str) -> None:
    keeper = subprocess.Popen(
        [sys.executable, "-m", "contraflow.rollout.keeper", *SLEEP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(os.environ, PACKAGE, ""),
    )
    assert keeper.stdout is not None
    assert keeper.stdin is not None
    assert keeper.stdout.readline() == b"here\n"
    (pid,) = children(keeper.pid)
    if how == "parent":
        keeper.stdin.close()  # what the kernel does for a parent that is killed
    else:
        keeper.terminate()  # what whoever ends a whole process group does
    assert gone(pid)
    assert keeper.wait(10) == 128 + signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_a_server_ends_when_its_keeper_is_killed() -> None:
    words = [sys.executable, "-m", "contraflow.rollout.keeper", *SLEEP]
    given = environment(os.environ, PACKAGE, "")
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=given) as keeper:
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == b"here\n"
        (pid,) = children(keeper.pid)
        keeper.kill()
        assert gone(pid)


def test_a_server_that_ends_before_it_answers_is_named_with_its_last_words(tmp_path: Path) -> None:
    async def body() -> None:
        words = (sys.executable, "-c", "raise SystemExit('no such model')")
        process = Started(f"unix:{tmp_path}/a/s", words, os.environ, tmp_path / "log", deadline_s=30.0)
        client = Vllm(HttpClient(f"unix:{tmp_path}/a/s"))
        with pytest.raises(ServerError, match=r"ended with status 1 before it answered.*no such model"):
            await process.start(client.alive)

    run(body)


def test_a_server_that_is_not_ready_in_time_is_ended_and_named(tmp_path: Path) -> None:
    async def body() -> None:
        process = Started(f"unix:{tmp_path}/a/s", SLEEP, os.environ, tmp_path / "log", deadline_s=0.5)
        with pytest.raises(ServerError, match=r"not ready within 0.5 s.*here") as caught:
            await process.start(Vllm(HttpClient(f"unix:{tmp_path}/a/s")).alive)
        assert caught.value.kind == "late"
        assert process._keeper is None
        with pytest.raises(ServerError, match=r"not ready within 0.2 s"):
            await Attached("unix:/none", deadline_s=0.2).start(Vllm(HttpClient("unix:/none")).alive)

    run(body)


def test_the_key_travels_by_environment_and_stands_in_no_command_line() -> None:
    section = EngineSection(
        kind="vllm",
        compute="bfloat16",
        server=ServerSection(python="py", arguments=("--enforce-eager",), key_env="KEY"),
    )
    assert key_of(section, {"KEY": "sesame"}) == "sesame"
    for bare in ({}, {"KEY": ""}):
        with pytest.raises(ConfigError, match="key_env = 'KEY'"):
            key_of(section, bare)
    words = command(section, Path("/m"), Path("/s"))
    assert words[:3] == ["py", "-m", "vllm.entrypoints.openai.api_server"]
    assert words[-2:] == ["--tokens-only", "--enforce-eager"]
    assert words[words.index("--dtype") + 1] == "bfloat16"
    assert words[words.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert "sesame" not in " ".join(words)
    given = environment({"PYTHONPATH": "/x", "KEY": "sesame"}, Path("/pkg"), "sesame")
    assert (given["PYTHONPATH"], given["VLLM_API_KEY"]) == ("/pkg:/x", "sesame")
    assert "VLLM_API_KEY" not in environment({}, Path("/pkg"), "")


@pytest.mark.parametrize("key", ["sesame\n", "ses ame", "sésame", "sesame\r\nX-Other: 1"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_repeated(key: str) -> None:
    section = EngineSection(kind="vllm", server=ServerSection(key_env="KEY"))
    with pytest.raises(ConfigError, match=r"key_env = 'KEY'.*printable ASCII") as fault:
        key_of(section, {"KEY": key})
    assert key[:3] not in str(fault.value)


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (
            {"server": {"python": "/no/such/python"}},
            "engine.server.python = '/no/such/python': there is no such program",
        ),
        ({"server": {"folder": "/no/such/folder"}}, "engine.server.folder = '/no/such/folder': not a folder"),
        ({"server": {"key_env": "NO_SUCH_KEY"}}, "engine.server.key_env = 'NO_SUCH_KEY'"),
        ({"context_tokens": 257}, "engine.context_tokens = 257: the model was made for 256"),
        ({"kind": "sglang"}, "SGLang servers are attached to, not started"),
    ],
)
def test_what_no_server_is_needed_to_know_is_refused_before_anything_is_started(
    tmp_path: Path, engine: dict[str, Any], says: str
) -> None:
    recipe = check_recipe({"engine": {"kind": "vllm", **engine}, "weights": {"refresh_deadline_s": 300.0}})

    async def body() -> None:
        async with open_system(recipe, tmp_path / "run", resume=False, clock=time.monotonic):
            raise AssertionError("it was started")

    with pytest.raises(ConfigError) as fault:
        asyncio.run(body())
    assert says in str(fault.value)
    assert not (tmp_path / "run").exists()


def test_a_server_that_cannot_be_started_for_want_of_room_is_named_and_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("a file where its folder should be")

    async def body() -> None:
        url = f"unix:{tmp_path}/a/s"
        process = Started(url, SLEEP, os.environ, tmp_path / "log" / "0.log", deadline_s=30.0)
        for _ in range(2):
            with pytest.raises(ServerError, match="cannot be started") as fault:
                await process.start(Vllm(HttpClient(url)).alive)
            assert fault.value.server == url
        assert not (tmp_path / "a").exists()

    run(body)


def test_each_address_and_each_count_is_a_server_of_its_own(tmp_path: Path) -> None:
    urls, folder = ("http://127.0.0.1:8000", "unix:/x"), model_folder(CONFIG, tmp_path / "model")
    attached = open_servers(
        EngineSection(kind="vllm", server=ServerSection(urls=urls)), folder, lambda i: tmp_path / str(i), {}
    )
    assert [server.dialect.url for server in attached] == list(urls)
    started = open_servers(
        EngineSection(kind="vllm", server=ServerSection(count=3)), folder, lambda i: tmp_path / str(i), {}
    )
    assert len({server.dialect.url for server in started}) == 3


def test_a_version_is_laid_out_as_a_folder_that_loads_to_the_same_weights(tmp_path: Path) -> None:
    releases = Releases(CONFIG, model_folder(CONFIG, tmp_path / "model"), tmp_path)
    tensors, _ = release(3)
    folder = releases.write(V1, tensors)
    read = load_folder(folder).state_dict()
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    later = releases.write(V2, tensors)
    releases.keep([later])
    assert (folder.exists(), later.exists()) == (False, True)
    releases.close()
    releases.close()
    assert not later.exists()


def test_a_version_in_half_precision_keeps_it_but_for_router_and_head(tmp_path: Path) -> None:
    decoder = new_decoder(CONFIG, seed=0, std=0.3)
    tensors = {
        name: tensor if "router" in name or name == "lm_head" else tensor.bfloat16()
        for name, tensor in decoder.state_dict().items()
    }
    releases = Releases(CONFIG, model_folder(CONFIG, tmp_path / "model"), tmp_path)
    read = load_folder(releases.write(V1, tensors)).state_dict()
    assert all(torch.equal(read[name], tensor.float()) for name, tensor in tensors.items())
    releases.close()


def test_the_folders_of_a_killed_engine_are_swept_and_those_of_a_living_one_are_not(tmp_path: Path) -> None:
    killed, alive = Releases(CONFIG, tmp_path, tmp_path), Releases(CONFIG, tmp_path, tmp_path)
    folders = [releases.write(V1, release(1)[0]).parent for releases in (killed, alive)]
    assert killed._lock is not None
    os.close(killed._lock)  # what the kernel does for a process that is killed
    sweep(tmp_path)
    assert [folder.exists() for folder in folders] == [False, True]
    alive.close()


def test_what_a_killed_engine_left_in_shared_memory_is_swept_by_the_next_whatever_carries_its_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("contraflow.weights.memory.SHARED", tmp_path)
    killed, later = Releases(CONFIG, tmp_path), Releases(CONFIG, tmp_path)
    left = killed.write(V1, release(1)[0]).parent
    assert killed._lock is not None
    os.close(killed._lock)
    mine = later.write(V1, release(1)[0])
    assert (left.exists(), mine.exists()) == (False, True)
    later.close()


def test_no_room_for_a_version_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    releases = Releases(CONFIG, tmp_path, blocked)
    with pytest.raises(CarrierError, match="file"):
        releases.write(V1, release(1)[0])
    releases.close()
