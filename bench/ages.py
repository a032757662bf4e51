"""How old may samples be? Age bounds from 0 to 8, with and without corrections: where learning breaks, what mends it.

    python -m bench.ages [WAY ...] [--seeds 3] [--ages 0 1 2 4 8] [--rate 1e-3]

Groups are few to a step and the learning rate is high, so that the policy moves far from one version to the next; the
window holds a group until it is as old as it may be. Runs of other ways and ages that are in the results already are
kept.
"""

import argparse
import tempfile
from pathlib import Path

from bench.learning import Curve, Kept, Settings, Wanted, kept, learn_all, mean_curve, of_name, page
from bench.record import write

RECIPE = "recipes/tiny_cpu.toml"
WAYS: dict[str, Settings] = {
    "none": {"loss.surrogate": '"reinforce"'},
    "tis": {"loss.surrogate": '"reinforce"', "loss.corrections": "{tis = [0.0, 2.0]}"},
    "icepop": {"loss.surrogate": '"reinforce"', "loss.corrections": "{icepop = [0.5, 2.0]}"},
    "ppo": {},
    "geometric": {"loss.corrections": "{geometric_mask = [0.8, 1.25]}"},
    "gspo": {"loss.surrogate": '"gspo"', "loss.clip_low": "0.1", "loss.clip_high": "0.1"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", default=list(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ages", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--rate", default="1e-3")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    options = parser.parse_args()
    wanted = [
        Wanted(
            f"{way} {age}",
            seed,
            {**WAYS[way], "buffer.max_age": str(age), "train.learning_rate": options.rate},
            RECIPE,
        )
        for way in options.ways
        for age in options.ages
        for seed in range(options.seeds)
    ]
    have = kept("ages", list(dict.fromkeys(one.name for one in wanted)))
    with tempfile.TemporaryDirectory(prefix="ages-bench-") as scratch:
        for run in learn_all(wanted, Path(scratch), options.jobs):
            print(
                f"{run.name:12} seed {run.seed}: best {run.best:.3f}, last {run.last:.3f}, age {run.age_mean:.2f},"
                f" entropy {run.entropy:.3f} {run.fault}",
                flush=True,
            )
            have.runs.append(run)
            report(have, options.rate)
    table(have.runs)


def report(have: Kept, rate: str) -> None:
    """Results and page, after every run: one line a way over age bounds, and each way's curves."""
    runs = have.runs
    path = write("ages", [run._asdict() for run in runs], rate=rate, ways=WAYS, made=have.made)
    by_way: dict[str, list[tuple[float, float]]] = {}
    curves_of: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, mine in of_name(runs):
        way, age = name.split(" ")
        by_way.setdefault(way, []).append((float(age), sum(run.last for run in mine) / len(mine)))
        curves_of.setdefault(way, {})[f"at most {age}"] = mean_curve(mine)
    over_age = {way: sorted(points) for way, points in by_way.items()}
    charts = {"Held-out accuracy at the end, over the age bound": over_age}
    charts |= {f"{way}: held-out accuracy over trained tokens": lines for way, lines in curves_of.items()}
    about = f"{RECIPE} at learning rate {rate}; means over seeds."
    path.with_suffix(".html").write_text(page("Age of samples", [about], charts), encoding="utf-8")


def table(runs: list[Curve]) -> None:
    """One row a way and age bound."""
    print(f"{'way':8} {'bound':>5} {'age':>6} {'least':>7} {'mean':>7} {'largest':>8}")
    for name, mine in of_name(runs):
        way, age = name.split(" ")
        lasts = [run.last for run in mine]
        old = sum(run.age_mean for run in mine) / len(mine)
        print(f"{way:8} {age:>5} {old:6.2f} {min(lasts):7.3f} {sum(lasts) / len(lasts):7.3f} {max(lasts):8.3f}")


if __name__ == "__main__":
    main()
