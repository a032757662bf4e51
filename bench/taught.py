"""What did reinforcement teach that supervised training did not? Held-out sums of the kind that its data never held.

    python -m bench.taught RUN [--tasks 200] [--samples 64]

RUN is the folder of a run of recipes/tiny_cpu.toml. For the starting model and the trained one: greedy accuracy, pass@1
and pass@K (a task counts if any of K samples at temperature 1 is right), for sums with at most one carry (taught by
recipes/tiny_moe_sft.toml) and with two or more (not in its data). A task that K samples of the starting model never
solve and the trained model solves greedily was learned rather than elicited, as far as K samples can tell.
"""

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.record import write
from contraflow.config import Engine
from contraflow.envs.registry import make_env
from contraflow.model.builtin import model_folder
from contraflow.model.folder import load_folder
from contraflow.model.tokenizer import Tokenizer
from contraflow.rollout.native import NativeEngine
from contraflow.types import Bool, Request, Task, Version

DIGITS = {"op": "+", "digits_a": 3, "digits_b": 3}
KINDS = {
    "taught: at most one carry": {**DIGITS, "max_carries": 1},
    "unseen: two or three carries": {**DIGITS, "min_carries": 2},
    "unseen: three carries": {**DIGITS, "min_carries": 3},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--samples", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = {"before": model_folder("builtin:tiny-moe"), "after": options.run / "model"}
    rows = []
    for name, kind in KINDS.items():
        env = make_env("arithmetic", {"kinds": [kind]})
        tasks = [env.task("test", index) for index in range(options.tasks)]
        rows.append(compare(name, tasks, models, options.samples))
        print(rows[-1], flush=True)
    print("wrote", write("taught", rows, tasks=options.tasks, samples=options.samples))


def compare(name: str, tasks: list[Task], models: dict[str, Path], samples: int) -> dict[str, Any]:
    """One kind of task, before and after."""
    row: dict[str, Any] = {"kind": name}
    found = {}
    for when, folder in models.items():
        greedy_N, sampled_NK = asyncio.run(answer(folder, tasks, samples))
        found[when] = (greedy_N, sampled_NK)
        row[when] = {
            "greedy": round(float(greedy_N.mean()), 3),
            "pass@1": round(float(sampled_NK.mean()), 3),
            f"pass@{samples}": round(float(sampled_NK.any(1).mean()), 3),
        }
    never_N = ~found["before"][1].any(1)
    row["never_solved_before"] = int(never_N.sum())
    row["of_these_solved_after"] = round(float(found["after"][0][never_N].mean()), 3) if never_N.any() else None
    return row


async def answer(folder: Path, tasks: list[Task], samples: int) -> tuple[Bool, Bool]:
    """Right answers: greedily `[N]`, and sampled `[N, K]`."""
    tokenizer = Tokenizer.load(folder)
    section = Engine(context_tokens=32, kv_tokens=1 << 15, max_sequences=512)
    engine = NativeEngine(load_folder(folder), section, clock=time.perf_counter, version=Version(0, 0))

    async def ask(place: int, task: Task, sample: int) -> bool:
        request = Request(
            id=f"{place}/{sample}",
            prompt=np.array(tokenizer.encode(task.prompt, special=True), np.int32),
            seed=place * 10_007 + sample,
            max_new_tokens=6,
            temperature=1.0 if sample else 0.0,
            stop_tokens=(tokenizer.eos,),
            group=str(place),
        )
        tokens = (await engine.generate(request)).tokens.tolist()
        return tokens[-1] == tokenizer.eos and tokenizer.decode(tokens[:-1]) == task.reference

    asked = [[ask(place, task, sample) for sample in range(samples + 1)] for place, task in enumerate(tasks)]
    right = np.array([await asyncio.gather(*row) for row in asked])
    await engine.close()
    return right[:, 0], right[:, 1:]


if __name__ == "__main__":
    main()
