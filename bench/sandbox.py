"""Judgements a second of the rewards that run programs, by isolation; and what a bare interpreter takes for the same.

python -m bench.sandbox [--seconds 5]
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec

from bench.record import write
from contraflow import config
from contraflow.errors import RewardError
from contraflow.rewards.base import Said, Transcript
from contraflow.rewards.registry import make_mix
from contraflow.types import StopReason, Task

SOURCE = "def f(x):\n    return sorted(x)[::-1]"
CASES = [{"assert": "assert f([2, 3, 1]) == [3, 2, 1]"}]
TASKS = {
    "code, one case": Task(key="b/0", prompt="", reference=SOURCE, facts={"tests": json.dumps(CASES)}),
    "code, ten cases": Task(key="b/1", prompt="", reference=SOURCE, facts={"tests": json.dumps(CASES * 10)}),
    "math": Task(key="b/2", prompt="", reference=r"$\frac{1}{2}+\sqrt{8}$"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    seconds = parser.parse_args().seconds
    rows = []
    for isolation in ("namespaces", "filters"):
        section = config.Sandbox.model_validate({"isolation": isolation})
        for name, task in TASKS.items():
            part = name.split(",")[0]
            if part == "math" and find_spec("math_verify") is None:
                continue
            try:
                rows.append({"what": name, "isolation": isolation, **judged(part, task, section, seconds)})
            except RewardError as refusal:  # the isolation, or a package, is not to be had
                rows.append(
                    {"what": name, "isolation": isolation, "refused": str(refusal).partition(" on this")[0]}
                )  # the rest names its paths
            print(rows[-1])
    command = [sys.executable, "-I", "-S", "-c", SOURCE + "\nassert f([2, 3, 1]) == [3, 2, 1]"]
    bare = rate(lambda: subprocess.run(command, check=True), seconds)
    rows.append({"what": "a bare interpreter started for each case", "isolation": "none", **bare})
    print(rows[-1])
    print("wrote", write("sandbox", rows, seconds=seconds))


def judged(part: str, task: Task, section: config.Sandbox, seconds: float) -> dict[str, float]:
    """One thread that asks one judgement after the other."""
    mix = make_mix({part: 1.0}, correct_part=part, sandbox=section)
    said = Transcript((Said("model", task.reference),), StopReason.STOP)

    def ask() -> None:
        reward, _ = mix.score(task, said)
        assert reward == 1, reward

    try:
        mix.score(task, said)  # starts the cell
        return rate(ask, seconds)
    finally:
        mix.close()


def rate(ask: Callable[[], object], seconds: float) -> dict[str, float]:
    count, began = 0, time.perf_counter()
    while (taken := time.perf_counter() - began) < seconds:
        ask()
        count += 1
    return {"per_second": round(count / taken, 1), "ms": round(1e3 * taken / count, 2)}


if __name__ == "__main__":
    main()
