"""Cells: what a program finds, what is left of one for the next, and what becomes of a cell that dies or hangs."""

import ast
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from contraflow import config
from contraflow.errors import RewardError
from contraflow.rewards.base import Said, Transcript
from contraflow.rewards.code import CodePart
from contraflow.rewards.sandbox import pool, syscalls
from contraflow.rewards.sandbox.pool import Program, Sandbox
from contraflow.types import StopReason, Task

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's isolation")
SMALL = config.Sandbox(processes=2, cpu_s=1, wall_s=20.0, memory_mb=64)


@pytest.fixture(scope="module")
def sandbox():
    made = Sandbox(SMALL)
    yield made
    made.close()


def printed(sandbox, source, stdin=""):
    ran = sandbox.run(Program(source, stdin))
    assert ran.end == "done", ran.stderr
    return ran.stdout.decode()


def children():
    """Processes this one started and has not waited for."""
    return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()


def test_a_program_reads_writes_imports_and_starts_threads(sandbox):
    source = """
import decimal, json, sqlite3, sys, tempfile, threading
lines = sys.stdin.read().split()
with tempfile.TemporaryFile("w+") as file:
    file.write("kept"); file.seek(0); lines.append(file.read())
thread = threading.Thread(target=lines.append, args=["threaded"]); thread.start(); thread.join()
lines.append(str(sqlite3.connect(":memory:").execute("select 7").fetchone()[0]))
open("mine", "w").write("x"); lines.append(open("mine").read())
print(*lines)
"""
    assert printed(sandbox, source, "a b") == "a b kept threaded 7 x\n"


def test_it_ends_as_the_interpreter_would(sandbox):
    late = "import atexit, threading, time\natexit.register(print, 'b')\n"
    assert (
        printed(sandbox, late + "threading.Thread(target=lambda: (time.sleep(0.05), print('a'))).start()") == "a\nb\n"
    )
    assert sandbox.run(Program("import sys; print(1); sys.exit(1)")).end == "failed"
    assert printed(sandbox, "print(__name__, __builtins__ is not None)") == "__main__ True\n"
    ran = sandbox.run(Program("raise KeyError('why')"))
    assert (ran.end, ran.stderr.splitlines()[-1]) == ("failed", b"KeyError: 'why'")


def test_nothing_is_left_of_a_program_for_the_next(sandbox):
    source = "import os, math; print(sorted(os.listdir('.')), hasattr(math, 'mine')); open('mine', 'w'); math.mine = 1"
    assert {printed(sandbox, source) for _ in range(3)} == {"[] False\n"}


def test_the_same_program_ends_the_same(sandbox):
    assert (
        len(
            {
                printed(sandbox, "import random; print(list({'a', 'b', 'c', 'd'}), hash('x'), random.random())")
                for _ in range(3)
            }
        )
        == 1
    )


def test_processor_time_is_what_counts(sandbox):
    assert sandbox.run(Program("while True: pass")).end == "cpu"


def test_what_is_expected_is_nowhere_to_be_found(sandbox):
    nonce = secrets.token_hex(16)
    source = """
import gc, os, sys, threading
def look():
    seen = [str(vars(sys)), str(os.environ), str(sys.argv), str(threading.enumerate())]
    frame = sys._getframe()
    while frame:
        seen += [str(frame.f_locals), str(frame.f_globals)]
        frame = frame.f_back
    for thing in gc.get_objects():
        try: seen.append(str(thing))
        except BaseException: pass
    for number in range(64):
        try: seen.append(str(os.pread(number, 1 << 20, 0)))
        except OSError: pass
    mark = "".join(["expect", "ed="])
    return sorted({place[at:at + 41] for place in seen for at in [place.find(mark)] if at >= 0})
"""
    tests = f'[{{"assert": "assert look() == [\'expected={nonce}\']"}}]'
    task = Task(key="train/0", prompt="", reference="", facts={"tests": tests})
    assert CodePart(sandbox, share=False)(task, Transcript((Said("model", source),), StopReason.STOP)) == 0
    assert sandbox.run(Program(source, call="look()")).result == b'["[", "end"]'


def test_programs_run_side_by_side_in_so_many_cells_and_none_is_left(sandbox):
    own = Sandbox(SMALL)
    before = children()
    answers = {}

    def ask(n):
        answers[n] = printed(own, f"print({n} ** 2)")

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: f"{n * n}\n" for n in range(8)}
    assert len(own._idle) <= 2
    processes = [cell._process for cell in own._idle]
    own.close()
    assert all(process.returncode is not None for process in processes)
    assert children() == before
    with pytest.raises(RewardError, match="closed"):
        own.run(Program("print(1)"))


@pytest.mark.parametrize(("sign", "words"), [(signal.SIGKILL, "died|broke"), (signal.SIGSTOP, "was silent for")])
def test_a_cell_that_dies_or_hangs_costs_one_answer_and_is_replaced(sign, words, monkeypatch):
    monkeypatch.setattr(pool, "_GRACE_S", 1.0)
    own = Sandbox(SMALL.model_copy(update={"processes": 1}))
    try:
        assert printed(own, "print(1)") == "1\n"
        os.kill(own._idle[0]._process.pid, sign)
        with pytest.raises(RewardError, match=words):
            own.run(Program("print(2)"), wall_s=0.5)
        assert printed(own, "print(3)") == "3\n"
    finally:
        own.close()


def test_a_program_ends_with_its_cell():
    own = Sandbox(SMALL.model_copy(update={"processes": 1}))
    printed(own, "print(1)")
    cell = own._idle[0]

    def ask():
        with pytest.raises(RewardError):
            cell.run(Program("while True: pass"), 15.0)

    thread = threading.Thread(target=ask)
    thread.start()
    task = Path(f"/proc/{cell._process.pid}/task/{cell._process.pid}/children")
    while not (inner := task.read_text().split()):
        pass
    os.kill(cell._process.pid, signal.SIGKILL)
    handle = os.pidfd_open(int(inner[0])) if Path(f"/proc/{inner[0]}").exists() else None
    if handle is not None:
        assert select.select([handle], [], [], 5.0)[0], "the program outlived its cell"
        os.close(handle)
    thread.join()
    own.close()


OWNER = """
from contraflow import config
from contraflow.rewards.sandbox.pool import Program, Sandbox
sandbox = Sandbox(config.Sandbox(processes=1))
sandbox.run(Program(""))
print(sandbox._idle[0]._process.pid, flush=True)
sandbox.run(Program("while True: pass"))
"""


def test_a_cell_and_its_program_end_with_the_process_that_owns_them():
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        cell = os.pidfd_open(int(owner.stdout.readline()))
        owner.kill()
    assert select.select([cell], [], [], 10.0)[0], "the cell outlived its owner"
    os.close(cell)


REFUSE_UNSHARE = """
import platform, struct, sys
from contraflow import config
from contraflow.errors import ConfigError
from contraflow.rewards.sandbox import kernel
from contraflow.rewards.sandbox.pool import Program, Sandbox
kernel.process_control(kernel.PR_SET_NO_NEW_PRIVS, 1)
number = {"x86_64": 272, "aarch64": 97}[platform.machine()]
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
kernel.install_filter(b"".join(struct.pack("=HBBI", *rule) for rule in rules))
try:
    Sandbox(config.Sandbox()).run(Program("print(1)"))
except ConfigError as refusal:
    print(refusal)
"""


def test_isolation_that_cannot_be_had_is_refused_with_the_reason_and_never_weakened():
    command = [sys.executable, "-c", REFUSE_UNSHARE]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert "reward.sandbox.isolation = 'namespaces' cannot be had" in done.stdout, done.stderr
    assert "Operation not permitted" in done.stdout
    assert "docs/sandbox.md" in done.stdout


def test_what_is_in_force_is_said():
    assert Sandbox(SMALL).isolation.startswith("namespaces: own root")
    assert "Landlock" in Sandbox(SMALL.model_copy(update={"isolation": "filters"})).isolation


HEADERS = {"x86_64": "x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "asm-generic/unistd.h"}


@pytest.mark.parametrize("machine", syscalls.MACHINES)
def test_numbers_of_system_calls_are_those_of_the_kernels_headers(machine):
    header = Path("/usr/include") / HEADERS[machine]
    if not header.exists():
        pytest.skip(f"no {header}")
    text = header.read_text()
    named = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text))
    named |= {name: named.get(other, "") for name, other in re.findall(r"#define __NR_(\w+) __NR3264_(\w+)", text)}
    ours = syscalls.allowed(machine) | syscalls.judged(machine)
    assert {name: named.get(name) for name in ours} == {name: str(number) for name, number in ours.items()}
    assert not {"kill", "socket", "execve", "ptrace", "chmod", "mount", "fork", "setuid"} & set(ours)


def test_what_runs_in_a_cell_needs_the_standard_library_only():
    for path in Path(pool.__file__).parent.glob("*.py"):
        if path.name == "pool.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        strange = [name for name in names if name.split(".")[0] not in sys.stdlib_module_names]
        assert all(name.startswith("contraflow.rewards.sandbox") for name in strange), (path.name, strange)
