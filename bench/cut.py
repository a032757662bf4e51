"""Seconds of a step with no cuts, with cuts in a folder, and with cuts on a real S3 behind a slow line.

    python -m bench.cut --weed PATH [--mb-per-s 20] [--steps 40] [--every 10] [--starts 3]

The recipe's run, whole and on this machine, in turn in each way; SeaweedFS (`make test-store` brings
`weed`) behind a proxy that lets so many bytes pass. A step is from one record of metrics.jsonl to the next, the first
five left out. What is compared are medians of a start.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.record import spread, write
from contraflow.telemetry import read_journal
from tests import seaweed
from tests.faulty_proxy import Proxy, running

RECIPE = "recipes/tiny_cpu.toml"
WAYS = ("no cuts", "folder", "slow S3")
WARM = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weed", type=Path, required=True, help="SeaweedFS's binary")
    parser.add_argument("--mb-per-s", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="steps between cuts")
    parser.add_argument("--starts", type=int, default=3)
    options = parser.parse_args()
    with store(options) as proxy:
        found = [{way: one_run(way, start, options) for way in WAYS} for start in range(options.starts)]
        puts = len([line for line in proxy.seen if line.startswith("PUT")])
    rows = [
        {
            "way": way,
            "step_s": spread([start[way] for start in found]),
            "over_no_cuts": spread([start[way] / start["no cuts"] for start in found]),
        }
        for way in WAYS
    ]
    facts = {"mb_per_s": options.mb_per_s, "steps": options.steps, "every": options.every, "puts": puts}
    print("wrote", write("cut", rows, recipe=RECIPE, **facts, goal="within 1.05 of no cuts"))
    for row in rows:
        print(f"{row['way']:8}  {row['step_s']['median']:.3f} s a step  {row['over_no_cuts']['median']:.3f} of no cuts")


@contextmanager
def store(options: argparse.Namespace) -> Iterator[Proxy]:
    """SeaweedFS, reached over a slow line by whatever this process starts."""
    with tempfile.TemporaryDirectory(prefix="cut-bench-") as folder, seaweed.served(options.weed, Path(folder)) as port:
        os.environ.update(seaweed.environment(port))
        seaweed.wait_for_store()
        with running(Proxy(port, bytes_per_s=options.mb_per_s * 1e6)) as proxy:
            os.environ.update(seaweed.environment(proxy.port))
            yield proxy


def one_run(way: str, start: int, options: argparse.Namespace) -> float:
    """The median step of one run, in seconds."""
    keys: dict[str, Any] = {"run.steps": options.steps, "run.eval_tasks": 0, "run.stop_at_accuracy": 0.0}
    keys["train.checkpoint_every"] = 10**6 if way == "no cuts" else options.every
    if way == "slow S3":
        keys["train.checkpoint_url"] = f"s3://{seaweed.BUCKET}/start-{start}"
    with tempfile.TemporaryDirectory(prefix="cut-bench-") as folder:
        sets = itertools.chain.from_iterable(("--set", f"{key}={value}") for key, value in keys.items())
        command = [sys.executable, "-c", "from contraflow.cli import main; main()"]
        command += ["run", RECIPE, "--folder", f"{folder}/run", *sets]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        at = [record["at"] for record in read_journal(Path(folder, "run", "metrics.jsonl")) if record["kind"] == "step"]
    return statistics.median(later - sooner for sooner, later in itertools.pairwise(at[WARM:]))


if __name__ == "__main__":
    main()
