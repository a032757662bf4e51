"""The command line: one sub-command per job. Parses, imports late, runs; the only place that reads the clock or prints.

Imports nothing heavy at module level, so that `--help` answers at once.
"""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from contraflow.cli_cluster import eks, plan
from contraflow.errors import ContraflowError

INTERRUPTED = 130  # what shells give a command that Ctrl-C ended
ALARMED = 3  # an alarm of the run ended it

app = typer.Typer(
    help="Asynchronous reinforcement learning for Mixture-of-Experts language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

bench = typer.Typer(help="Measure parts of the system on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")

app.add_typer(eks, name="eks")
app.command("plan")(plan)

Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value; may be given many times", show_default=False)
]
RunFolder = Annotated[Path, typer.Argument(help="the folder of a run", show_default=False)]


@app.command()
def run(
    recipe: Annotated[
        Path | None,
        typer.Argument(help="a recipe (TOML), such as recipes/tiny_cpu.toml; with --resume, by default the run's own"),
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="where the run lives; runs/RECIPE-DATE if not given")] = None,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on from the newest cut in --folder")] = False,
    runtime: Annotated[str | None, typer.Option(help="short for --set runtime.kind=...: local, inline or ray")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="lines instead of the live view")] = False,
) -> None:
    """Train a model by RL as the recipe says. Ctrl-C ends it cleanly (exit code 130); --resume goes on."""
    from contraflow.config import load_recipe
    from contraflow.errors import ConfigError, RunFolderError

    if resume and folder is None:
        raise RunFolderError("--resume needs --folder: which run should go on?")
    if recipe is None and not (resume and folder):
        raise ConfigError("which recipe? Give one, such as recipes/tiny_cpu.toml")
    source = recipe or Path(str(folder)) / "recipe.toml"
    if recipe is None and not source.is_file():
        raise RunFolderError(f"{folder} holds no recipe.toml: it is not the folder of a run")
    place = folder or Path("runs") / f"{source.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    settings = load_recipe(source, [*(overrides or []), *([f"runtime.kind={runtime}"] if runtime else [])])

    from contraflow.run import run_recipe
    from contraflow.view.live import open_view, run_title
    from contraflow.view.report import write_report

    with open_view(run_title(source.name, place), live=sys.stdout.isatty() and not plain) as view:
        outcome = run_recipe(settings, place, resume=resume, clock=time.monotonic, view=view)
        view.end(outcome.told(place))
    typer.echo(f"wrote {write_report(place)}")
    if outcome.stopped:
        raise typer.Exit(ALARMED if outcome.because else INTERRUPTED)


@app.command()
def resume(
    source: Annotated[str, typer.Argument(help="a run's folder, or where its cuts are (s3://bucket/run); with /CUT")],
    folder: Annotated[
        Path | None, typer.Option(help="go on in this new folder instead; needed when the source is on S3")
    ] = None,
    overrides: Overrides = None,
    plain: Annotated[bool, typer.Option("--plain", help="lines instead of the live view")] = False,
) -> None:
    """Go on with a run from its newest cut, on as many ranks as --set says; from S3 into an empty folder."""
    import threading

    from contraflow.errors import RunFolderError

    if folder is None and "://" in source:
        raise RunFolderError(f"{source} is not a folder; where should the run go on? Give --folder")
    if folder is not None:
        from contraflow.restoring import restore

        name = restore(source, folder, overrides or [], clock=time.monotonic, pause=threading.Event().wait)
        typer.echo(f"brought back cut {name} into {folder}")
    run(None, folder or Path(source), overrides, resume=True, plain=plain)


@app.command()
def export(
    cut: Annotated[str, typer.Argument(help="RUN or s3://bucket/run for the newest cut; with /line-L-step-N for one")],
    folder: Annotated[Path, typer.Argument(help="where the model is written (a Hugging Face folder)")],
) -> None:
    """Write the model of a cut as a folder that transformers loads."""
    import threading

    from contraflow.restoring import find_cut
    from contraflow.train.checkpoint import export as write_model

    space, manifest = find_cut(cut, clock=time.monotonic, pause=threading.Event().wait)
    write_model(space, manifest.id.name, folder)
    typer.echo(f"wrote {folder}: the model of cut {manifest.id.name}")


@app.command()
def report(folder: RunFolder) -> None:
    """Write RUN/report.html: one self-contained page with curves, seconds, expert load and sampled episodes."""
    from contraflow.view.report import write_report

    typer.echo(f"wrote {write_report(folder)}")


@app.command()
def inspect(
    folder: RunFolder,
    accounts: Annotated[bool, typer.Option("--accounts", help="prove it: exit code 1 if a group is not")] = False,
    mismatch: Annotated[bool, typer.Option("--mismatch", help="where log-ratios come from, instead")] = False,
) -> None:
    """What happened to every group of a run: trained, dropped (why), held; read from its ledger."""
    from contraflow.view.inspect import describe, prove
    from contraflow.view.inspect import mismatch as told

    if mismatch:
        return typer.echo(told(folder))
    typer.echo(describe(folder))
    if accounts:
        wrong = prove(folder)
        typer.echo("\n".join(wrong) or "every group is in exactly one end state of the surviving line")
        if wrong:
            raise typer.Exit(1)


@app.command()
def replay(
    folder: RunFolder,
    cut: Annotated[str, typer.Option("--from", help="the cut to begin with, such as line-0-step-20")],
    sample: Annotated[
        bool, typer.Option("--sample", help="also sample the groups again, and compare tokens and log-probabilities")
    ] = False,
) -> None:
    """Train a run's recorded groups again from a cut, and hold the weights to every later cut, bit for bit."""
    from contraflow.replay import replay as train_again

    equal = train_again(folder, cut, clock=time.monotonic, tell=typer.echo, sample=sample)
    typer.echo(f"{equal} {'cut' if equal == 1 else 'cuts'} reached bit for bit")


@app.command()
def sft(
    recipe: Annotated[
        Path, typer.Argument(help="a recipe (TOML), such as recipes/tiny_moe_sft.toml", show_default=False)
    ],
    folder: Annotated[Path, typer.Argument(help="where the model is written (a Hugging Face folder)")],
    overrides: Overrides = None,
) -> None:
    """Make a model from nothing, or train one further, on an environment's own answers."""
    from contraflow.config import load_sft_recipe
    from contraflow.train.sft import make_model

    for line in make_model(load_sft_recipe(recipe, overrides or []), folder, clock=time.monotonic):
        typer.echo(line)


@app.command("reward-model")
def reward_model(
    recipe: Annotated[
        Path, typer.Argument(help="a recipe (TOML), such as recipes/rlhf_reward_model.toml", show_default=False)
    ],
    folder: Annotated[Path, typer.Argument(help="where the reward model is written")],
    overrides: Overrides = None,
) -> None:
    """Train a reward model from preferences: pairs of a file, or made by the recipe's own rule."""
    from contraflow.config import load_reward_recipe
    from contraflow.train.reward_model import make_reward_model

    for line in make_reward_model(load_reward_recipe(recipe, overrides or []), folder):
        typer.echo(line)


@app.command()
def preferences(
    recipe: Annotated[
        Path, typer.Argument(help="a recipe (TOML), such as recipes/rlhf_reward_model.toml", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="JSON lines: those to learn from, then the held-out ones")],
    overrides: Overrides = None,
) -> None:
    """Write the preferences that a recipe's rule makes, to be looked at or changed."""
    from contraflow.config import load_reward_recipe
    from contraflow.train.preferences import write_preferences
    from contraflow.train.reward_model import preferences_of

    pairs, held_out = preferences_of(load_reward_recipe(recipe, overrides or []))
    typer.echo(f"wrote {out}: {write_preferences([*pairs, *held_out], out)} pairs, the last {len(held_out)} held out")


@app.command(name="eval")
def evaluate(
    model: Annotated[Path, typer.Argument(help="a model folder, builtin:NAME, or a run's folder", show_default=False)],
    recipe: Annotated[
        Path | None, typer.Option(help="what is asked and how it is scored; the run's own if not given")
    ] = None,
    against: Annotated[Path | None, typer.Option(help="compare with this model or run, task by task")] = None,
    tasks: Annotated[int, typer.Option(help="how many")] = 256,
    samples: Annotated[int, typer.Option(help="answers to each")] = 1,
    k: Annotated[str, typer.Option("--k", help="pass@k for these; 1 and --samples if not given")] = "",
    temperature: Annotated[float | None, typer.Option(help="0: greedy; if not given, 0 for 1 sample, else 1")] = None,
    train: Annotated[bool, typer.Option("--train", help="tasks of the train split instead of held-out ones")] = False,
    seed: Annotated[int, typer.Option(help="of the sampling and of the intervals")] = 0,
    out: Annotated[Path | None, typer.Option(help="keep everything here, task by task, as JSON")] = None,
    overrides: Overrides = None,
) -> None:
    """How good a model is at a recipe's tasks: pass@k, mean reward and its parts, each with a 95 % interval."""
    import msgspec

    from contraflow.config import load_recipe
    from contraflow.errors import ConfigError
    from contraflow.rollout.evaluate import Subject, find_model
    from contraflow.rollout.evaluate import evaluate as examine_all
    from contraflow.rollout.examine import Exam

    if recipe is None and not (model / "recipe.toml").is_file():
        raise ConfigError(f"{model} is not the folder of a run: say by --recipe what to ask")
    settings = load_recipe(recipe or model / "recipe.toml", overrides or [])
    heat = (0.0 if samples == 1 else 1.0) if temperature is None else temperature
    exam = Exam(count=tasks, samples=samples, temperature=heat, split="train" if train else "test", seed=seed)
    folders = [find_model(place) for place in (against, model) if place is not None]
    with typer.progressbar(length=tasks * samples * len(folders), file=sys.stderr, label="answers") as bar:
        subjects = [Subject(folder, time.monotonic, bar.update) for folder in folders]
        found = examine_all(settings, exam, _counts(k) or sorted({1, samples}), subjects)
    typer.echo("\n".join(found.lines()))
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
        typer.echo(f"wrote {out}")


@app.command()
def upcycle(
    dense: Annotated[Path, typer.Argument(help="a dense Hugging Face folder (Qwen3 or Llama kind)")],
    folder: Annotated[Path, typer.Argument(help="where the Mixture-of-Experts model is written")],
    experts: Annotated[int, typer.Option(help="experts per layer")] = 8,
    top_k: Annotated[int, typer.Option(help="experts per token")] = 2,
) -> None:
    """Turn a dense checkpoint into a Mixture-of-Experts one that gives the same logits."""
    from contraflow.model.upcycle import upcycle_folder

    upcycle_folder(dense, folder, experts=experts, top_k=top_k)
    typer.echo(f"wrote {folder}: {experts} experts a layer, top-{top_k}")


@app.command()
def sandbox(
    isolation: Annotated[str, typer.Option(help="namespaces or filters")] = "namespaces",
    programs: Annotated[int, typer.Option(min=1, help="empty programs to run, one after the other")] = 100,
) -> None:
    """Say what holds the programs that rewards run on this machine, and how many it runs a second; or why it can't."""
    from contraflow import config
    from contraflow.rewards.sandbox.pool import Program, Sandbox

    cells = Sandbox(config.check_section(config.Sandbox, {"isolation": isolation}))
    try:
        cells.run(Program("import decimal"))
        began = time.monotonic()
        for _ in range(programs):
            cells.run(Program(""))
        rate = programs / (time.monotonic() - began)
    finally:
        cells.close()
    typer.echo(f"{cells.isolation}\n{rate:,.0f} empty programs a second, one after the other")


@bench.command("dispatch")
def bench_dispatch(
    ranks: Annotated[int, typer.Option(help="processes, at least 2, sharing out the experts")] = 4,
    domain_ranks: Annotated[int, typer.Option(help="ranks of a domain; 0: all, they are on one machine")] = 2,
    experts: Annotated[int, typer.Option(help="experts over all ranks")] = 32,
    top_k: Annotated[int, typer.Option(help="experts of a token")] = 8,
    dim: Annotated[int, typer.Option(help="width of a token")] = 512,
    expert_ffn: Annotated[int, typer.Option(help="hidden width of an expert")] = 64,
    wire: Annotated[str, typer.Option(help="same, bf16 or fp8: precision on the way to experts")] = "same",
    train: Annotated[str, typer.Option(help="token counts of a rank, forward and backward")] = "256",
    prefill: Annotated[str, typer.Option(help="token counts, forward")] = "256",
    decode: Annotated[str, typer.Option(help="token counts, forward")] = "1,16,64",
    repeats: Annotated[int, typer.Option(help="of each; medians are shown")] = 5,
    device: Annotated[str, typer.Option(help="cpu (gloo) or cuda (NCCL, a GPU a rank)")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="keep the table here, as JSON")] = None,
) -> None:
    """Time every dispatch form on ranks of this machine, and show which one `dispatch = "auto"` takes."""
    import asyncio

    from contraflow.config import Parallel, check_section
    from contraflow.dispatch.base import Phase
    from contraflow.dispatch.choose import Shape
    from contraflow.parallel.calibrator import run_calibration

    _check_sizes(ranks=ranks, experts=experts, top_k=top_k, device=device)
    spread = check_section(Parallel, {"dp": ranks, "ep": ranks, "domain_ranks": domain_ranks, "wire": wire})
    shape = Shape(
        experts=experts,
        choices=top_k,
        dim=dim,
        expert_ffn=expert_ffn,
        wire=spread.wire,
        dtype="bfloat16" if device == "cuda" else "float32",
    )
    tokens: dict[Phase, list[int]] = {"train": _counts(train), "prefill": _counts(prefill), "decode": _counts(decode)}
    table = asyncio.run(run_calibration(spread, shape, tokens, repeats=repeats, device=device, clock=time.monotonic))
    typer.echo("\n".join(table.lines()))
    if out is not None:
        out.write_text(table.json(), encoding="utf-8")
        typer.echo(f"wrote {out}")


@app.command("plan-engine")
def plan_engine(
    recipe: Annotated[Path, typer.Argument(help="a recipe (TOML), such as recipes/tiny_vllm.toml", show_default=False)],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="for programs: argv and environment of each node")] = False,
) -> None:
    """Print the command lines that start a served engine over GPUs and nodes, as engine.launch spreads it."""
    from contraflow.config import load_recipe
    from contraflow.model.builtin import model_folder
    from contraflow.model.folder import read_config
    from contraflow.rollout.launch import plan_engine as plan

    settings = load_recipe(recipe, overrides or [])
    folder = model_folder(settings.model.folder)
    made = plan(settings.engine, read_config(folder), str(folder))
    typer.echo(made.json() if as_json else made.shell())


def _check_sizes(*, ranks: int, experts: int, top_k: int, device: str) -> None:
    from contraflow.errors import ConfigError

    if ranks < 2:
        raise ConfigError(f"--ranks {ranks}: at least 2, or nothing is exchanged")
    if experts < 1 or experts % ranks:
        raise ConfigError(f"--experts {experts} is not a multiple of --ranks {ranks}")
    if not 1 <= top_k <= experts:
        raise ConfigError(f"--top-k {top_k} is not in [1, {experts}], the --experts")
    if device == "cuda":
        import torch

        if torch.cuda.device_count() < ranks:
            raise ConfigError(f"--device cuda: {ranks} ranks need a GPU each, torch sees {torch.cuda.device_count()}")


def _counts(text: str) -> list[int]:
    from contraflow.errors import ConfigError

    try:
        counts = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        counts = [-1]
    if any(count < 0 for count in counts):
        raise ConfigError(f"token counts {text!r}: write whole numbers with commas between, such as 1,16,64")
    return counts


def main() -> None:
    """Entry point: this package's errors are told in their own words, anything else keeps its traceback."""
    try:
        app()
    except ContraflowError as fault:
        typer.echo("\n".join([f"contraflow: {fault}", *getattr(fault, "__notes__", [])]), err=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        typer.echo("contraflow: interrupted", err=True)
        raise SystemExit(INTERRUPTED) from None
