"""Runs of a recipe with some settings changed, and what they learned: the common part of benchmarks about learning.

Takes a recipe, settings and seeds; gives one `Curve` a run, and a page with curves of means. Each run is a process of
its own. Does not judge.
"""

import json
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from bench.record import RESULTS, command, machine
from contraflow.telemetry import read_journal
from contraflow.view.charts import curves

Settings = Mapping[str, str]


class Curve(NamedTuple):
    """One run. `looks` are (sampled tokens that were trained, held-out accuracy); `fault` is why it ended early."""

    name: str
    seed: int
    looks: list[tuple[int, float]]
    steps: int
    tokens: int
    age_mean: float  # of trained tokens, over all steps
    age_max: int
    entropy: float  # of the last step
    clipped: float  # share of tokens, mean over steps
    fault: str = ""

    @property
    def last(self) -> float:
        return self.looks[-1][1] if self.looks else 0.0

    @property
    def best(self) -> float:
        return max((accuracy for _, accuracy in self.looks), default=0.0)


def learn(recipe: str, name: str, settings: Settings, seed: int, folder: Path) -> Curve:
    """One whole run; one that fails is told of, with what it had learned."""
    command = [sys.executable, "-c", "from contraflow.cli import main; main()", "run", recipe, "--plain"]
    command += ["--folder", str(folder)]
    for key, value in {**settings, "run.seed": str(seed)}.items():
        command += ["--set", f"{key}={value}"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    fault = "" if ended.returncode == 0 else ended.stderr.strip().splitlines()[-1]
    journal = folder / "metrics.jsonl"
    if not journal.is_file():
        raise RuntimeError(f"{' '.join(command)} did not begin: {ended.stderr}")
    return read(read_journal(journal), name, seed, fault)


class Wanted(NamedTuple):
    """One run to make."""

    name: str
    seed: int
    settings: Settings
    recipe: str


def learn_all(wanted: Sequence[Wanted], scratch: Path, jobs: int) -> Iterator[Curve]:
    """Curves in the order of `wanted`, `jobs` runs at a time: what is learned does not depend on how fast."""
    with ThreadPoolExecutor(jobs) as threads:
        yield from threads.map(
            lambda one: learn(one.recipe, one.name, one.settings, one.seed, scratch / f"{one.name}-{one.seed}"), wanted
        )


def read(records: Sequence[Mapping[str, Any]], name: str, seed: int, fault: str) -> Curve:
    """A run's records as a curve."""
    steps = [record for record in records if record["kind"] == "step"]
    tokens = 0
    looks = []
    for record in records:
        if record["kind"] == "step":
            tokens += record["trained_tokens"]
        elif record["kind"] == "eval":
            looks.append((tokens, record["accuracy"]))
    return Curve(
        name=name,
        seed=seed,
        looks=looks,
        steps=len(steps),
        tokens=tokens,
        age_mean=round(sum(s["age_mean"] * s["trained_tokens"] for s in steps) / max(tokens, 1), 3),
        age_max=max((s["age_max"] for s in steps), default=0),
        entropy=round(steps[-1]["entropy"], 4) if steps else 0.0,
        clipped=round(sum(s["clipped_low"] + s["clipped_high"] for s in steps) / max(len(steps), 1), 4),
        fault=fault,
    )


def of_name(all_runs: Sequence[Curve]) -> Iterator[tuple[str, list[Curve]]]:
    """Runs by name, in the order of first mention."""
    for name in dict.fromkeys(run.name for run in all_runs):
        yield name, [run for run in all_runs if run.name == name]


class Kept(NamedTuple):
    """What earlier calls measured and this one adds to, and how: names of runs with command, date and machine."""

    runs: list[Curve]
    made: list[dict[str, Any]]


def kept(result: str, again: Collection[str]) -> Kept:
    """What bench/results has of other names than `again`, whose runs are made by this call. A file without `made` is of
    the runs that its command names; who made its others is not known."""
    path, now = RESULTS / f"{result}.json", {"names": list(again), "command": command(), **machine()}
    if not path.is_file():
        return Kept([], [now])
    record = json.loads(path.read_text(encoding="utf-8"))
    runs = [run for run in (Curve(**row) for row in record["rows"]) if run.name not in again]
    names = list(dict.fromkeys(run.name for run in runs))
    facts = ("command", *(fact for fact in machine() if fact in record))
    told = [name for name in names if name.split(" ")[0] in record["command"].split(" ")] or names
    earlier = record.get("made") or [{"names": told, **{fact: record[fact] for fact in facts}}]
    still = [{**one, "names": [name for name in one["names"] if name in names]} for one in earlier]
    return Kept(runs, [*(one for one in still if one["names"]), now])


def mean_curve(runs: Sequence[Curve]) -> list[tuple[float, float]]:
    """The mean over runs, look by look, as far as all of them went."""
    rows = zip(*(run.looks for run in runs), strict=False)
    return [(sum(x for x, _ in row) / len(row), sum(y for _, y in row) / len(row)) for row in rows]


def page(title: str, lines: Sequence[str], charts: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> str:
    """A self-contained page: paragraphs, then one chart a heading."""
    style = files("contraflow.view").joinpath("report.css").read_text(encoding="utf-8")
    head = f"<meta charset=utf-8><title>{escape(title)}</title><style>{style}</style>"
    body = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(line)}</p>" for line in lines)]
    for heading, series in charts.items():
        body.append(f"<section><h2>{escape(heading)}</h2>{curves(series, low=0.0, high=1.0)}</section>")
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"
