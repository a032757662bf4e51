"""Does `make run` learn, every time? The shipped recipe over five seeds, each in processes of its own.

    python -m bench.seeds [RECIPE] [--seeds 5]

Says held-out accuracy at the start and the end, seconds to 0.8, the oldest token trained, and the stall of refreshes.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.loop import WANTED
from bench.record import write
from contraflow.telemetry import read_journal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="recipes/tiny_cpu.toml")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="seeds-bench-") as scratch:
        for seed in range(options.seeds):
            rows.append(measure(options.recipe, Path(scratch) / str(seed), seed))
            print(rows[-1], flush=True)
    print("wrote", write("seeds", rows, wanted=WANTED, reached=sum(row["last"] >= WANTED for row in rows)))


def measure(recipe: str, folder: Path, seed: int) -> dict[str, Any]:
    """One whole run."""
    command = [sys.executable, "-c", "from contraflow.cli import main; main()", "run", recipe, "--plain"]
    command += ["--folder", str(folder), "--set", f"run.seed={seed}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    records = read_journal(folder / "metrics.jsonl")
    looks = [record for record in records if record["kind"] == "eval"]
    steps = [record for record in records if record["kind"] == "step"]
    stalls = [record["stall_s"] for record in records if record["kind"] == "refresh"]
    pools = [record for record in records if record["kind"] == "pools"][-1]
    began = pools["at"] - pools["elapsed_s"]
    good = [look["at"] - began for look in looks if look["accuracy"] >= WANTED]
    return {
        "seed": seed,
        "first": looks[0]["accuracy"],
        "last": looks[-1]["accuracy"],
        "seconds_to_wanted": round(good[0], 1) if good else None,
        "seconds": round(pools["elapsed_s"], 1),
        "steps": len(steps),
        "oldest_trained": max(step["age_max"] for step in steps),
        "stall_median_ms": round(1000 * statistics.median(stalls), 2),
        "stall_largest_ms": round(1000 * max(stalls), 2),
    }


if __name__ == "__main__":
    main()
