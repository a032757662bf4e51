"""Where do a reward model and the rule behind it part, as the policy moves away from where it began?

    python -m bench.over_optimisation [--steps 150] [--weights 0.2,0.05,1e-9] [--jobs 2]

Makes the reward model of recipes/rlhf_reward_model.toml, then runs recipes/rlhf_grpo.toml at several weights of the KL.
Held-out rewards over the root of the KL to the first model (Gao et al. 2210.10760): a table, JSON and a drawing.
The KL is the k3 estimate of a step's own samples, by answer, of the step that ended at the version looked at.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from html import escape
from importlib.resources import files
from math import sqrt
from pathlib import Path
from typing import Any

from bench.record import RESULTS, write
from contraflow.telemetry import read_journal
from contraflow.view.charts import curves

MEASURED = 1e-9  # a weight that moves nothing, so that the KL is measured where none is asked for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--weights", default=f"0.2,0.05,{MEASURED}")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    options = parser.parse_args()
    weights = [float(word) for word in options.weights.split(",")]
    with tempfile.TemporaryDirectory(prefix="over-optimisation-") as scratch:
        model = Path(scratch) / "reward_model"
        told = call("reward-model", "recipes/rlhf_reward_model.toml", str(model)).strip().splitlines()
        with ThreadPoolExecutor(options.jobs) as threads:
            runs = list(threads.map(lambda w: learn(w, options.steps, model, Path(scratch) / f"kl-{w:g}"), weights))
    rows = [{"kl_weight": weight, **point} for weight, run in zip(weights, runs, strict=True) for point in run]
    write("over_optimisation", rows, reward_model=[line.rpartition("reward_model: ")[2] for line in told[-2:]])
    (RESULTS / "over_optimisation.svg").write_text(drawing(rows), encoding="utf-8")
    for row in rows:
        print("   ".join(f"{key} {value:.4g}" for key, value in row.items()))


def call(*words: str) -> str:
    """One command of ours."""
    line = [sys.executable, "-c", "from contraflow.cli import main; main()", *words]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout


def learn(weight: float, steps: int, model: Path, folder: Path) -> list[dict[str, float]]:
    """One run's looks, each with the KL of the step before it."""
    changed = {"loss.kl_weight": weight, "run.steps": steps, "reward.model.folder": model, "train.learning_rate": 6e-4}
    words = [word for key, value in changed.items() for word in ("--set", f"{key}={value}")]
    call("run", "recipes/rlhf_grpo.toml", "--plain", "--folder", str(folder), *words)
    return read(read_journal(folder / "metrics.jsonl"))


def read(records: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Looks of a run: version, KL by answer, its root, proxy and gold."""
    steps = {record["step"]: record for record in records if record["kind"] == "step"}
    points = []
    for look in (record for record in records if record["kind"] == "eval"):
        n = look["version"]["n"]
        step = steps.get(n - 1)
        kl = 0.0 if step is None else step["kl"] * step["trained_tokens"] / max(step["episodes"] - step["failed"], 1)
        point = {"version": n, "kl": kl, "root_kl": sqrt(max(kl, 0.0))}
        points.append(point | {"proxy": look["parts"]["model"], "gold": look["parts"]["even"]})
    return points


def drawing(rows: Sequence[Mapping[str, float]]) -> str:
    """Proxy and gold over the root of the KL: two panels, a colour a weight."""
    style = files("contraflow.view").joinpath("report.css").read_text(encoding="utf-8")
    weights = list(dict.fromkeys(row["kl_weight"] for row in rows))
    panels = []
    for place, name in enumerate(("proxy", "gold")):
        series = {
            f"KL weight {weight:g}": sorted((row["root_kl"], row[name]) for row in rows if row["kl_weight"] == weight)
            for weight in weights
        }
        plot = curves(series, unit=f"{name}, over the root of the KL").partition("</svg>")[0]
        panels.append(plot.replace("<svg ", f'<svg x="0" y="{place * 240}" width="560" height="220" ', 1) + "</svg>")
    legend = "".join(
        f'<text x="{60 + 170 * place}" y="490" style="fill:var(--c{place})">KL weight {escape(f"{weight:g}")}</text>'
        for place, weight in enumerate(weights)
    )
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 560 500" width="840" height="750">'
    return f"{head}<style>{style}</style>{''.join(panels)}{legend}</svg>\n"


if __name__ == "__main__":
    main()
