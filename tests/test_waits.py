"""Every wait in the package has a deadline, read from the source; what is let off has its owner and reason here."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "contraflow"

# Calls that wait for somebody else, when they are given nothing that bounds them.
BARE = {"get", "wait", "join", "acquire", "recv", "recv_bytes", "recv_multipart", "communicate", "accept", "barrier"}
CONDITION = {"wait_for"}  # of a condition takes the predicate, no time
PROGRAMS = {"run", "call", "check_call", "check_output"}  # of subprocess
BOUNDS = {"timeout", "wait_for", "timeout_at"}  # of asyncio

# Why a wait may stand without a deadline of its own. Each entry: file, then `function: wait`, by reason.
REASONS: dict[str, dict[str, set[str]]] = {
    # The owner is whoever called the worker: every call has a deadline, at which what it runs is cancelled.
    "inside a call, which its caller's deadline cancels": {
        "buffer/service.py": {"_kept: await kept"},
        "rewards/scorer.py": {"score: await answer"},
        "rollout/desk.py": {"next: self._inbox.get"},
        "rollout/fleet.py": {"ready: asyncio.wait", "pick: asyncio.wait"},
        "rollout/flight.py": {"reading: asyncio.wait"},
        "rollout/foreign.py": {"_await: await awaitable"},
        "rollout/native.py": {"generate: await waiter", "swap: self._awake.wait"},
        "rollout/served.py": {"_park: self._parked.wait_for", "_server: self._gate.wait"},
        "rollout/stepping.py": {"ask: asyncio.wait"},
        "runtime/allowance.py": {"take: await turn"},
        "runtime/channel.py": {"_exchange: await reply"},
        "runtime/cluster.py": {"in_thread: await done"},  # in a start, a look at the machines, or `leave`
        "runtime/inline.py": {"exchange: await reply"},
        "runtime/remote.py": {"_join: self._cluster.join"},  # in a start
        "runtime/drill.py": {"cancelled: self._cancellation.wait"},
    },
    # The owner is whoever closes the thing: nobody waits for an answer, and no work is no fault.
    "waits for work to do, until it is closed or cancelled": {
        "loop.py": {"play: self._admitted.get"},
        "ending.py": {"unless_set: stop.wait"},
        "rollout/foreign.py": {"_serve: jobs.get"},
        "rollout/program.py": {"_watch: process.wait"},
        "rollout/stepping.py": {"_run: await self._wake"},
        "rollout/sglang_twin.py": {"_main: asyncio.Event().wait"},
        "rollout/vllm_twin.py": {"_main: asyncio.Event().wait"},
        "rollout/keeper.py": {"main: server.wait"},
        "runtime/channel.py": {"serve: await self._link.broken"},
        "runtime/inline.py": {"next_death: self._deaths.get", "next_notice: self._notices.get"},
        "runtime/housed.py": {"next_death: self._deaths.get", "next_notice: self._notices.get"},
        "runtime/remote.py": {
            "next_death: self._deaths.get",
            "next_death: asyncio.wait",
            "next_death: await self._lost",
        },
        "runtime/process.py": {"_live: control.leaving.wait", "_live: asyncio.wait"},
    },
    # The owner is the task itself.
    "waits for a task of our own, whose own waits have deadlines": {
        "loop.py": {"_till_death: await work"},
        "ending.py": {"unless_set: asyncio.wait"},
        "rollout/desk.py": {"_spoken: await answer"},  # of the episode, which refuses it when it ends
        "rollout/openai.py": {"completion_events: await answering"},  # the same
        "run.py": {"live: asyncio.wait"},
        "rollout/group.py": {"_ended: asyncio.wait"},  # the group's own deadline cancels it
        "buffer/service.py": {"close: await self._keeping"},  # of writes to the disk; the runtime's stop has a deadline
        "rollout/fleet.py": {"_back: asyncio.wait"},
        "rollout/stepping.py": {"close: await self._task"},
        "runtime/gang.py": {"run: await call", "together: asyncio.wait"},
        "rollout/servers.py": {"start: keeper.wait", "stop: keeper.wait"},  # `_answered` gives up on it; after SIGKILL
        "runtime/house.py": {"stop: asyncio.wait"},  # for the end of a process that was seen to die
    },
    "bounded by a setting beside it, which the source does not show on the spot": {
        "dispatch/group.py": {"finish: work.wait"},  # on a GPU: the stream waits, and its watchdog is NCCL's time-out
        "weights/bridge.py": {"order: self._work.wait"},  # the same
        "rollout/star.py": {"_welcome: door.accept"},  # settimeout
        "runtime/link.py": {"_look: self._socket.recv_multipart"},  # NOBLOCK
    },
    "a twin of a server: it waits for its clients, as the server would": {
        "rollout/http_server.py": {"_serve: asyncio.wait"},
        "rollout/sglang_twin.py": {
            "_pause: self._idle.wait_for",
            "_generate: self._running.wait",
            "_stream: events.get",
        },
        "rollout/vllm_twin.py": {"_generate: self._running.wait", "_stream: self._running.wait"},
    },
}
FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py"))


def allowed(file: str) -> set[str]:
    return set().union(*(files.get(file, set()) for files in REASONS.values()))


def waits(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, `function: wait`) of every wait that nothing bounds on the spot."""
    yield from _search(tree, "module", bounded=False)


def _search(node: ast.AST, function: str, *, bounded: bool) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function, bounded = node.name, False
    if isinstance(node, ast.AsyncWith) and any(_is_bound(item.context_expr) for item in node.items):
        bounded = True
    if isinstance(node, ast.Call) and _is_bound(node):
        bounded = True
    if not bounded and (what := _waits(node)):
        yield node.lineno, f"{function}: {what}"  # type: ignore[attr-defined]
    for child in ast.iter_child_nodes(node):
        yield from _search(child, function, bounded=bounded)


def _is_bound(node: ast.AST) -> bool:
    """asyncio.timeout(...), asyncio.wait_for(...)."""
    return isinstance(node, ast.Call) and _of(node.func, "asyncio") in BOUNDS


def _of(function: ast.AST, module: str) -> str:
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == module:
        return function.attr
    return ""


def _waits(node: ast.AST) -> str:
    if isinstance(node, ast.Await) and isinstance(node.value, ast.Name | ast.Attribute):
        return f"await {ast.unparse(node.value)}"
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return ""
    name, keywords = node.func.attr, {keyword.arg for keyword in node.keywords}
    if "timeout" in keywords or "timeout_s" in keywords:
        return ""
    if _of(node.func, "asyncio") == "wait" or _of(node.func, "subprocess") in PROGRAMS:
        return ast.unparse(node.func)
    if (name in BARE and not node.args) or (name in CONDITION and len(node.args) < 2):
        return ast.unparse(node.func)
    return ""


@pytest.mark.parametrize("file", FILES)
def test_every_wait_has_a_deadline_or_a_stated_reason(file: str) -> None:
    found = dict[str, int]()
    for line, wait in waits(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        found.setdefault(wait, line)
    bare = {f"{file}:{line} {wait}" for wait, line in found.items() if wait not in allowed(file)}
    assert not bare, "give it a timeout, or name its owner and reason in REASONS"
    assert allowed(file) <= set(found), "a reason without a wait: take it out"


def test_reasons_are_of_files_that_exist() -> None:
    assert {file for files in REASONS.values() for file in files} <= set(FILES)


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        ("await queue.get()", ["f: queue.get"]),
        ("await self.event.wait()", ["f: self.event.wait"]),
        ("await future", ["f: await future"]),
        ("await self.task", ["f: await self.task"]),
        ("await asyncio.wait({task})", ["f: asyncio.wait"]),
        ("await condition.wait_for(ready)", ["f: condition.wait_for"]),
        ("thread.join()", ["f: thread.join"]),
        ("lock.acquire()", ["f: lock.acquire"]),
        ("subprocess.run(['ls'])", ["f: subprocess.run"]),
        ("process.communicate()", ["f: process.communicate"]),
        ("await asyncio.wait({task}, timeout=3)", []),
        ("await asyncio.wait_for(queue.get(), 3)", []),
        ("async with asyncio.timeout(3): await queue.get()", []),
        ("async with asyncio.timeout(3), lock:\n        await future", []),
        ("async with asyncio.timeout(3):\n        async def g(): await queue.get()", ["g: queue.get"]),
        ("subprocess.run(['ls'], timeout=3)", []),
        ("words.get('a'); ', '.join(words); thread.join(3); condition.wait_for(ready, 3)", []),
    ],
)
def test_the_reader_tells_a_bare_wait_from_a_bounded_one(body: str, seen: list[str]) -> None:
    assert [wait for _, wait in waits(ast.parse(f"async def f():\n    {body}\n"))] == seen
