"""What a dispatch that knows its domains is worth when the link between two nodes is slow: rollout and training.

    sudo python -m bench.slow_link [--mbit 200] [--starts 3]      # Linux, root; about two minutes a start

Four ranks, two in each of two network namespaces joined by one link of limited rate. One MoE (wide, so that rows are
large) is served by the engine over four ranks and trained by the trainer over four ranks, experts over ep = 4. Only the
dispatch changes: one row per (token, expert), per (token, rank), per (token, domain), and the last with its slow hop
behind the experts' work. All forms run in turn in the same processes; medians are over process starts.

The bound is Amdahl's: the baseline's time, less what the bytes no longer sent took at the link's measured rate.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench import record
from bench.links import slow_link
from contraflow.config import Engine, Parallel, Train
from contraflow.dispatch.base import Phase
from contraflow.dispatch.domains import Traffic
from contraflow.dispatch.overlap import OverlapDispatch
from contraflow.dispatch.spread import SpreadDispatch
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.folder import save_folder
from contraflow.model.moe import MoE
from contraflow.parallel.forms import choose_forms
from contraflow.parallel.mesh import Mesh, open_mesh
from contraflow.parallel.spread import load_spread
from contraflow.rollout.follow import follow
from contraflow.rollout.rank import join_ranks, led_engine, load_part
from contraflow.runtime.base import Rendezvous
from contraflow.telemetry import Account
from contraflow.train.batcher import pack
from contraflow.train.crew import open_crew
from contraflow.train.forward import Fed, Scored
from contraflow.train.optimizer import Optimizer
from contraflow.train.update import Updater
from contraflow.types import Batch, Request, Sample, Version

RANKS, DOMAIN_RANKS = 4, 2
UPDATES = 3
FORMS = ("per_expert", "all_to_all", "hierarchical", "overlapped")
NAMES = {
    "per_expert": "a row per (token, expert)",
    "all_to_all": "a row per (token, rank)",
    "hierarchical": "a row per (token, domain)",
    "overlapped": "the same, hop overlapped",
}
Row = dict[str, Any]


def model(options: argparse.Namespace) -> ModelConfig:
    """One attention head and a narrow expert: next to nothing but the rows' width costs anything."""
    return ModelConfig(
        family="qwen3_moe", vocab=256, dim=options.dim, layers=options.layers, heads=1, kv_heads=1, head_dim=64,
        experts=32, top_k=8, expert_ffn=32, renormalise=True, context=64,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, nargs="+", default=[200], help="rates of the link; 0 is unlimited")
    parser.add_argument("--starts", type=int, default=3, help="process starts a rate")
    parser.add_argument("--tokens", type=int, default=256, help="sequences, and trained tokens, of a rank")
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--wire", default="same", choices=["same", "bf16", "fp8"])
    parser.add_argument("--out", default="slow_link")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(rank_work(options)))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # namespaces are to be removed on the way out
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="slow-link-") as folder:
        save_folder(new_decoder(model(options), seed=0), Path(folder))
        for mbit in options.mbit:
            starts = [one_start(options, mbit or None, Path(folder)) for _ in range(options.starts)]
            rows += summary(mbit, starts)
            show(rows[-len(FORMS) - len(FORMS[:3]) :], starts)
            record.write(
                options.out, rows, goal="bytes <= 0.27 and <= 0.56 of the first two; rollout +40 %, +15 %, +25 %"
            )


def one_start(options: argparse.Namespace, mbit: int | None, folder: Path) -> list[Row]:
    """Every form once, in four fresh processes; what each rank saw."""
    with slow_link(mbit) as sides:
        processes = []
        for rank in range(RANKS):
            side = sides[rank // DOMAIN_RANKS]
            command = [
                sys.executable,
                "-m",
                "bench.slow_link",
                *sys.argv[1:],
                "--rank",
                str(rank),
                "--model",
                str(folder),
            ]
            environment = side.environment({**os.environ, "OMP_NUM_THREADS": "1"})
            processes.append(
                subprocess.Popen(side.command(command), env=environment, stdout=subprocess.PIPE, text=True)
            )
        try:
            said = [process.communicate(timeout=900)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    return [json.loads(text.strip().splitlines()[-1]) for text in said]


class Meetings:
    """Addresses for one process group after another: on the first side, where rank 0 is."""

    def __init__(self) -> None:
        self._port = 29400

    def next(self) -> str:
        self._port += 1
        return f"tcp://10.77.0.1:{self._port}"


def rank_work(options: argparse.Namespace) -> Row:
    """All that one rank does."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    meetings = Meetings()
    found: Row = {"link_bytes_per_s": measure_link(options, meetings)}
    found["chosen"] = chosen(options, meetings)
    for form in FORMS:
        found[f"rollout {form}"] = rollout(options, form, meetings)
    for form in FORMS[:3]:
        found[f"training {form}"] = training(options, form, meetings)
    return found


def parallel_of(form: str, options: argparse.Namespace) -> Parallel:
    return Parallel(dp=RANKS, ep=RANKS, dispatch=form, domain_ranks=DOMAIN_RANKS, wire=options.wire, deadline_s=120.0)


def measure_link(options: argparse.Namespace, meetings: Meetings) -> float:
    """Bytes a second that go each way across the link when all ranks send at once: what an exchange can have."""
    with open_mesh(parallel_of("all_to_all", options), rank=options.rank, init_method=meetings.next()) as mesh:
        other = [rank // DOMAIN_RANKS != options.rank // DOMAIN_RANKS for rank in range(RANKS)]
        sizes = [2 << 20 if far else 0 for far in other]
        sent, got = torch.zeros(sum(sizes), dtype=torch.uint8), torch.zeros(sum(sizes), dtype=torch.uint8)
        dist.all_to_all_single(got, sent, sizes, sizes, group=mesh.world)
        seconds = []
        for _ in range(3):
            dist.barrier(group=mesh.world)
            began = time.perf_counter()
            dist.all_to_all_single(got, sent, sizes, sizes, group=mesh.world)
            dist.barrier(group=mesh.world)
            seconds.append(time.perf_counter() - began)
        return DOMAIN_RANKS * sum(sizes) / statistics.median(seconds)


def chosen(options: argparse.Namespace, meetings: Meetings) -> dict[str, str]:
    """What "auto" takes here, and what it saw."""
    with open_mesh(parallel_of("auto", options), rank=options.rank, init_method=meetings.next()) as mesh:
        most: dict[Phase, int] = {"train": options.tokens, "decode": options.tokens}
        chose, told = choose_forms(mesh, model(options), most, clock=time.perf_counter, dtype=torch.float32)
        return {"training": chose.forms["train"], "rollout": chose.forms["decode"], "told": "; ".join(told)}


def rollout(options: argparse.Namespace, form: str, meetings: Meetings) -> Row | None:
    """Tokens a second of the engine over four ranks, all ranks' sequences full from the first step to the last."""
    section = Engine(
        context_tokens=32, kv_tokens=32 * (options.tokens + 8), block_tokens=16, max_sequences=options.tokens,
        parallel=parallel_of(form, options),
    )  # fmt: skip
    made: list[Decoder] = []

    def part(mesh: Mesh) -> Decoder:
        made.append(load_part(Path(options.model), mesh, section))
        return made[0]

    meeting = Rendezvous(options.rank, RANKS, meetings.next())
    rank = join_ranks(section, meeting, part, clock=time.perf_counter, version=Version(0, 0))
    traffic = traffic_of(made[0])
    if options.rank:
        traffic.take()
        try:
            follow(rank.core, rank.star, rank.mesh)
        finally:
            rank.leave()
        return {"across": traffic.across, "inside": traffic.inside}

    async def lead() -> Row:
        engine = led_engine(rank, clock=time.perf_counter, on_broken=print)
        count = RANKS * options.tokens
        traffic.take()
        began = time.perf_counter()
        await asyncio.gather(*(engine.generate(request) for request in requests(count, options.new_tokens)))
        seconds = time.perf_counter() - began
        await engine.close()
        return {
            "tokens": count * options.new_tokens, "seconds": seconds,
            "across": traffic.across, "inside": traffic.inside,
        }  # fmt: skip

    return asyncio.run(lead())


def requests(count: int, new_tokens: int) -> Iterator[Request]:
    draw = np.random.default_rng(0)
    for number in range(count):
        prompt = draw.integers(0, 256, 2, dtype=np.int32)
        yield Request(id=str(number), prompt=prompt, seed=number, max_new_tokens=new_tokens)


def training(options: argparse.Namespace, form: str, meetings: Meetings) -> Row:
    """Tokens a second of the trainer over four ranks: forward, backward, gradient sums and AdamW."""
    with open_mesh(parallel_of(form, options), rank=options.rank, init_method=meetings.next()) as mesh:
        spread, account = load_spread(options.model, mesh), Account(time.perf_counter)
        crew = open_crew(spread.decoder, mesh, account, temperature=1.0)
        optimizer = Optimizer(spread.decoder, Train(), spread)
        updater = Updater(spread.decoder, optimizer, account, crew)
        samples = [sample(seed, options.tokens // 8) for seed in range(8 * RANKS)]
        batches = pack(samples, tokens_per_batch=options.tokens, reduction="token", shares=crew.team.shares)
        updater.update(batches, objective)
        traffic = traffic_of(spread.decoder)
        traffic.take()
        dist.barrier(group=mesh.world)
        began = time.perf_counter()
        for _ in range(UPDATES):
            updater.update(batches, objective)
        dist.barrier(group=mesh.world)
        return {
            "tokens": UPDATES * sum(s.tokens.size for s in samples), "seconds": time.perf_counter() - began,
            "across": traffic.across, "inside": traffic.inside,
        }  # fmt: skip


def sample(seed: int, length: int) -> Sample:
    draw = np.random.default_rng(seed)
    ones = np.ones(length, np.float32)
    mask = np.arange(length) > 0
    tokens = draw.integers(0, 256, length, dtype=np.int32)
    return Sample(tokens=tokens, mask=mask, behaviour=-ones, advantages=ones, versions=np.zeros(length, np.int32))


def objective(batch: Batch, fed: Fed, scored: Scored) -> torch.Tensor:
    weights_N = torch.from_numpy(batch.weights[batch.mask])
    return -(weights_N * scored.logprobs_N).sum()


def traffic_of(decoder: Decoder) -> Traffic:
    """What the dispatch of all its layers counts."""
    dispatch = next(module.dispatch for module in decoder.modules() if isinstance(module, MoE))
    spread = dispatch.spread if isinstance(dispatch, OverlapDispatch) else dispatch
    assert isinstance(spread, SpreadDispatch)
    return spread.links.traffic


def summary(mbit: int, starts: list[list[Row]]) -> list[Row]:
    """A row per form: medians over starts, bytes, gains, and how near the bound they come."""
    rows = []
    for work, forms in (("rollout", FORMS), ("training", FORMS[:3])):
        for form in forms:
            runs = [[rank[f"{work} {form}"] for rank in ranks] for ranks in starts]
            speeds = [run[0]["tokens"] / run[0]["seconds"] for run in runs]
            rows.append(
                {
                    "mbit": mbit, "work": work, "form": form, "tokens_per_s": record.spread(speeds),
                    "across_bytes_per_token": sum(rank["across"] for rank in runs[0]) / runs[0][0]["tokens"],
                    "inside_bytes_per_token": sum(rank["inside"] for rank in runs[0]) / runs[0][0]["tokens"],
                    "chosen_by_auto": [ranks[0]["chosen"][work] == form for ranks in starts].count(True),
                    "link_bytes_per_s": statistics.median(ranks[0]["link_bytes_per_s"] for ranks in starts),
                }
            )  # fmt: skip
        for row in rows[-len(forms) :]:
            for base in forms[:2]:
                compare(row, next(r for r in rows[-len(forms) :] if r["form"] == base))
    return rows


def compare(row: Row, base: Row) -> None:
    """Gain over `base`, and the gain that the bytes saved allow at the link's rate (each way carries half)."""
    ratio = row["across_bytes_per_token"] / base["across_bytes_per_token"]
    speed, other = row["tokens_per_s"]["median"], base["tokens_per_s"]["median"]
    saved_s = (1 - ratio) * base["across_bytes_per_token"] / 2 / row["link_bytes_per_s"]
    bound = (1 / other) / (1 / other - saved_s) if 1 / other > saved_s else float("inf")
    row[f"over {base['form']}"] = {"bytes": ratio, "speed": speed / other, "bound": bound}


def show(rows: list[Row], starts: list[list[Row]]) -> None:
    rate = rows[0]["link_bytes_per_s"] * 8e-6
    print(f"\nlink set to {rows[0]['mbit'] or 'no'} Mbit/s, measured {rate:.0f}; {len(starts)} starts")
    print(f"{'':10}{'':28}{'tokens/s':>10}  least-largest  bytes across/token   over per_expert      over all_to_all")
    for row in rows:
        speed = row["tokens_per_s"]
        gains = "   ".join(
            f"{gain['speed']:.2f}x of {gain['bound']:.2f} ({gain['bytes']:.3f})"
            for gain in (row.get(f"over {base}") for base in FORMS[:2])
            if gain
        )
        print(
            f"{row['work']:10}{NAMES[row['form']]:28}{speed['median']:10.0f}"
            f"  {speed['least']:.0f}-{speed['largest']:.0f}"
            f"   {row['across_bytes_per_token']:12.0f}         {gains}"
            f"{'   <- auto, ' + str(row['chosen_by_auto']) + ' starts' if row['chosen_by_auto'] else ''}"
        )


if __name__ == "__main__":
    main()
