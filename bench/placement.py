"""How uneven are the ranks' loads before and after experts are placed by what they were given?

    python -m bench.placement [--seeds 20] [--run RUN]

Loads of the busiest rank over the mean: with experts in order, placed, and placed with one or two spare slots a rank;
on the loads that the placement was made for ("fit") and on later ones ("drift"). Loads are

- recorded: what the shipped model's router gives its experts on prompts and answers of recipes/tiny_cpu.toml. Drift
  is the same model on other tasks, the loads times exp(0.3 n), n normal, and, for a RUN of that recipe, its last model;
- drawn: 8192 tokens choose 8 experts without replacement (Gumbel top-k, which is Plackett-Luce), the popularity of
  experts being log-normal or Zipf's in random order. Drift is another batch, popularity times exp(0.3 n).
"""

import argparse
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from bench.record import write
from contraflow.config import load_recipe
from contraflow.dispatch.placement import Placement, Sizes, contiguous, imbalance, place, rank_loads
from contraflow.envs.registry import make_env
from contraflow.model.attention import PackedPlan
from contraflow.model.builtin import model_folder
from contraflow.model.folder import load_folder
from contraflow.model.router import RouterTape
from contraflow.model.tokenizer import Tokenizer
from contraflow.view.charts import curves, heat

MODEL, RECIPE, TASKS = "builtin:tiny-moe", Path("recipes/tiny_cpu.toml"), 1024
TOKENS, CHOICES, DRIFT = 8192, 8, 0.3
WAYS = ("in order", "placed", "placed, 1 spare", "placed, 2 spare")
DRAWN = [(128, 8), (128, 16), (128, 32), (128, 64), (256, 8), (256, 16), (256, 32), (256, 64)]  # experts, ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--run", type=Path, help="the folder of a run of recipes/tiny_cpu.toml that is over")
    options = parser.parse_args()
    loads_ME, rows = routed(model_folder(MODEL), 0), []
    for row in [*recorded(loads_ME, options.seeds, options.run), *drawn(options.seeds)]:
        rows.append(row)
        print(row, flush=True)
    facts = {"seeds": options.seeds, "tokens": TOKENS, "drift": DRIFT, "recorded": loads_ME.tolist()}
    path = write("placement", rows, **facts, seconds_to_place_a_layer=planning())
    path.with_suffix(".html").write_text(page(rows, loads_ME), encoding="utf-8")
    print("wrote", path, "and a picture beside it")


def recorded(loads_ME: Tensor, seeds: int, run: Path | None) -> Iterable[dict[str, Any]]:
    """The shipped model, over its layers."""
    folder, noise = model_folder(MODEL), torch.Generator().manual_seed(0)
    later = {"other tasks": [routed(folder, TASKS)], "drift": [drifted(loads_ME, noise) for _ in range(seeds)]}
    if run is not None:
        later["after the run"] = [routed(run / "model", 0)]
    for ranks in (2, 4, 8):
        yield {
            "loads": "recorded",
            "experts": loads_ME.shape[1],
            "ranks": ranks,
            **before_after(loads_ME, later, ranks),
        }


def routed(folder: Path, first: int) -> Tensor:
    """Tokens of each expert, `[M, E]`, over tasks `first` and following of the laptop recipe."""
    recipe, tokenizer = load_recipe(RECIPE), Tokenizer.load(folder)
    env, decoder, tape = make_env(recipe.env.name, recipe.env.options), load_folder(folder), RouterTape()
    tasks = [env.task("train", index) for index in range(first, first + TASKS)]
    rows = [[*tokenizer.encode(task.prompt, special=True), *tokenizer.encode(task.reference)] for task in tasks]
    starts = [0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()]
    positions_T = torch.cat([torch.arange(len(row)) for row in rows])
    with torch.no_grad():
        decoder(torch.tensor(list(chain(*rows))), positions_T, PackedPlan(starts), tape=tape)
    return tape.loads()


def drifted(loads_ME: Tensor, noise: torch.Generator) -> Tensor:
    return loads_ME * (DRIFT * torch.randn(loads_ME.shape, generator=noise)).exp()


def drawn(seeds: int) -> Iterable[dict[str, Any]]:
    """Routers of larger models; each seed is a layer."""
    for skew in ("log-normal", "zipf"):
        for experts in (128, 256):
            noise = torch.Generator().manual_seed(experts)
            popular_ME = torch.stack([popularity(skew, experts, noise) for _ in range(seeds)])
            moved_ME = popular_ME + DRIFT * torch.randn(popular_ME.shape, generator=noise)
            loads_ME, later_ME = (torch.stack([chosen(row, noise) for row in m]) for m in (popular_ME, moved_ME))
            for ranks in (ranks for size, ranks in DRAWN if size == experts):
                found = before_after(loads_ME, {"drift": [later_ME]}, ranks)
                yield {"loads": skew, "experts": experts, "ranks": ranks, **found}


def popularity(skew: str, experts: int, noise: torch.Generator) -> Tensor:
    """Logarithms, `[E]`: normal of deviation 1, or Zipf's of exponent 1."""
    if skew == "log-normal":
        return torch.randn(experts, generator=noise)
    return -(1.0 + torch.randperm(experts, generator=noise)).log()


def chosen(popular_E: Tensor, noise: torch.Generator) -> Tensor:
    """Tokens of each expert, `[E]`."""
    gumbel_TE = -torch.empty(TOKENS, len(popular_E)).exponential_(generator=noise).log()
    ids_TK = (popular_E + gumbel_TE).topk(CHOICES).indices
    return torch.bincount(ids_TK.flatten(), minlength=len(popular_E))


def before_after(loads_ME: Tensor, later: dict[str, list[Tensor]], ranks: int) -> dict[str, Any]:
    """Imbalance by way of placing and by what it is judged on, the mean over layers and draws."""
    experts, found = loads_ME.shape[1], {}
    plain = [contiguous(sizes(experts, ranks, spare=0))] * len(loads_ME)
    placed = [place(loads_ME, sizes(experts, ranks, spare)) for spare in range(3)]
    for way, placements in zip(WAYS, (plain, *placed), strict=True):
        found[way] = {"fit": mean([loads_ME], placements)}
        found[way] |= {name: mean(draws, placements) for name, draws in later.items()}
    return found


def sizes(experts: int, ranks: int, spare: int) -> Sizes:
    return Sizes(experts=experts, ranks=ranks, slots=experts // ranks + spare, domain_ranks=math.gcd(ranks, 8))


def mean(draws: list[Tensor], placements: list[Placement]) -> float:
    """Over layers and draws, to three digits."""
    pairs = (pair for loads_ME in draws for pair in zip(loads_ME, placements, strict=True))
    return round(fmean(imbalance(*pair) for pair in pairs), 3)


def planning() -> dict[str, float]:
    """Seconds to place one layer at the sizes drawn, one spare slot a rank, by experts x ranks."""
    noise, found = torch.Generator().manual_seed(0), {}
    for experts, ranks in DRAWN:
        loads_ME = torch.randint(0, 1000, (10, experts), generator=noise)
        start = time.perf_counter()
        place(loads_ME, sizes(experts, ranks, spare=1))
        found[f"{experts} x {ranks}"] = round((time.perf_counter() - start) / len(loads_ME), 5)
    return found


def page(rows: Sequence[Mapping[str, Any]], loads_ME: Tensor) -> str:
    """Curves over ranks of what was drawn, and the rank loads of what was recorded."""
    body = [
        "<h1>Experts in order, and placed</h1><div class=sub>load of the busiest rank over the mean, after drift</div>"
    ]
    for skew in ("log-normal", "zipf"):
        mine = [row for row in rows if row["loads"] == skew and row["experts"] == 256]
        lines = {way: [(row["ranks"], row[way]["drift"]) for row in mine] for way in WAYS}
        body.append(card(f"256 experts, {skew} popularity, over ranks", curves(lines, low=1.0)))
    experts, ranks = loads_ME.shape[1], 4
    for way, spare in (("in order", None), ("placed", 0), ("placed, 1 spare slot a rank", 1)):
        here = [contiguous(sizes(experts, ranks, 0))] * len(loads_ME)
        here = here if spare is None else place(loads_ME, sizes(experts, ranks, spare))
        loads = torch.stack([rank_loads(*pair) for pair in zip(loads_ME, here, strict=True)])
        even = (loads / loads.mean(1, keepdim=True)).tolist()
        body.append(card(f"shipped model, {way}", heat(even, row_name="layer", column_name="rank")))
    style = (files("contraflow.view") / "report.css").read_text(encoding="utf-8")
    head = f'<meta charset="utf-8"><title>placement</title><style>{style}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</div></body></html>\n"


def card(title: str, drawing: str) -> str:
    return f'<div class="card"><h2>{escape(title)}</h2>{drawing}</div>'


if __name__ == "__main__":
    main()
