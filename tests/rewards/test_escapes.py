"""The sandbox holds: every attempt is refused from inside, is no danger outside, and is scored as what it is."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from contraflow import config
from contraflow.errors import ConfigError
from contraflow.rewards.base import Said, Transcript
from contraflow.rewards.code import CodePart
from contraflow.rewards.sandbox import pool
from contraflow.rewards.sandbox.pool import Program, Sandbox
from contraflow.types import StopReason, Task
from tests.rewards.escapes import ATTEMPTS, CHEATS, PREAMBLE, Attempt, Cheat

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="numbers of x86-64 Linux"
)
SQUARE = Task(key="train/0", prompt="", reference="", facts={"tests": '[{"assert": "assert square(7) == 49"}]'})
LIMITS = config.Sandbox(processes=1, cpu_s=1, wall_s=2, memory_mb=64, file_kb=512)
SANDBOX = sorted(Path(pool.__file__).parent.glob("*.py"))


def status(key):
    """A line of what the kernel says of this process; empty where it says nothing."""
    page = Path("/proc/self/status")
    lines = page.read_text().splitlines() if page.exists() else []
    return next((line.split()[1] for line in lines if line.startswith(f"{key}:")), "")


MASTER = os.geteuid() == 0 and bool(int(status("CapEff") or "0", 16) >> 21 & 1)  # root with CAP_SYS_ADMIN


def said(source):
    return Transcript((Said("model", source),), StopReason.STOP)


@pytest.fixture(scope="module", params=["namespaces", "filters"])
def sandbox(request):
    made = Sandbox(LIMITS.model_copy(update={"isolation": request.param}))
    try:
        made.run(Program("import decimal"))
    except ConfigError as refusal:
        pytest.skip(f"{refusal}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory):
    """What attempts aim at: a file, a server, this process."""
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret").write_text("secret")
    (outside / "secret").chmod(0o666)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield {"outside": outside, "judge": os.getpid(), "port": server.getsockname()[1], "server": server}


def program(attempt, surroundings):
    body = attempt.body.format(**{name: surroundings[name] for name in ("outside", "judge", "port")})
    return PREAMBLE.replace("BODY", body)


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.name.replace(" ", "-"))
def test_what_is_not_allowed_is_refused_and_the_program_scored_for_its_answer(
    sandbox, attempt: Attempt, surroundings, monkeypatch
):
    monkeypatch.setenv("JUDGE_SECRET", "secret")
    source = program(attempt, surroundings)
    ran = sandbox.run(Program(source))
    filters = sandbox.section.isolation == "filters"
    scratch = r"|^PermissionError|^FileNotFoundError" if filters else ""  # filters leave no place to write to
    assert re.search(attempt.refused + scratch, ran.stdout.decode()), (ran.stdout, ran.stderr)
    assert CodePart(sandbox, share=False)(SQUARE, said(source)) == 1
    outside = surroundings["outside"]
    assert {entry.name: entry.read_text() for entry in outside.iterdir()} == {"secret": "secret"}
    with pytest.raises(BlockingIOError):
        surroundings["server"].accept()


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda cheat: cheat.name.replace(" ", "-"))
def test_a_cheat_earns_nothing_and_the_next_program_does(sandbox, cheat: Cheat):
    ran = sandbox.run(Program(cheat.source, call="square(7)"))
    assert (ran.end == "done") == cheat.ends, (ran.end, ran.stdout[:99], ran.stderr[-999:])
    part = CodePart(sandbox, share=False)
    assert part(SQUARE, said(cheat.source)) == 0
    assert part(SQUARE, said("def square(x): return x * x")) == 1


@pytest.mark.slow
@pytest.mark.skipif(status("Seccomp") != "0", reason="this machine refuses calls to everybody")
@pytest.mark.parametrize("attempt", [one for one in ATTEMPTS if one.bare], ids=lambda one: one.name.replace(" ", "-"))
def test_outside_of_the_sandbox_the_same_attempt_gets_through(attempt: Attempt, surroundings, tmp_path, monkeypatch):
    if attempt.bare == "root" and not MASTER:
        pytest.skip("only root gets through")
    monkeypatch.setenv("JUDGE_SECRET", "secret")
    aims = {**surroundings, "outside": tmp_path}  # a victim of its own, on the file system the attempt starts from
    (tmp_path / "secret").write_text("secret")
    signal.signal(signal.SIGURG, signal.SIG_IGN)
    command = [sys.executable, "-s", "-S", "-P", "-c", program(attempt, aims)]
    run = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 30, "start_new_session": True}
    done = subprocess.run(command, check=False, **run)
    assert done.stdout, done.stderr
    assert not re.search(attempt.refused, done.stdout)


NO_FILTER = ("confine.py", "    kernel.install_filter(", "    (lambda _: None)(")
NO_ROOM = ("cell.py", "room.enter(limits.folders)", "pass")
NO_PLACE = ("confine.py", "        _mount_scratch(limits, user)", "        pass")  # there is none without a room
NO_USER = ("confine.py", "return None if os.geteuid() else", "return None if True else")
NO_LIMITS = ("confine.py", "        resource.setrlimit(", "        (lambda *_: None)(")
NO_CLOSING = ("cell.py", "        os.closerange(", "        (lambda *_: None)(")
NO_SCRATCH = ("confine.py", "nr_inodes={_SCRATCH_FILES},", "")


@pytest.mark.skipif(not MASTER, reason="without namespaces an ordinary user's cell would lack what is switched off")
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("forks", [NO_FILTER]),
        pytest.param("opens an internet socket", [NO_FILTER], marks=pytest.mark.slow),
        pytest.param("opens a netlink socket", [NO_FILTER], marks=pytest.mark.slow),
        pytest.param("unshares a user namespace", [NO_FILTER], marks=pytest.mark.slow),
        pytest.param("shares memory by System V", [NO_FILTER], marks=pytest.mark.slow),
        pytest.param("makes a program of memory", [NO_FILTER], marks=pytest.mark.slow),
        pytest.param("is traced", [NO_FILTER], marks=pytest.mark.slow),
        pytest.param("makes a setuid file", [NO_FILTER], marks=pytest.mark.slow),
        pytest.param("reads /etc/passwd", [NO_ROOM, NO_PLACE, NO_USER], marks=pytest.mark.slow),
        pytest.param("lists home folders", [NO_ROOM, NO_PLACE, NO_USER], marks=pytest.mark.slow),
        ("connects to a server", [NO_ROOM, NO_PLACE, NO_USER, NO_FILTER]),
        pytest.param("maps memory", [NO_LIMITS], marks=pytest.mark.slow),
        ("makes a huge file of nothing", [NO_LIMITS]),
        ("uses inherited descriptors", [NO_CLOSING]),
        pytest.param("makes files without end", [NO_SCRATCH], marks=pytest.mark.slow),
    ],
)
def test_an_attempt_gets_through_once_the_part_that_stops_it_is_off(name, parts, surroundings, tmp_path, monkeypatch):
    for file in ("__init__.py", "rewards/__init__.py", *(f"rewards/sandbox/{path.name}" for path in SANDBOX)):
        copy = tmp_path / "contraflow" / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((SANDBOX[0].parents[2] / file).read_text())
    for file, old, new in parts:
        path = tmp_path / "contraflow/rewards/sandbox" / file
        assert path.read_text().count(old) == 1
        path.write_text(path.read_text().replace(old, new))
    monkeypatch.setattr(pool, "_ROOT", tmp_path)
    attempt = next(one for one in ATTEMPTS if one.name == name)
    weak = Sandbox(LIMITS.model_copy(update={"cpu_s": 5, "wall_s": 20.0}))
    try:
        ran = weak.run(Program(program(attempt, surroundings)))
    finally:
        weak.close()
    assert ran.stdout, ran.stderr
    assert not re.search(attempt.refused, ran.stdout.decode())
    if name == "connects to a server":
        surroundings["server"].accept()[0].close()
