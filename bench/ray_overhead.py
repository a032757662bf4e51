"""What Ray costs: the laptop recipe on `local` and `ray` in turn, and calls and payloads between two workers of each.

    python -m bench.ray_overhead [RECIPE] [--steps 40] [--rounds 3]

Steps a second leave the first steps and the start of the workers out; they are told apart as `start_s`. A worker calls
another: small calls one by one and many at once, and arrays that the other takes and answers with their size. On Ray
these go over TCP, encrypted; `local` uses sockets of the file system, in the clear.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.prober import Prober, make_prober
from bench.record import spread, write
from contraflow.runtime import open_runtime
from contraflow.runtime.drill import make_drill
from contraflow.telemetry import read_journal

KINDS = ("local", "ray")
WARM = 5  # steps left out of the rate
PROBE_S = 600.0


class Section:
    """The recipe's `runtime`, as far as it matters here."""

    def __init__(self, kind: str) -> None:
        self.kind, self.threads, self.hang_s = kind, 1, 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="recipes/tiny_cpu.toml")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="ray-bench-") as scratch:
        for round_, kind in itertools.product(range(options.rounds), KINDS):
            folder = Path(scratch) / f"{kind}-{round_}"
            measured = run(options, kind, folder, seed=round_) | asyncio.run(probe(kind, folder))
            runs[kind].append(measured)
            print(kind, round_, {key: round(value, 3) for key, value in measured.items()}, flush=True)
    rows = [{"kind": kind, **{key: spread([run[key] for run in of]) for key in of[0]}} for kind, of in runs.items()]
    pairs = [b["steps_per_s"] / a["steps_per_s"] for a, b in zip(runs["local"], runs["ray"], strict=True)]
    facts = {"overhead": 1 - statistics.median(pairs), "overhead_by_pair": [1 - pair for pair in pairs]}
    facts["load_after"] = list(os.getloadavg())
    print(facts)
    print("wrote", write("ray_overhead", rows, steps=options.steps, rounds=options.rounds, **facts))


def run(options: argparse.Namespace, kind: str, folder: Path, *, seed: int) -> dict[str, float]:
    """One run in processes of its own; steps are all the same work."""
    settings = [f"run.steps={options.steps}", f"run.seed={seed}", "run.eval_every=1000", f"runtime.kind={kind}"]
    command = [sys.executable, "-c", "from contraflow.cli import main; main()", "run", options.recipe, "--plain"]
    command += ["--folder", str(folder), *itertools.chain(*(["--set", setting] for setting in settings))]
    begin = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    steps = [record for record in read_journal(folder / "metrics.jsonl") if record["kind"] == "step"]
    return {
        "steps_per_s": (len(steps) - WARM) / (steps[-1]["at"] - steps[WARM - 1]["at"]),
        "start_s": steps[0]["at"] - begin,
    }


async def probe(kind: str, folder: Path) -> dict[str, float]:
    """Calls and payloads from worker to worker, how long a worker takes to start, and a killed one to be named."""
    runtime: Any = open_runtime(Section(kind), folder / "probe", preload=("bench.prober",))
    try:
        far = await runtime.start("far", make_drill)
        near = await runtime.start("near", make_prober)
        result: dict[str, float] = await near.call(PROBE_S, Prober.measure, far.address)
        begin = time.monotonic()
        await runtime.start("victim", make_drill)
        started = time.monotonic()
        runtime.kill("victim")
        await runtime.next_death()
        return result | {"later_start_s": started - begin, "named_after_s": time.monotonic() - started}
    finally:
        await runtime.close()


if __name__ == "__main__":
    main()
