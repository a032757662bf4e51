"""Steps of bench/smollm2_h200.sh that need Python: rows to warm up on, and the table of what reinforcement gained.

    python -m bench.smollm2 rows FILE --model FOLDER --rows 13000
    python -m bench.smollm2 table OUT --dense FOLDER --warm FOLDER --trained FOLDER [--set section.key=value]

The recipe is bench/smollm2/rl.toml. Rows are answers of its data sets in the chat template, to tasks of the train split
that reinforcement never reaches. The table holds held-out accuracy of the three models, all data sets and each alone.
"""

import argparse
import json
import time
from pathlib import Path

import msgspec

from bench.record import machine
from contraflow.config import Recipe, load_recipe
from contraflow.envs.registry import make_env
from contraflow.errors import ConfigError
from contraflow.model.chat import ChatTemplate, Message
from contraflow.rollout.evaluate import Report, Subject, evaluate
from contraflow.rollout.examine import Exam

RECIPE = Path(__file__).parent / "smollm2" / "rl.toml"
BEYOND = 10_000_000  # the first train task of the rows: a run poses tasks from 0 on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    jobs = parser.add_subparsers(dest="job", required=True)
    rows = jobs.add_parser("rows")
    rows.add_argument("file", type=Path)
    rows.add_argument("--model", type=Path, required=True)
    rows.add_argument("--rows", type=int, default=13_000)
    table = jobs.add_parser("table")
    table.add_argument("out", type=Path)
    for name in ("dense", "warm", "trained"):
        table.add_argument(f"--{name}", type=Path, required=True)
    table.add_argument("--tasks", type=int, default=512)
    for job in (rows, table):
        job.add_argument("--set", dest="overrides", action="append", default=[])
    options = parser.parse_args()
    recipe = load_recipe(RECIPE, options.overrides)
    if options.job == "rows":
        print(f"wrote {write_rows(recipe, options.model, options.file, options.rows)} rows to {options.file}")
        return
    models = {name: getattr(options, name) for name in ("dense", "warm", "trained")}
    compare(recipe, models, options.out, options.tasks)


def write_rows(recipe: Recipe, model: Path, file: Path, count: int) -> int:
    """Questions and answers as conversations. The recipe's prompt has to be what the model's template writes."""
    env, template = make_env(recipe.env.name, recipe.env.options), ChatTemplate.load(model)
    before, _, after = str(recipe.env.options["prompt"]).partition("{question}")
    with file.open("w", encoding="utf-8") as out:
        for index in range(count):
            task = env.task("train", BEYOND + index)
            question = task.prompt.removeprefix(before).removesuffix(after)
            if template.text([Message("user", question)], ask=True) != task.prompt:
                raise ConfigError(f"the template of {model} does not write env.options.prompt for {question!r}")
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": task.reference}]
            out.write(json.dumps({"messages": turns}) + "\n")
    return count


def compare(recipe: Recipe, models: dict[str, Path], out: Path, tasks: int) -> None:
    """Examine the models on all data sets and on each alone; keep everything, print the table last."""
    sources = recipe.env.options["datasets"]
    kinds = {"all": sources} | {source["name"]: [source] for source in sources}
    found: dict[str, Report] = {}
    lines = [f"{'held-out, greedy':18}{'dense':>9}{'warm':>24}{'trained':>24}{'trained - warm':>28}"]
    for kind, chosen in kinds.items():
        env = recipe.env.model_copy(update={"options": {**recipe.env.options, "datasets": chosen}})
        of_kind, exam = recipe.model_copy(update={"env": env}), Exam(count=tasks if kind == "all" else tasks // 2)
        pair = found[kind] = evaluate(of_kind, exam, (1,), _subjects(models["warm"], models["trained"]))
        dense = evaluate(of_kind, exam, (1,), _subjects(models["dense"])) if kind == "all" else None
        cells = [result.measures["pass@1"].told() for result in pair.results]
        first = f"{dense.results[0].measures['pass@1'].mean:.3f}" if dense else ""
        gain = pair.differences["pass@1"].told()
        lines.append(f"{kind:18}{first:>9}{cells[0]:>24}{cells[1]:>24}{gain:>28}")
        print(lines[-1], flush=True)
    exam = Exam(count=tasks // 4, samples=8, temperature=1.0)
    sampled = found["sampled"] = evaluate(recipe, exam, (1, 8), _subjects(models["warm"], models["trained"]))
    kept = {**machine(), "reports": msgspec.to_builtins(found)}
    out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print("\n".join([*sampled.lines(), *lines]))


def _subjects(*folders: Path) -> list[Subject]:
    return [Subject(folder, time.monotonic, lambda answers: None) for folder in folders]


if __name__ == "__main__":
    main()
