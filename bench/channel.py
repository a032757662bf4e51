"""What a call to a worker process costs, and beside it the same through a bare multiprocessing.Pipe.

    python -m bench.channel [--calls 2000] [--payloads 30] [--out bench/results/channel.json]

Round trips of a small call, calls a second with many in flight, MB/s of a large array that the worker receives and
answers with a number, the start and stop of a worker, and how soon a killed one is named. The Pipe pickles, has one
call in flight, and knows no deadlines, cancellation, types or deaths: it is the floor, not a rival.
"""

import argparse
import asyncio
import datetime
import json
import multiprocessing as mp
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from contraflow.runtime.base import Ref
from contraflow.runtime.drill import Drill, make_drill
from contraflow.runtime.local import LocalRuntime

BUSY_BEFORE = os.getloadavg()
IN_FLIGHT = 256
SIZES_MB = (1, 16, 100)
DEADLINE_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000, help="small calls, one by one; five times as many pipelined")
    parser.add_argument("--payloads", type=int, default=30, help="arrays sent of each size")
    parser.add_argument("--out", type=Path, default=Path("bench/results/channel.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="channel-bench-") as folder:
        results = asyncio.run(measure(Path(folder), options.calls, options.payloads))
    results["peer: multiprocessing.Pipe"] = measure_pipe(options.calls, options.payloads)
    print(json.dumps(results, indent=1))
    record = {"command": " ".join(["python -m bench.channel", *sys.argv[1:]]), **machine(), "results": results}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


async def measure(folder: Path, calls: int, payloads: int) -> dict[str, Any]:
    """Everything the local runtime's channel does."""
    runtime = LocalRuntime(folder)
    try:
        results: dict[str, Any] = {
            "first start, with torch, s": await seconds(lambda: runtime.start("near", make_drill))
        }
        far = await runtime.start("far", make_drill)
        near: Ref[Drill] = await restarted(runtime, "near", results)
        for _ in range(200):  # warm
            await near.call(DEADLINE_S, Drill.add, 1)
        results["small call, ms"] = spread([await seconds(lambda: add(near)) for _ in range(calls)], 1e3)
        relay = [await seconds(lambda: near.call(DEADLINE_S, Drill.relay_add, far.address, 1)) for _ in range(calls)]
        results["small call by way of another worker, ms"] = spread(relay, 1e3)
        results["calls/s, 256 in flight"] = round(await rate(near, calls * 5))
        for size in SIZES_MB:
            array = np.ones(size * 250_000, np.float32)
            times = [await seconds(lambda a=array: near.call(DEADLINE_S, Drill.size, a)) for _ in range(payloads)]  # type: ignore[misc]
            results[f"array of {size} MB, MB/s"] = spread([size / t for t in times])
        results["killed worker named after, ms"] = spread([await death(runtime) for _ in range(5)], 1e3)
        return results
    finally:
        await runtime.close()


async def restarted(runtime: LocalRuntime, name: str, results: dict[str, Any]) -> Ref[Drill]:
    starts, stops = [], []
    for _ in range(10):
        stops.append(await seconds(lambda: runtime.stop(name)))
        starts.append(await seconds(lambda: runtime.start(name, make_drill)))
    results["later start, ms"], results["stop, ms"] = spread(starts, 1e3), spread(stops, 1e3)
    await runtime.stop(name)
    return await runtime.start(name, make_drill)


async def add(ref: Ref[Drill]) -> int:
    return await ref.call(DEADLINE_S, Drill.add, 1)


async def rate(ref: Ref[Drill], calls: int) -> float:
    async def lane() -> None:
        for _ in range(calls // IN_FLIGHT):
            await add(ref)

    taken = await seconds(lambda: asyncio.gather(*[lane() for _ in range(IN_FLIGHT)]))
    return calls // IN_FLIGHT * IN_FLIGHT / taken


async def death(runtime: LocalRuntime) -> float:
    await runtime.start("victim", make_drill)

    async def kill() -> None:
        runtime.kill("victim")
        await runtime.next_death()

    return await seconds(kill)


async def seconds(act: Callable[[], Awaitable[Any]]) -> float:
    begin = time.perf_counter()
    await act()
    return time.perf_counter() - begin


def measure_pipe(calls: int, payloads: int) -> dict[str, Any]:
    """The floor: blocking sends of pickles to one process, which answers with a number."""
    context = mp.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=answer, args=(theirs,))
    process.start()
    results: dict[str, Any] = {}
    [trip(mine, 1) for _ in range(200)]
    results["small call, ms"] = spread([trip(mine, 1) for _ in range(calls)], 1e3)
    for size in SIZES_MB:
        array = np.ones(size * 250_000, np.float32)
        results[f"array of {size} MB, MB/s"] = spread([size / trip(mine, array) for _ in range(payloads)])
    mine.send(None)
    process.join()
    return results


def answer(pipe: Connection) -> None:
    while (got := pipe.recv()) is not None:
        pipe.send(got + 2 if isinstance(got, int) else got.nbytes)


def trip(pipe: Connection, value: Any) -> float:
    begin = time.perf_counter()
    pipe.send(value)
    pipe.recv()
    return time.perf_counter() - begin


def spread(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    ordered = sorted(value * scale for value in values)
    return {
        "median": round(statistics.median(ordered), 4),
        "p1": round(ordered[len(ordered) // 100], 4),
        "p99": round(ordered[-1 - len(ordered) // 100], 4),
    }


def machine() -> dict[str, Any]:
    names = [text for text in Path("/proc/cpuinfo").read_text().splitlines() if text.startswith("model name")]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": names[0].partition(":")[2].strip() if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load before": [round(load, 2) for load in BUSY_BEFORE],  # above 0: others were at work on the same cores
    }


if __name__ == "__main__":
    main()
