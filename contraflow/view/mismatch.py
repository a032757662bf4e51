"""Where log-ratios come from, for people: lines for a terminal, and a card of the report page.

Takes the records of kind `step` of a run, gives text. Does not measure anything: that is train/lab.py.
"""

from collections.abc import Mapping, Sequence
from math import log10
from typing import Any

from contraflow.algo.mismatch import CAUSES
from contraflow.view.charts import curves

Record = Mapping[str, Any]
LEAST = 1e-9  # smaller parts are drawn as this


def mismatch_lines(steps: Sequence[Record]) -> list[str]:
    """The newest look, each cause's mean over all looks, and what corrections and clips did in that step."""
    looks, empty = _looks(steps)
    blind = f"looks that saw no token of a version still at hand, such as the first after a resume: {len(empty)}"
    if not looks:
        return [blind if empty else "no step has looked: set run.mismatch_every, such as 10, and run or resume"]
    step, last = looks[-1], looks[-1]["mismatch"]
    shares = ", ".join(f"{share:.2%}" for share in last["routes_differ"])
    corrections = ", ".join(f"{name} {share:.2%}" for name, share in step["corrected"].items())
    lines = [
        f"step {step['step']}: {last['tokens']} sampled tokens, {last['refreshed']} on a cache of older weights;",
        f"{last['unknown']} passed over, whose versions are gone; entropy {last['entropy']:.3f} nats",
        f"{'log-ratio':10s} {'size':>10s} {'largest':>10s} {'KL k1':>10s} {'KL k3':>10s} {'effective':>10s}",
        *(_row(name, last["parts"][name]) for name in (*CAUSES, "all")),
    ]
    if shares:
        lines.append(f"experts of {last['routed']} fed tokens that the trainer sends elsewhere, by layer: {shares}")
    clips = f"clipped: {step['clipped_low']:.2%} below, {step['clipped_high']:.2%} above"
    lines.append(f"{clips}; corrected: {corrections or 'none'}")
    means = ", ".join(f"{name} {_mean(looks, name):.2e}" for name in CAUSES)
    lines.append(f"mean size over {len(looks)} looks: {means}")
    return [*lines, f"not among them, {blind}"] if empty else lines


def _looks(steps: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Steps that looked at tokens, and those that found none to look at: their parts are nothing, not zero."""
    looks = [step for step in steps if step.get("mismatch")]
    return [one for one in looks if one["mismatch"]["tokens"]], [one for one in looks if not one["mismatch"]["tokens"]]


def _row(name: str, part: Mapping[str, float]) -> str:
    numbers = " ".join(f"{part[column]:10.2e}" for column in ("size", "largest", "k1", "k3"))
    return f"{name:10s} {numbers} {part['effective']:10.4f}"


def _mean(looks: Sequence[Record], name: str) -> float:
    return sum(float(look["mismatch"]["parts"][name]["size"]) for look in looks) / len(looks)


def mismatch_chart(steps: Sequence[Record]) -> tuple[str, str] | None:
    """A drawing and its note; None where no step looked."""
    looks, _ = _looks(steps)
    if not looks:
        return None
    drawn = {
        name: [(one["step"] + 1, log10(max(one["mismatch"]["parts"][name]["size"], LEAST))) for one in looks]
        for name in CAUSES
    }
    last = looks[-1]["mismatch"]
    note = (
        "Mean size of each part of log(policy that trains / policy that sampled), nats a token, as a power of ten (-9:"
        " none). Numerics: engine and trainer on the same weights; cache: keys and values kept through a refresh;"
        f" staleness: newer versions. Effective sample size of the last look: {last['parts']['all']['effective']:.3f}."
    )
    if last["routed"]:
        note += f" Experts differ for {max(last['routes_differ']):.2%} of tokens in the worst layer."
    return curves(drawn, unit="10^y by step", low=log10(LEAST), high=0.0), note
