"""What the buffer costs a group: events alone, payloads through memory, and payloads to disk beside `dd` on that disk.

Takes sizes; gives one row a case, and bench/results/control_plane.json. The durable case runs the real worker with its
group commit, and `dd conv=fdatasync` of as many bytes before and after it. With a redis-server (`--redis`, or
CONTRAFLOW_REDIS) the same groups also go through the buffer in a process of its own and through a Redis stream, in
turns: see redis_stream.py; all of it is then in bench/results/control_plane_redis.json.
"""

import argparse
import asyncio
import os
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench import redis_stream
from bench.record import spread, write
from contraflow.buffer.service import Buffer, make_buffer
from contraflow.config import Buffer as Section
from contraflow.config import Runtime
from contraflow.runtime import open_runtime
from contraflow.runtime.wire import decode, encode, nbytes
from contraflow.types import Episode, Group, Span, StopReason, Task, Ticket, Version

EPISODES, TOKENS, LAYERS, CHOICES = 8, 2048, 48, 8
GROUPS_PER_STEP = 16
CALL_S = 60.0
MEMORY = Path("/dev/shm/contraflow-dd")  # bytes that no disk can shorten, read from memory


def episodes(*, tokens: int, routes: bool) -> tuple[Episode, ...]:
    """Two rewards, so that every group has signal; version and ticket are set per group."""
    draw = np.random.default_rng(0)
    return tuple(
        Episode(
            seed=i,
            tokens=draw.integers(0, 150_000, tokens, dtype=np.int32),
            trained=np.arange(tokens) >= 1,
            logprobs=-draw.random(tokens, dtype=np.float32),
            spans=(Span(Version(0, 0), 1, tokens),),
            turns=(),
            stop=StopReason.STOP,
            reward=float(i % 2),
            routes=draw.integers(0, 128, (tokens - 1, LAYERS, CHOICES), dtype=np.uint8) if routes else None,
        )
        for i in range(EPISODES if routes else 2)
    )


def group_of(ticket: Ticket, made: tuple[Episode, ...], n: int) -> Group:
    span = Span(Version(ticket.line, n), 1, made[0].tokens.size)
    kept = tuple(_with_span(episode, span) for episode in made)
    return Group(ticket=ticket, task=Task(key=str(ticket.group), prompt="", reference=""), episodes=kept)


def _with_span(episode: Episode, span: Span) -> Episode:
    return msgspec.structs.replace(episode, spans=(span,))


def events(folder: Path, groups: int) -> float:
    """Seconds for `groups` from ticket to trained, rows only: the store and the ledger, as the worker drives them."""
    section = Section(groups_per_step=GROUPS_PER_STEP, max_age=1)
    buffer = Buffer(section, folder, None, time.monotonic, threaded=False)
    made, store, ledger = episodes(tokens=2, routes=False), buffer._store, buffer._ledger
    began = time.perf_counter()
    for step in range(groups // GROUPS_PER_STEP):
        for _ in range(GROUPS_PER_STEP):
            ticket = store.pose()
            assert ticket is not None
            store.start(ticket.group, ticket.attempt, Version(0, step))
            ledger.make_room()
            store.put(group_of(ticket, made, step))
        store.choose(step)
        ledger.commit()
        store.finish(step, Version(0, step + 1))
        ledger.commit()
        store.serve(Version(0, step + 1))
    took = time.perf_counter() - began
    asyncio.run(buffer.close())
    return took


async def durable(folder: Path, steps: int) -> tuple[float, int]:
    """Seconds and bytes of payloads through the worker: put (synced), take, fetch, trained, cut."""
    section = Section(groups_per_step=GROUPS_PER_STEP, max_age=1)
    buffer = Buffer(section, folder, None, time.monotonic, threaded=True)
    measured = await _payloads(lambda method, *given: method(buffer, *given), steps)
    await buffer.close()
    return measured


async def apart(folder: Path, steps: int) -> tuple[float, int]:
    """The same with the buffer in a process of its own, as in a run: every payload also goes there and back."""
    runtime = open_runtime(Runtime(), folder, clock=time.monotonic, preload=("contraflow.buffer.service",))
    try:
        section = Section(groups_per_step=GROUPS_PER_STEP, max_age=1)
        buffer = await runtime.start(
            "buffer", make_buffer, buffer=section, folder=str(folder / "run"), resume_step=None, threaded=True
        )
        return await _payloads(lambda method, *given: buffer.call(CALL_S, method, *given), steps)
    finally:
        await runtime.close()


async def _payloads(ask: Callable[..., Awaitable[Any]], steps: int) -> tuple[float, int]:
    made, total, took = episodes(tokens=TOKENS, routes=True), 0, 0.0
    for step in range(steps):
        tickets = [await ask(Buffer.admit, 1.0) for _ in range(GROUPS_PER_STEP)]
        groups = [group_of(ticket, made, step) for ticket in tickets]
        total += sum(nbytes(encode(group)) for group in groups)
        began = time.perf_counter()
        await asyncio.gather(*(ask(Buffer.put, group) for group in groups))
        take = await ask(Buffer.take, step, 1.0)
        await ask(Buffer.fetch, take.groups)
        await ask(Buffer.trained, step, Version(0, step + 1))
        took += time.perf_counter() - began
        await ask(Buffer.served, Version(0, step + 1))
    return took, total


def beside(place: Path, binary: Path, *, steps: int, rounds: int, groups: int) -> list[dict[str, Any]]:
    """The buffer and a Redis stream, each in a process of its own on one disk, in turns; events too."""
    made = episodes(tokens=TOKENS, routes=True)
    numbers = [range(step * GROUPS_PER_STEP, (step + 1) * GROUPS_PER_STEP) for step in range(steps)]
    sent = [[group_of(Ticket(group=n, attempt=1, line=0), made, 0) for n in step] for step in numbers]
    total = steps * GROUPS_PER_STEP * nbytes(encode(sent[0][0]))
    speeds: dict[str, list[float]] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=place) as folder:
            took, of_ledger = asyncio.run(apart(Path(folder), steps))
        speeds.setdefault("buffer in a process of its own", []).append(of_ledger / took / 1e6)
        for fsync in ("always", "everysec"):
            with _redis(place, binary, fsync) as listening:
                took = redis_stream.payloads(listening, sent)
            speeds.setdefault(f"Redis stream, appendfsync {fsync}", []).append(total / took / 1e6)
    rows: list[dict[str, Any]] = [
        {"case": f"payload: {name}", "MB_s": {key: round(value, 1) for key, value in spread(values).items()}}
        for name, values in speeds.items()
    ]
    with _redis(place, binary, "always") as listening:
        took = redis_stream.events(listening, groups, GROUPS_PER_STEP)
    rows.append(
        {"case": f"events of {groups} groups: Redis stream, appendfsync always", "groups_s": round(groups / took, 1)}
    )
    return rows


@contextmanager
def _redis(place: Path, binary: Path, fsync: str) -> Iterator[Path]:
    with (
        tempfile.TemporaryDirectory(dir=place) as folder,
        redis_stream.server(binary, Path(folder), fsync) as listening,
    ):
        yield listening


def memory(count: int) -> tuple[float, int]:
    """Seconds and bytes of payloads through the wire format and back, as between processes."""
    group = group_of(Ticket(group=0, attempt=1, line=0), episodes(tokens=TOKENS, routes=True), 0)
    began, total = time.perf_counter(), 0
    for _ in range(count):
        frames = [bytes(frame) for frame in encode(group)]
        decode(frames, Group)
        total += nbytes(frames)
    return time.perf_counter() - began, total


def dd(folder: Path, total: int) -> float:
    """Seconds of `dd conv=fdatasync` for about as many bytes."""
    target, mib = folder / "dd", max(total >> 20, 1)
    MEMORY.write_bytes(np.random.default_rng(0).bytes(mib << 20))
    began = time.perf_counter()
    subprocess.run(["dd", f"if={MEMORY}", f"of={target}", "bs=1M", "conv=fdatasync", "status=none"], check=True)
    took = time.perf_counter() - began
    target.unlink()
    MEMORY.unlink()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--steps", type=int, default=6, help="of 16 groups with payload")
    parser.add_argument("--place", type=Path, default=Path("."), help="a folder on the disk to measure")
    parser.add_argument("--redis", type=Path, default=redis_stream.find(), help="a redis-server to run beside it")
    parser.add_argument("--rounds", type=int, default=3, help="of ledger and Redis in turns")
    parser.add_argument("--note", default="", help="what else a reader should know, such as who else used the machine")
    options = parser.parse_args()
    load = os.getloadavg()
    rows: list[dict[str, Any]] = []
    for groups in options.groups:
        with tempfile.TemporaryDirectory(dir=options.place) as folder:
            took = events(Path(folder), groups)
        rows.append({"case": f"events of {groups} groups", "groups_s": round(groups / took, 1)})
    took, total = memory(32)
    rows.append({"case": "payload through memory", "MB_s": round(total / took / 1e6, 1)})
    with tempfile.TemporaryDirectory(dir=options.place) as name:
        folder = Path(name)
        before = dd(folder, 600 << 20)
        took, total = asyncio.run(durable(folder / "run", options.steps))
        after = dd(folder, 600 << 20)
    peer = (600 << 20) / max(before, after)
    fast = (600 << 20) / min(before, after)
    speed = total / took
    rows.append(
        {
            "case": "payload to disk",
            "MB_s": round(speed / 1e6, 1),
            "dd_MB_s": [round(peer / 1e6, 1), round(fast / 1e6, 1)],
            "of_dd": [round(speed / fast, 2), round(speed / peer, 2)],
            "group_MB": round(total / options.steps / GROUPS_PER_STEP / 1e6, 2),
        }
    )
    facts = {"payload": f"{EPISODES} episodes of {TOKENS} tokens, routes of {LAYERS} layers x {CHOICES}"}
    if options.redis is not None:
        facts["peer"] = f"{redis_stream.version(options.redis)}, over a Unix socket"
        rows += beside(
            options.place, options.redis, steps=options.steps, rounds=options.rounds, groups=options.groups[0]
        )
    for row in rows:
        print(row)
    name = "control_plane" if options.redis is None else "control_plane_redis"
    write(name, rows, load_at_start=load, note=options.note, **facts)


if __name__ == "__main__":
    main()
