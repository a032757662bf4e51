"""Does a run whose tokens a vLLM server makes learn as one with the native engine does? Both, one after the other.

    CONTRAFLOW_VLLM_PYTHON=.venv-vllm/bin/python python -m bench.served [--steps 100]

Says held-out accuracy and mean reward over the steps, seconds, stalls of refreshes, and what went wrong with servers.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.record import write
from contraflow.telemetry import read_journal

ENGINES = {"native": "recipes/tiny_cpu.toml", "vllm": "recipes/tiny_vllm.toml"}
EVERY = 10  # steps that one entry of a curve stands for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    python = os.environ["CONTRAFLOW_VLLM_PYTHON"]
    rows = []
    with tempfile.TemporaryDirectory(prefix="served-bench-") as scratch:
        for engine, recipe in ENGINES.items():
            settings = [f"run.steps={options.steps}", f"run.eval_every={EVERY}"]
            settings += [f"engine.server.python={python}"] if engine == "vllm" else []
            rows.append({"engine": engine, **measure(recipe, Path(scratch) / engine, settings)})
            print(rows[-1], flush=True)
    version = subprocess.run(
        [python, "-c", "import vllm; print(vllm.__version__)"], check=True, capture_output=True, text=True
    )
    print("wrote", write("served", rows, vllm=version.stdout.split()[-1], every=EVERY))


def measure(recipe: str, folder: Path, settings: list[str]) -> dict[str, Any]:
    """One whole run."""
    command = [sys.executable, "-c", "from contraflow.cli import main; main()", "run", recipe, "--plain"]
    command += ["--folder", str(folder), *(word for setting in settings for word in ("--set", setting))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for record in read_journal(folder / "metrics.jsonl"):
        by_kind.setdefault(record["kind"], []).append(record)
    rewards = [step["reward"] for step in by_kind["step"]]
    stalls = [record["stall_s"] for record in by_kind["refresh"]]
    last = by_kind["pools"][-1]
    return {
        "held_out": [round(look["accuracy"], 3) for look in by_kind["eval"]],
        "reward": [round(statistics.fmean(rewards[i : i + EVERY]), 3) for i in range(0, len(rewards), EVERY)],
        "steps": len(rewards),
        "seconds": round(last["elapsed_s"], 1),
        "oldest_trained": max(step["age_max"] for step in by_kind["step"]),
        "failed_episodes": sum(step["failed"] for step in by_kind["step"]),
        "stall_median_ms": round(1000 * statistics.median(stalls), 1),
        "stall_largest_ms": round(1000 * max(stalls), 1),
    }


if __name__ == "__main__":
    main()
