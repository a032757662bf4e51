"""How far is a trainer's routing from that of an engine that rounds, and what does replay mend?

    python -m bench.routing_replay [--tasks 64] [--steps 30] [--seeds 3] [--device cpu]

The shipped model and tasks of recipes/tiny_cpu.toml. The trainer computes in fp32. Engines hold its weights as they are
(fp32), in bf16 and compute so, or with matrices rounded to 8 or 4 bits a number by the largest of their row (router
and head excepted, which no engine of ours rounds; such an engine would not pass a version's proof, so it is only here).

First, the same weights on both sides: shares of tokens whose experts differ, and log-ratios (trainer over engine) of
sampled tokens, each without and with the engine's experts replayed; of all, and of those predicted from a token whose
experts differ. Beside the shipped model a deeper one of random weights, which samples nonsense.
Then training: steps of four updates, at a fourth of the recipe's rate, on what a bf16 and a 4-bit engine sampled from
the newest weights, without replay, with R2 and with R3; means over seeds, and a page with curves.
"""

import argparse
import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from bench.learning import page
from bench.record import write
from contraflow import config
from contraflow.envs.draws import derive_seed
from contraflow.envs.registry import make_env
from contraflow.model.builtin import model_folder
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.folder import load_folder, read_config
from contraflow.model.router import RouterTape
from contraflow.model.tokenizer import Tokenizer
from contraflow.rewards.registry import make_mix
from contraflow.rollout.draft import Draft
from contraflow.rollout.episode import Limits, Stage, play
from contraflow.rollout.guard import make_guard
from contraflow.rollout.native import NativeEngine
from contraflow.telemetry import Account
from contraflow.train.batcher import Credit, pack, samples
from contraflow.train.forward import Reading, feed, score
from contraflow.train.optimizer import Optimizer
from contraflow.train.routing import replayed
from contraflow.train.step import TrainStep
from contraflow.types import Chosen, Group, Sample, Ticket, Version

FOLDER, RECIPE = model_folder("builtin:tiny-moe"), Path("recipes/tiny_cpu.toml")
DEEP = {"layers": 12, "experts": 64, "top_k": 8, "expert_ffn": 32}
LEVELS = {"int8": 127, "int4": 7}
ENGINES = ("fp32", "bf16", "int8", "int4")
HELD_OUT, UPDATES = 256, 4
KEPT = ("reward", "behaviour_kl", "ratio_high", "clipped", "routes_differ")
SHAPES = {"shipped model": (3, 2, 1), "Qwen3-30B-A3B": (48, 8, 1), "DeepSeek-V3": (58, 8, 1)}  # layers, K, bytes an id


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="of trainer and engine, such as cuda")
    options = parser.parse_args()
    torch.set_num_threads(1)
    compared, device = [], options.device
    for name, trainer in (("shipped", load_folder(FOLDER, device=device)), ("deep", deep(device))):
        for kind in ENGINES:
            compared.append({"model": name, **compare(trainer, kind, options.tasks)})
            print(compared[-1], flush=True)
    learned = []
    for kind, routing, seed in product(("bf16", "int4"), ("own", "r2", "r3"), range(options.seeds)):
        learned.append(learn(kind, routing, seed, options.steps, device))
        print({k: v for k, v in learned[-1].items() if k != "steps"}, flush=True)
    sizes = {name: layers * top * size for name, (layers, top, size) in SHAPES.items()}
    path = write(
        "routing_replay" if device == "cpu" else f"routing_replay_{device}",
        [*compared, *learned],
        bytes_of_a_token=sizes,
    )
    path.with_suffix(".html").write_text(drawn(compared, learned), encoding="utf-8")
    print("wrote", path, "and a page beside it")
    table(compared, learned)


def deep(device: str) -> Decoder:
    """More layers and choices, random weights."""
    return new_decoder(replace(read_config(FOLDER), **DEEP), seed=0, std=0.1, device=device)


def rounded(trainer: Decoder, kind: str) -> Decoder:
    """What an engine of that kind makes of the trainer's weights."""
    half = kind == "bf16"
    dtype = torch.bfloat16 if half else torch.float32
    engine = Decoder(trainer.config, dtype=dtype, device=trainer.head.device)
    with torch.no_grad():
        for (name, weight), source in zip(engine.named_parameters(), trainer.parameters(), strict=True):
            weight.copy_(source)
            if kind in LEVELS and source.ndim > 1 and "router" not in name and "head" not in name:
                step = source.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LEVELS[kind]
                weight.copy_((source / step).round() * step)
    return engine


async def sampled(decoder: Decoder, first: int, tasks: int, *, seed: int, temperature: float = 1.0) -> list[Group]:
    """A group of each task from `first` on, played as a run plays it; of one greedy episode at temperature 0."""
    recipe = config.load_recipe(RECIPE)
    section = recipe.engine.model_copy(update={"routes": True})
    limits = Limits.of(recipe.rollout.model_copy(update={"temperature": temperature}), section)
    env = make_env(recipe.env.name, recipe.env.options)
    guard = make_guard(env, make_mix(recipe.reward.parts), deadline_s=60.0, context_tokens=section.context_tokens)
    engine = NativeEngine(decoder, section, clock=time.perf_counter, stepping="inline", version=Version(1, 0))
    stage = Stage(engine=engine, tokenizer=Tokenizer.load(FOLDER), guard=guard, limits=limits)
    split = "train" if temperature else "test"
    count = recipe.rollout.episodes if temperature else 1

    async def group(index: int) -> Group:
        task = await guard.task(split, index)
        keys = [(f"{index}/{place}", derive_seed(seed, index, place)) for place in range(count)]
        played = await asyncio.gather(*(play(task, stage, Draft(s), key=key, group=str(index)) for key, s in keys))
        return Group(ticket=Ticket(group=index, attempt=1, line=1), task=task, episodes=tuple(played))

    groups = await asyncio.gather(*(group(index) for index in range(first, first + tasks)))
    await engine.close()
    return list(groups)


def trained(groups: Sequence[Group]) -> list[list[Sample]]:
    """Samples with the recorded experts, as `train.routing = "r3"` has them."""
    chosen = [Chosen(group.ticket.group, 1, Version(0, 0)) for group in groups]
    return replayed(samples(groups, chosen, Credit()), "r3", "refuse").by_group


def compare(trainer: Decoder, kind: str, tasks: int) -> dict[str, Any]:
    """One engine and the trainer, of the same weights."""
    groups = asyncio.run(sampled(rounded(trainer, kind), 0, tasks, seed=0))
    made = [sample for group in trained(groups) for sample in group]
    other, first, free, followed, moved = [], [], [], [], []
    for batch in pack(made, tokens_per_batch=8192, reduction="token"):
        fed, tape = feed(batch, trainer.head.device), RouterTape()
        with torch.no_grad():
            own = score(trainer, fed._replace(given=None), Reading(), tape=tape)
            replay = score(trainer, fed, Reading(), tape=RouterTape(fed.given))
        assert batch.routes is not None
        routes_FMK = tape.routes().cpu().numpy()
        other.append((np.sort(routes_FMK, 2) != np.sort(batch.routes, 2)).any(2))
        moved.append(torch.from_numpy(other[-1].any(1))[fed.rows_N.cpu()])
        first.append(routes_FMK[:, :, 0] != batch.routes[:, :, 0])
        behaviour_N = torch.from_numpy(batch.behaviour[batch.mask])
        free.append(own.logprobs_N.cpu() - behaviour_N)
        followed.append(replay.logprobs_N.cpu() - behaviour_N)
    other_FM, first_FM = np.concatenate(other), np.concatenate(first)
    free_N, followed_N, moved_N = torch.cat(free), torch.cat(followed), torch.cat(moved)
    return {
        "engine": kind,
        "tokens": len(other_FM),
        "other_set_by_layer": other_FM.mean(0).round(5).tolist(),
        "other_first_by_layer": first_FM.mean(0).round(5).tolist(),
        "other_set_in_some_layer": round(float(other_FM.any(1).mean()), 5),
        "without": spoken(free_N),
        "replayed": spoken(followed_N),
        "of_differing": {"without": spoken(free_N[moved_N]), "replayed": spoken(followed_N[moved_N])},
        "sample_bytes": round(fmean(sample.routes.nbytes for sample in made), 1),  # type: ignore[union-attr]
        "sample_tokens": round(fmean(sample.tokens.size for sample in made), 1),
    }


def spoken(ratio_N: torch.Tensor) -> dict[str, float]:
    """A log-ratio in numbers; nothing of none."""
    if not ratio_N.numel():
        return {}
    ratio_N = ratio_N.double()
    size_N = ratio_N.abs()
    k3 = (ratio_N.exp() - 1 - ratio_N).mean()
    found = {"mean": ratio_N.mean(), "mean_size": size_N.mean(), "largest": size_N.max(), "kl": k3}
    return {name: float(f"{value:.3g}") for name, value in found.items()}


def learn(kind: str, routing: str, seed: int, steps: int, device: str) -> dict[str, Any]:
    """A short training on an engine's samples, of the newest weights each time."""
    recipe, trainer = config.load_recipe(RECIPE), load_folder(FOLDER, device=device)
    rate = recipe.train.learning_rate / UPDATES
    train = recipe.train.model_copy(update={"routing": routing, "updates": UPDATES, "learning_rate": rate})
    account = Account(time.perf_counter)
    optimizer = Optimizer(trainer, train)
    step = TrainStep(trainer, optimizer, account, train=train, loss=recipe.loss, temperature=1.0)
    before, told, size = accuracy(trainer), [], recipe.buffer.groups_per_step // 2
    for number in range(steps):
        groups = asyncio.run(sampled(rounded(trainer, kind), number * size, size, seed=seed))
        made = trained(groups)
        given = made if routing == "r3" else replayed(made, "own", "own").by_group
        numbers = step.run(given, step=number, seed=seed).numbers
        told.append(
            {
                "reward": round(fmean(episode.reward for group in groups for episode in group.episodes), 4),
                "behaviour_kl": float(f"{numbers.behaviour_kl:.4g}"),
                "ratio_high": float(f"{numbers.ratio_high:.4g}"),
                "clipped": round(numbers.clipped_low + numbers.clipped_high, 5),
                "routes_differ": round(fmean(numbers.routes_differ or [0.0]), 5),
            }
        )
    last = told[-max(1, steps // 3) :]
    return {
        "training": f"{kind}, {routing}",
        "seed": seed,
        "accuracy": [before, accuracy(trainer)],
        **{f"{name}_last_third": float(f"{fmean(row[name] for row in last):.4g}") for name in KEPT},
        "steps": told,
    }


def accuracy(trainer: Decoder) -> float:
    """Held-out tasks that the trainer's own weights answer rightly."""
    copy = rounded(trainer, "fp32")
    groups = asyncio.run(sampled(copy, 0, HELD_OUT, seed=0, temperature=0.0))
    return fmean(float(group.episodes[0].parts["correct"] == 1.0) for group in groups)


def means(learned: Sequence[dict[str, Any]], name: str) -> dict[str, list[tuple[float, float]]]:
    """By training: a number over steps, the mean over seeds."""
    lines = {}
    for training in dict.fromkeys(row["training"] for row in learned):
        runs = [[step[name] for step in row["steps"]] for row in learned if row["training"] == training]
        lines[training] = [(place + 1.0, fmean(values)) for place, values in enumerate(zip(*runs, strict=True))]
    return lines


def drawn(compared: Sequence[dict[str, Any]], learned: Sequence[dict[str, Any]]) -> str:
    """Curves of the trainings, and the table as lines."""
    lines = ["Shipped model, fp32 trainer, engines that round; means over seeds.", *rows(compared)]
    largest = max((step["behaviour_kl"] for row in learned for step in row["steps"]), default=1.0)
    kl = {k: [(x, y / largest) for x, y in line] for k, line in means(learned, "behaviour_kl").items()}
    charts = {
        "Reward of what the engine sampled, by step": means(learned, "reward"),
        f"KL(behaviour, new), 1.0 being {largest:.3g}, by step": kl,
        "Share of replayed tokens that would have gone elsewhere, by step": means(learned, "routes_differ"),
    }
    return page("Routing replay", lines, charts)


def rows(compared: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One line an engine."""
    for row in compared:
        told = [f"{row['model']:8} {row['engine']:5} elsewhere {100 * row['other_set_in_some_layer']:5.1f} %"]
        for what, pair in (("all", row), ("elsewhere", row["of_differing"])):
            free, followed = pair["without"], pair["replayed"]
            names = ("mean_size", "largest", "kl") if free else ()
            told += [f"{what} {name} {free[name]:.1e} -> {followed[name]:.1e}" for name in names]
        yield "; ".join(told)


def table(compared: Sequence[dict[str, Any]], learned: Sequence[dict[str, Any]]) -> None:
    """What to look at first."""
    print("\n".join(rows(compared)))
    for training in dict.fromkeys(row["training"] for row in learned):
        mine = [row for row in learned if row["training"] == training]
        ends = " ".join(f"{row['accuracy'][0]:.3f}->{row['accuracy'][1]:.3f}" for row in mine)
        told = ", ".join(f"{name} {fmean(row[f'{name}_last_third'] for row in mine):.4g}" for name in KEPT)
        print(f"{training:9} held-out {ends}; last third: {told}")


if __name__ == "__main__":
    main()
