"""How long a run needs to train again after each part of it was killed, from one run that is killed at random.

python -m bench.chaos [--kills 60] [--seed 11] [--engine scripted]
"""

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

from bench.record import write
from tests.faults.chaos import Chaos, check_ledger
from tests.faults.test_chaos import RECIPE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--engine", default="scripted", choices=["scripted", "native"])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.toml"
        recipe.write_text(RECIPE.format(model="builtin:tiny-moe", engine=given.engine), encoding="utf-8")
        chaos = Chaos(recipe, Path(folder) / "run", random.Random(given.seed))
        chaos.run(given.kills)
        steps = check_ledger(Path(folder) / "run", 4)
    rows = [row(role, seconds) for role, seconds in chaos.recovered.items() if seconds]
    for each in rows:
        print(each)
    facts = {"kills": chaos.kills, "resumes": chaos.resumes, "steps": steps, "lost": 0, "trained_twice": 0, "hangs": 0}
    print("wrote", write("chaos", rows, seed=given.seed, engine=given.engine, **facts))


def row(role: str, seconds: list[float]) -> dict[str, Any]:
    """Nearest-rank percentiles: of few kills, p99 is the slowest."""
    ranked = sorted(seconds)
    at = {name: ranked[min(len(ranked) - 1, int(share * len(ranked)))] for name, share in (("p50", 0.5), ("p99", 0.99))}
    return {"killed": role, "times": len(ranked), **{f"{name}_s": round(value, 2) for name, value in at.items()}}


if __name__ == "__main__":
    main()
