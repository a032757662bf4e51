"""Where do a reward model and the rule behind it part, as the policy moves away from where it began?

    python -m bench.over_optimisation [--steps 80] [--weights 1e-9,0.2] [--seeds 0,1] [--jobs 2]

For each seed: makes the reward model of recipes/rlhf_overoptimised_reward_model.toml, then runs
recipes/rlhf_overoptimised.toml at several weights of the KL. Proxy (the reward model) and gold (the rule behind its
pairs) over the root of the KL to the first model (Gao et al. 2210.10760), of each step's own samples and of looks at
held-out tasks: JSON, a drawing, and a table of where gold was highest and where it ended.
The KL is the k3 estimate of a step's own samples, by answer. It has a heavy tail, so a look and the drawing have the
median of the ten steps up to them. It is for samples of the policy itself, and these are up to two versions old: it
jumps about while the policy moves fast, so over the KL the drawing has the first model and looks from step 30 on, and
over steps all looks. JSON has everything.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from html import escape
from importlib.resources import files
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any

from bench.record import RESULTS, write
from contraflow.telemetry import read_journal
from contraflow.view.charts import curves

MEASURED = 1e-9  # a weight that moves nothing, so that the KL is measured where none is asked for
GOLD = "even_once"
WINDOW = 10  # steps of a median
SETTLED = 30  # steps after which the KL is drawn; chosen with the runs in sight
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--weights", default=f"{MEASURED},0.2")
    parser.add_argument("--seeds", default="0,1", help="of pairs, reward model and run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    options = parser.parse_args()
    seeds = [int(word) for word in options.seeds.split(",")]
    weights = [float(word) for word in options.weights.split(",")]
    with (
        tempfile.TemporaryDirectory(prefix="over-optimisation-") as scratch,
        ThreadPoolExecutor(options.jobs) as threads,
    ):
        told = list(threads.map(lambda seed: teach(seed, Path(scratch)), seeds))
        runs = [(seed, weight, options.steps, Path(scratch)) for seed, weight in product(seeds, weights)]
        rows = list(threads.map(lambda run: learn(*run), runs))
    write("over_optimisation", rows, reward_models=dict(zip(seeds, told, strict=True)))
    (RESULTS / "over_optimisation.svg").write_text(drawing(rows), encoding="utf-8")
    for row in rows:
        print("   ".join(f"{key} {value}" for key, value in summary(row).items()))


def call(*words: str) -> str:
    """One command of ours."""
    line = [sys.executable, "-c", "from contraflow.cli import main; main()", *words]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout


def teach(seed: int, scratch: Path) -> str:
    """Make the reward model of a seed; gives what was told of its held-out pairs."""
    recipe = "recipes/rlhf_overoptimised_reward_model.toml"
    told = call("reward-model", recipe, str(scratch / f"model-{seed}"), "--set", f"reward_model.seed={seed}")
    return told.strip().splitlines()[-2].strip()


def learn(seed: int, weight: float, steps: int, scratch: Path) -> Row:
    """One run: lists over its steps, and its looks."""
    folder = scratch / f"run-{seed}-{weight:g}"
    model = scratch / f"model-{seed}"
    changed = {"run.seed": seed, "loss.kl_weight": weight, "run.steps": steps, "reward.model.folder": model}
    words = [word for key, value in changed.items() for word in ("--set", f"{key}={value}")]
    call("run", "recipes/rlhf_overoptimised.toml", "--plain", "--folder", str(folder), *words)
    return {"seed": seed, "kl_weight": weight, **read(read_journal(folder / "metrics.jsonl"))}


def read(records: Sequence[Mapping[str, Any]]) -> Row:
    """KL by answer, proxy, gold and tokens of an answer by step; looks with the median KL up to them and intervals."""
    steps = [record for record in records if record["kind"] == "step"]
    kept = [max(step["episodes"] - step["failed"], 1) for step in steps]
    kls = [round(step["kl"] * step["trained_tokens"] / count, 3) for step, count in zip(steps, kept, strict=True)]
    looks = []
    for look in (record for record in records if record["kind"] == "eval"):
        n, parts, between = look["version"]["n"], look["parts"], look["intervals"]
        point = {"version": n, "root_kl": sqrt(typical(kls, n)), "proxy": parts["model"], "gold": parts[GOLD]}
        looks.append(point | {"proxy_interval": between["model"], "gold_interval": between[GOLD]})
    return {
        "kl": kls,
        "proxy": [round(step["parts"]["model"], 3) for step in steps],
        "gold": [round(step["parts"][GOLD], 3) for step in steps],
        "tokens": [round(step["trained_tokens"] / count, 2) for step, count in zip(steps, kept, strict=True)],
        "looks": looks,
    }


def typical(kls: Sequence[float], version: int) -> float:
    """Median of the steps that ended in this version or one of the nine before it; 0 for the first model."""
    return max(median(kls[max(version - WINDOW, 0) : version]), 0.0) if version else 0.0


def summary(row: Row) -> dict[str, str]:
    """Where gold was highest among the looks, and where it ended."""
    best, last = max(row["looks"], key=lambda look: look["gold"]), row["looks"][-1]
    told = {"seed": str(row["seed"]), "kl_weight": f"{row['kl_weight']:g}"}
    for name, look in (("first", row["looks"][0]), ("best", best), ("last", last)):
        low, high = look["gold_interval"]
        told[name] = (
            f"step {look['version']}: proxy {look['proxy']:.2f}, gold {look['gold']:.3f} [{low:.3f}, {high:.3f}]"
        )
    return told


def drawing(rows: Sequence[Row]) -> str:
    """Proxy and gold of held-out tasks, over steps and over the root of the KL: four panels, a colour a run."""
    style = files("contraflow.view").joinpath("report.css").read_text(encoding="utf-8")
    axes = (("version", "steps", 0), ("root_kl", "the root of the KL", SETTLED))
    panels = []
    for (column, (key, told, since)), (line, name) in product(enumerate(axes), enumerate(("proxy", "gold"))):
        series = {
            label(row): [(look[key], look[name]) for look in row["looks"] if not 0 < look["version"] < since]
            for row in rows
        }
        plot = curves(series, unit=f"{name}, over {told}").partition("</svg>")[0]
        place = f'<svg x="{column * 580}" y="{line * 240}" width="560" height="220" '
        panels.append(plot.replace("<svg ", place, 1) + "</svg>")
    legend = "".join(
        f'<text x="{60 + 270 * place}" y="490" style="fill:var(--c{place})">{escape(label(row))}</text>'
        for place, row in enumerate(rows)
    )
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1140 500" width="1140" height="500">'
    return f"{head}<style>{style}</style>{''.join(panels)}{legend}</svg>\n"


def label(row: Row) -> str:
    return f"KL weight {row['kl_weight']:g}, seed {row['seed']}"


if __name__ == "__main__":
    main()
