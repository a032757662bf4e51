"""Do all algorithms learn, from the same model, on the same tasks, at the same number of sampled tokens?

    python -m bench.algorithms [NAME ...] [--seeds 3]

The shipped recipe with each algorithm's settings, PPO by its own, which differs in credit and critic alone; held-out
accuracy before and after, a table and a page with curves. Runs of other names that are in the results already are kept.
"""

import argparse
import tempfile
from pathlib import Path

from bench.learning import Curve, Kept, Settings, Wanted, kept, learn_all, mean_curve, of_name, page
from bench.record import write

RECIPE = "recipes/tiny_cpu.toml"
RECIPES = {"ppo": "recipes/tiny_ppo.toml"}  # of those that have one of their own
WANTED = 0.75
ALGORITHMS: dict[str, Settings] = {
    "ppo": {},
    "grpo": {},
    "dr_grpo": {
        "loss.advantages": '"dr_grpo"',
        "loss.reduction": '"constant"',
        "loss.constant_tokens": "4",
    },
    "rloo": {"loss.advantages": '"rloo"'},
    "reinforce++": {"loss.advantages": '"reinforce++"'},
    "gspo": {
        "loss.surrogate": '"gspo"',
        "loss.reduction": '"sequence"',
        "loss.clip_low": "0.1",
        "loss.clip_high": "0.1",
    },
    "cispo": {"loss.surrogate": '"cispo"', "loss.clip_low": "1.0", "loss.clip_high": "4.0"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(ALGORITHMS), help=f"of {', '.join(ALGORITHMS)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    options = parser.parse_args()
    have = kept("algorithms", options.names)
    with tempfile.TemporaryDirectory(prefix="algorithms-bench-") as scratch:
        wanted = [
            Wanted(name, seed, ALGORITHMS[name], RECIPES.get(name, RECIPE))
            for name in options.names
            for seed in range(options.seeds)
        ]
        for run in learn_all(wanted, Path(scratch), options.jobs):
            print(f"{run.name:12} seed {run.seed}: {run.looks[0][1]:.3f} -> {run.last:.3f} {run.fault}", flush=True)
            have.runs.append(run)
            report(have)
    table(have.runs)


def report(have: Kept) -> None:
    """Results and page, after every run."""
    rows, facts = [run._asdict() for run in have.runs], {"made": have.made, "recipes": RECIPES}
    path = write("algorithms", rows, wanted=WANTED, settings=ALGORITHMS, **facts)
    series = {name: mean_curve(mine) for name, mine in of_name(have.runs)}
    own = "".join(f", {name} by {recipe}" for name, recipe in RECIPES.items() if name in series)
    about = "held-out accuracy against sampled tokens that were trained; means over seeds"
    lines = [f"{RECIPE}{own}; {about}. Goal: {WANTED}."]
    path.with_suffix(".html").write_text(page("Algorithms", lines, {"Held-out accuracy": series}), encoding="utf-8")


def table(runs: list[Curve]) -> None:
    """One row a name."""
    print(
        f"{'algorithm':12} {'before':>7} {'after, least':>13} {'mean':>6} {'tokens':>8} {'clipped':>8} {'reached':>8}"
    )
    for name, mine in of_name(runs):
        lasts = [run.last for run in mine]
        print(
            f"{name:12} {mine[0].looks[0][1]:7.3f} {min(lasts):13.3f} {sum(lasts) / len(lasts):6.3f}"
            f" {sum(run.tokens for run in mine) // len(mine):8} {sum(run.clipped for run in mine) / len(mine):8.4f}"
            f" {sum(last >= WANTED for last in lasts)} of {len(lasts)}"
        )


if __name__ == "__main__":
    main()
