"""Asynchronous against synchronous training: the same recipe, steps and machine, runs in turn.

    python -m bench.loop [RECIPE] [--steps 100] [--rounds 3]

Three ways to do the same work: `async` (two worker processes, max_age 2), `sync` (the same processes, max_age 0) and
`alternate` (one process with two threads that generates, then trains). r and t are the busy seconds a step of the
synchronous run's engine and trainer; the ideal speed-up of overlapping them is (r + t) / max(r, t).
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.record import spread, write
from contraflow.telemetry import read_journal

WAYS = {
    "async": ["buffer.max_age=2"],
    "sync": ["buffer.max_age=0"],
    "alternate": ["buffer.max_age=0", "runtime.kind=inline", "runtime.threads=2"],
}
WARM = 5  # steps left out of the rate
WANTED = 0.8  # held-out accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="recipes/tiny_cpu.toml")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], help="section.key=value for all three ways")
    options = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="loop-bench-") as scratch:
        for round_, way in itertools.product(range(options.rounds), WAYS):
            folder = Path(scratch) / f"{way}-{round_}"
            runs[way].append(measure(options, way, folder, seed=round_))
            print(way, round_, {k: round(v, 3) for k, v in runs[way][-1].items()}, flush=True)
    rows = [{"way": way, **{key: spread([run[key] for run in of]) for key in of[0]}} for way, of in runs.items()]
    facts = compare(runs)
    print(facts)
    print("wrote", write("loop", rows, steps=options.steps, rounds=options.rounds, **facts))


def measure(options: argparse.Namespace, way: str, folder: Path, *, seed: int) -> dict[str, float]:
    """One run in processes of its own."""
    settings = [
        *options.set,
        *WAYS[way],
        f"run.steps={options.steps}",
        f"run.seed={seed}",
        "run.stop_at_accuracy=0.0",
        "buffer.no_signal=keep",  # so that every step is the same work
        "train.checkpoint_every=1000000",
    ]
    command = [sys.executable, "-c", "from contraflow.cli import main; main()", "run", options.recipe, "--plain"]
    command += ["--folder", str(folder), *itertools.chain(*(["--set", setting] for setting in settings))]
    threads = "2" if way == "alternate" else "1"
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": threads})
    return summary(read_journal(folder / "metrics.jsonl"))


def summary(records: list[dict[str, Any]]) -> dict[str, float]:
    """Rate, busy seconds a step, ages and accuracy of one run's journal."""
    steps = [record for record in records if record["kind"] == "step"]
    looks = [record for record in records if record["kind"] == "eval"]
    pools = [record for record in records if record["kind"] == "pools"][-1]
    seconds = {worker["name"]: worker["seconds"] for worker in pools["workers"]}
    began = pools["at"] - pools["elapsed_s"]
    good = [look["at"] - began for look in looks if look["accuracy"] >= WANTED]
    return {
        "steps_per_s": (len(steps) - WARM) / (steps[-1]["at"] - steps[WARM - 1]["at"]),
        "r": busy(seconds["rollout-0"], "idle", "start") / len(steps),
        "t": busy(seconds["trainer-0"], "wait", "start") / len(steps),
        "seconds_to_accuracy": good[0] if good else float("inf"),
        "first_accuracy": looks[0]["accuracy"],
        "last_accuracy": looks[-1]["accuracy"],
        "oldest_trained": max(step["age_max"] for step in steps),
    }


def busy(seconds: dict[str, float], *waiting: str) -> float:
    """Seconds of a process in which it did not wait for another."""
    return sum(spent for cause, spent in seconds.items() if cause not in waiting)


def compare(runs: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Async over sync, beside what the overlap could give at best."""
    r, t = (statistics.median(run[key] for run in runs["sync"]) for key in ("r", "t"))
    ideal = (r + t) / max(r, t)
    pairs = [a["steps_per_s"] / s["steps_per_s"] for a, s in zip(runs["async"], runs["sync"], strict=True)]
    speedup = statistics.median(pairs)
    return {
        "r_over_t": r / t,
        "ideal": ideal,
        "speedup": speedup,
        "speedup_least": min(pairs),
        "share_of_ideal": speedup / ideal,
        "speedup_over_alternate": statistics.median(
            a["steps_per_s"] / s["steps_per_s"] for a, s in zip(runs["async"], runs["alternate"], strict=True)
        ),
        "accuracy_difference": statistics.median(run["last_accuracy"] for run in runs["async"])
        - statistics.median(run["last_accuracy"] for run in runs["sync"]),
        "oldest_trained": max(run["oldest_trained"] for run in runs["async"]),
    }


if __name__ == "__main__":
    main()
