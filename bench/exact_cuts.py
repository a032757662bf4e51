"""What exact cuts cost: tokens computed again in prefill, tokens sampled in vain, seconds of a step.

    python -m bench.exact_cuts [--steps 20] [--every 1 5 20] [--continue-from 1]

The recipe's run in the inline runtime, with cuts that leave what is under way alone and with exact ones. Tokens repeat
exactly from the seed; seconds are of this machine as it is. Of a token that an exact cut carries over, its keys and
values are computed again; of an episode with fewer than `rollout.continue_from` tokens all are sampled again.
"""

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.record import write
from contraflow.config import Recipe, load_recipe
from contraflow.loop import Loop
from contraflow.rollout.report import RolloutReport
from contraflow.rollout.worker import RolloutWorker
from contraflow.system import open_system
from contraflow.telemetry import Journal, read_journal

RECIPE = "recipes/tiny_cpu.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, nargs="+", default=[1, 5, 20], help="steps between cuts")
    parser.add_argument("--continue-from", type=int, default=1, help="answers have 5 tokens")
    options = parser.parse_args()
    rows = [measured(every, exact, options) for every in options.every for exact in (False, True)]
    facts = {"steps": options.steps, "continue_from": options.continue_from}
    print("wrote", write("exact_cuts", rows, recipe=RECIPE, **facts))
    for row in rows:
        print(row)


def measured(every: int, exact: bool, options: argparse.Namespace) -> dict[str, Any]:
    """One run's tokens and seconds; means over its steps, or cuts."""
    steps = options.steps
    keys: dict[str, Any] = {"rollout.continue_from": options.continue_from}
    keys |= {"run.steps": steps, "run.eval_tasks": 0, "run.stop_at_accuracy": 0.0}
    keys |= {"runtime.kind": "inline", "train.checkpoint_every": every, "train.exact_checkpoints": exact}
    recipe = load_recipe(Path(RECIPE), [f"{key}={_toml(value)}" for key, value in keys.items()])
    with tempfile.TemporaryDirectory(prefix="exact-cuts-") as folder:
        report, ended = asyncio.run(one_run(recipe, Path(folder)))
        records = read_journal(Path(folder) / "metrics.jsonl")
    at = [record["at"] for record in records if record["kind"] == "step"]
    carried = [record["tokens"] for record in records if record["kind"] == "continued"]
    cuts = steps // every - (steps % every == 0)  # those that the run goes on behind
    return {
        "every": every,
        "exact": exact,
        "cuts": cuts,
        "fed_a_step": report.engine.fed_tokens / steps,
        "shared_a_step": report.engine.shared_tokens / steps,
        "sampled_a_step": report.engine.tokens / steps,
        "carried_a_cut": sum(carried) / cuts if cuts else 0.0,
        "not_in_a_group_a_step": (report.engine.tokens - ended) / steps,  # in vain, or under way at the end
        "step_s": statistics.median(b - a for a, b in itertools.pairwise(at)),
    }


async def one_run(recipe: Recipe, folder: Path) -> tuple[RolloutReport, int]:
    """What the only worker says at the end, and the sampled tokens of all groups that came to theirs."""
    async with open_system(recipe, folder, resume=False, clock=time.monotonic) as system:
        journal = Journal(folder / "metrics.jsonl")
        loop = Loop(system, recipe, journal=journal, clock=time.monotonic)
        try:
            await loop.run()
        finally:
            journal.close()
        (worker,) = system.rollouts.values()
        return await worker.call(30.0, RolloutWorker.report), loop.progress.posed.tokens


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    main()
