"""The planner held against what was measured and published: its factors fitted on some rows, errors on all.

python -m bench.planner            # seconds; reads bench/results, writes bench/results/planner.json

Rows marked "fitted" gave a factor; the others did not enter a fit. Errors are predicted over measured, less 1.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench import published as pub
from bench.record import RESULTS, write
from bench.rollout_work import PROMPT_TOKENS, SHAPES, batch
from contraflow.balance.plan_cost import Place, decode_cost, hop_seconds, prefill_cost, refresh_seconds, train_cost
from contraflow.balance.plan_factors import Backend, Factors
from contraflow.balance.plan_layout import trainer_bytes
from contraflow.balance.plan_sizes import Sizes
from contraflow.cluster.instances import find_instance
from contraflow.config import Parallel
from contraflow.model.families import ModelConfig

V3 = ModelConfig(
    family="olmoe", vocab=1024, dim=7168, layers=1, heads=56, kv_heads=56, head_dim=128,
    experts=256, top_k=8, expert_ffn=2048,
)  # fmt: skip
ONE = Parallel()
WIRE = [  # all_to_all on 2 H200, wire only: (tokens' copies, width, bytes of a value, microseconds, fitted)
    ("rank", 7168, 2.0, 225, True),
    ("rank", 2048, 2.0, 84, True),
    ("choice", 7168, 2.0, 812, False),
    ("choice", 2048, 2.0, 255, False),
    ("rank", 7168, 1.03125, 143, False),
    ("rank", 2048, 1.03125, 76.5, False),
]
WHOLE = [(7168, (284 + 705) / 2), (2048, (103 + 226) / 2)]  # gather, wire and sum: the mean of a dispatch and a combine


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def place(config: ModelConfig, factors: Factors, instance: str = "p5en.48xlarge") -> Place:
    return Place(sizes=Sizes.of(config), instance=find_instance(instance), factors=factors)


def row(
    group: str, what: str, predicted: float, measured: float, unit: str, source: str, fitted: bool
) -> dict[str, Any]:
    return {
        "group": group,
        "what": what,
        "predicted": predicted,
        "measured": measured,
        "unit": unit,
        "error": predicted / measured - 1,
        "fitted": fitted,
        "source": source,
    }


def solve(points: list[tuple[tuple[float, ...], float]]) -> list[float]:
    """What makes sums of such parts come nearest to the values: the least squared relative error."""
    parts, values = np.array([one for one, _ in points], dtype=float), np.array([value for _, value in points])
    found: list[float] = np.linalg.lstsq(parts / values[:, None], np.ones(len(values)), rcond=None)[0].tolist()
    return found


def line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope."""
    intercept, slope = solve([((1, x), y) for x, y in points])
    return intercept, slope


def moved(config: ModelConfig, backend: Backend, ranks: int, tokens: float, back: bool, instance: str) -> float:
    """Seconds of a hop at full rate and no latency: what a slope is fitted over."""
    zero = Backend(copies=backend.copies, value_bytes=backend.value_bytes, inside_s=0, nvlink=1, network=1)
    return hop_seconds(place(config, Factors(), instance), zero, ranks, tokens, back=back)


def pair(width: int) -> ModelConfig:
    """The shape of the two-GPU rows."""
    return SHAPES["qwen3-30b-a3b"] if width == 2048 else V3


def fit_pair(copies: Any, points: list[tuple[int, bool, float]], *, told: bool = False) -> Backend:
    """A backend in one domain, from (width, back, microseconds), 4096 tokens, 2 GPUs; `told`: the way out is dearer."""
    shape = Backend(copies=copies, value_bytes=2, inside_s=0, nvlink=1)
    inside, slope, out = solve(
        [
            ((1, moved(pair(w), shape, 2, 4096, back, "p5en.48xlarge"), told and not back), us * 1e-6)
            for w, back, us in points
        ]
    )
    return Backend(copies=copies, value_bytes=2, inside_s=inside, nvlink=1 / slope, out_s=out)


def two_gpus(sms: int) -> list[tuple[int, bool, float]]:
    rows = [r for r in result("dispatch_two_gpus")["rows"] if r["kind"] == f"nvlink@{sms}"]
    return [(r["dim"], way == "combine", r[f"{way}_us"]["median"]) for r in rows for way in ("dispatch", "combine")]


def fit_fabric(name: str, copies: Any, inside: Backend, needs: str) -> Backend:
    """A backend over EFA from its fitted rows: at 2 nodes latency and rate, at more what a node adds."""
    rows = [r for r in pub.FABRIC if r.backend == name and r.fitted]

    def full(r: pub.Fabric) -> float:
        shape = Backend(copies=copies, value_bytes=r.value_bytes, inside_s=0, nvlink=1)
        return moved(V3, shape, 8 * r.nodes, r.tokens, r.way == "back", r.instance)

    latency, slope = line([(full(r), r.microseconds * 1e-6) for r in rows if r.nodes == 2])
    more = [(r.microseconds * 1e-6 - latency - slope * full(r)) / (r.nodes - 2) for r in rows if r.nodes > 2]
    return Backend(
        copies=copies, value_bytes=1.03125, inside_s=inside.inside_s, nvlink=inside.nvlink, across_s=latency,
        domain_s=sum(more) / len(more) if more else 0.0, network=1 / slope, needs=needs,
    )  # fmt: skip


def rate(carrier: str) -> float:
    """GB/s of a sender, from the fitted rows: their geometric mean."""
    found = [
        2 * billions / (gpus if carrier == "collective" else 1) / (seconds - Factors().refresh_s)
        for _, kind, billions, gpus, seconds, _, fitted in pub.REFRESH
        if kind == carrier and fitted
    ]
    return math.prod(found) ** (1 / len(found))


def decoding(shape: str, case: str) -> dict[str, Any]:
    return next(r for r in result(f"rollout_gpu_{shape}")["rows"] if r["case"] == case)


def fit() -> Factors:
    """All fitted factors, from the rows that are marked so."""
    start = Factors()
    olmoe = place(SHAPES["olmoe-1b-7b"], start)
    layers = []
    for case in ("256", "1024"):
        seen = decoding("olmoe-1b-7b", case)
        cost = decode_cost(olmoe, ONE, 512, PROMPT_TOKENS + int(case) / 2)
        layers.append((seen["step_ms"] * seen["share_decode"] / 1000 - cost.memory) / olmoe.sizes.config.layers)
    qwen, seen = place(SHAPES["qwen3-30b-a3b"], start), decoding("qwen3-30b-a3b", "256")
    fed = prefill_cost(qwen, ONE, 64 * PROMPT_TOKENS, PROMPT_TOKENS)
    prefill = start.prefill * fed.compute / (seen["seconds"] * seen["share_prefill"])
    update = next(r for r in result("train_gpu")["rows"] if r["variant"] == "whole+all")
    made = train_cost(olmoe, Parallel(recompute="layer"), update["tokens"], 2600, 16384)
    plain = fit_pair("rank", [(w, back, us) for w, us in WHOLE for back in (False, True)])
    own = fit_pair("rank", two_gpus(24), told=True)
    far = Backend(copies="node", value_bytes=2, inside_s=own.inside_s, nvlink=320 / 450)  # UCCL README: p5en, one node
    across = {"across_s": start.backends["all_to_all"].across_s, "domain_s": start.backends["all_to_all"].domain_s}
    return Factors(
        decode_layer_s=sum(layers) / len(layers),
        prefill=prefill,
        train=start.train * made.compute / (update["update_ms"]["median"] / 1000),
        sender_gb_s=rate("collective"),
        broadcast_gb_s=rate("broadcast"),
        backends={
            "all_to_all": Backend(
                copies="rank", value_bytes=2, inside_s=plain.inside_s, nvlink=plain.nvlink, network=0.81, **across
            ),
            "nvlink": own,
            "deepep": fit_fabric("deepep", "node", far, "gda"),
            "deepep_proxy": fit_fabric("deepep_proxy", "node", far, "efa"),
        },
    )


def h200_rows(factors: Factors) -> list[dict[str, Any]]:
    """This repository's own runs on one and two H200."""
    found = []
    for shape in ("olmoe-1b-7b", "qwen3-30b-a3b"):
        here, source = place(SHAPES[shape], factors), f"rollout_gpu_{shape}.json"
        for case in ("256", "1024", "lognormal"):
            seen = decoding(shape, case)
            taken = seen["seconds"]
            fitted = shape == "olmoe-1b-7b" and case != "lognormal"
            found.append(row("H200", f"{shape}, {case}: generate", generation(here, case), taken, "s", source, fitted))
            peer = next(r for r in result(f"rollout_gpu_{shape}")["peer"]["rows"] if r["case"] == case)
            what = f"{shape}, {case}: vLLM 0.24.0"
            found.append(row("other engine", what, generation(here, case), peer["seconds"], "s", source, False))
    olmoe = SHAPES["olmoe-1b-7b"]
    for variant, layers, batch_tokens, again in (("whole+all", 16, 16384, "layer"), ("kept+all", 14, 8192, "none")):
        seen = next(r for r in result("train_gpu")["rows"] if r["variant"] == variant)
        here = place(replace(olmoe, layers=layers), factors)
        layout = Parallel(recompute=again)  # type: ignore[arg-type]
        seconds = train_cost(here, layout, seen["tokens"], 2600, batch_tokens).seconds
        measured = seen["update_ms"]["median"] / 1000
        found.append(
            row("H200", f"train {variant}: update", seconds, measured, "s", "train_gpu.json", again == "layer")
        )
        held = trainer_bytes(here.sizes, layout, batch_tokens) / 2**30
        found.append(row("H200", f"train {variant}: memory", held, seen["peak_gib"], "GiB", "train_gpu.json", False))
    for sms in (24, 48):
        for width, back, us in two_gpus(sms):
            seconds = hop_seconds(place(pair(width), factors), factors.backends["nvlink"], 2, 4096, back=back)
            what = f"nvlink kernels, {sms} SMs, width {width}, {'combine' if back else 'dispatch'}"
            found.append(row("H200", what, seconds * 1e6, us, "us", "dispatch_two_gpus.json", sms == 24))
    wire = fit_pair("rank", [(w, False, us) for _, w, _, us, fitted in WIRE if fitted])
    for copies, width, size, us, fitted in WIRE:
        backend = Backend(copies=copies, value_bytes=size, inside_s=wire.inside_s, nvlink=wire.nvlink)  # type: ignore[arg-type]
        seconds = hop_seconds(place(pair(width), factors), backend, 2, 4096, back=False)
        what = f"NCCL all-to-all, wire, once a {copies}, width {width}, {size:g} bytes a value"
        found.append(row("H200", what, seconds * 1e6, us, "us", "two H200, NCCL 2.28.9", fitted))
    return found


def generation(here: Place, case: str) -> float:
    """Seconds of a batch: each step by the sequences that are not done yet."""
    drawn = batch(case, vocab=here.sizes.config.vocab, prompts=64, episodes=8, seed=0)
    lengths = np.sort(np.array(drawn.lengths).reshape(-1))
    seconds, stride = prefill_cost(here, ONE, 64 * PROMPT_TOKENS, PROMPT_TOKENS).seconds, 8
    for step in range(0, int(lengths[-1]), stride):
        alive = len(lengths) - int(np.searchsorted(lengths, step, side="right"))
        seconds += stride * decode_cost(here, ONE, alive, PROMPT_TOKENS + step).seconds
    return seconds


def refresh_rows() -> list[dict[str, Any]]:
    """On this machine: the planner's law, a constant and a rate, through `memory`; the same held against `blob`."""
    rows = {(r["way"], r["size"]): r for r in result("refresh")["rows"]}
    sizes = ("shipped", "100 MB")
    constant, slope = line([(rows["memory", s]["bytes"], rows["memory", s]["stall"]["median"]) for s in sizes])
    return [
        row(
            "this machine",
            f"refresh through {way}, {size}: the engine stands still",
            1000 * (constant + slope * rows[way, size]["bytes"]),
            1000 * rows[way, size]["stall"]["median"],
            "ms",
            "refresh.json",
            way == "memory",
        )
        for way in ("memory", "blob")
        for size in sizes
    ]


def published_rows(factors: Factors) -> list[dict[str, Any]]:
    """What others measured."""
    found = []
    pplx = fit_fabric("pplx", "choice", factors.backends["deepep"], "efa")
    for r in pub.FABRIC:
        known = {**factors.backends, "pplx": pplx}[r.backend]
        backend = Backend(**{**{f: getattr(known, f) for f in known.__struct_fields__}, "value_bytes": r.value_bytes})
        here = place(V3, factors, r.instance)
        seconds = hop_seconds(here, backend, 8 * r.nodes, r.tokens, back=r.way == "back")
        what = f"{r.backend}, {r.nodes} nodes of {r.instance}, {r.tokens} tokens, {r.way}, {r.value_bytes:g} bytes"
        found.append(row("fabric", what, seconds * 1e6, r.microseconds, "us", r.source, r.fitted))
    for what, carrier, billions, gpus, seconds, source, fitted in pub.REFRESH:
        sizes = Sizes(config=V3, experts=0, rest=int(billions * 1e9), embedding=0)
        here = Place(sizes=sizes, instance=find_instance("p5.48xlarge"), factors=factors)
        predicted = refresh_seconds(here, carrier, gpus, 1)
        found.append(row("refresh", f"{what}, {carrier}", predicted, seconds, "s", source, fitted))
    here, ep32 = place(ModelConfig(**pub.QWEN3_235B), factors), Parallel(dp=32, ep=32)
    plain, better = (prefill_cost(here, ep32, 8192, 1024, b).seconds for b in ("all_to_all", "deepep_proxy"))
    what = "prefill EP32, Qwen3-235B: gain of a DeepEP-like backend over NCCL"
    found.append(row("whole", what, plain / better, pub.PREFILL_GAIN, "x", pub.PREFILL_SOURCE, False))
    return [*found, nemo(factors)]


def nemo(factors: Factors) -> dict[str, Any]:
    """An on-policy step on 32 GPUs that generate, then train: engines of 2 GPUs, answers all of the mean length."""
    here = place(SHAPES["qwen3-30b-a3b"], factors, "p5.48xlarge")
    tokens = pub.NEMO_TOKENS_S_GPU * pub.NEMO_STEP_S * pub.NEMO_GPUS
    answer, layout = tokens / pub.NEMO_SEQUENCES, Parallel(tp=2)
    share = pub.NEMO_SEQUENCES / (pub.NEMO_GPUS / layout.ranks)
    made = answer * decode_cost(here, layout, share, answer / 2).seconds
    train = train_cost(here, Parallel(dp=32, ep=8, recompute="layer"), tokens, answer, 8192).seconds
    return row("whole", "on-policy step, generation and training", made + train, pub.NEMO_STEP_S, "s", pub.NEMO, False)


def replay(factors: Factors) -> list[dict[str, Any]]:
    """32 p5en nodes generate with a model of GLM-5's shape: what another way to experts explains of +40 %.

    Engines of 64 GPUs, prompts of 2048 tokens shared by 8 answers of 8192, 32 sequences a GPU, an engine that keeps
    latents. What NCCL's hop costs before any byte moves is an assumption, so it is varied; "pplx" stands for a backend
    whose processor threads post transfers with a latency that hardly grows with nodes.
    """
    tree = json.loads((Path(__file__).parent.parent / "recipes/shapes/glm_5_like.json").read_text(encoding="utf-8"))
    sizes = Sizes.of(ModelConfig.from_hf(tree), latents=True)
    layout, found, (prompt, answer, episodes, sequences) = Parallel(dp=64, ep=64), [], (2048, 8192, 8, 32)
    plain, pplx = factors.backends["all_to_all"], fit_fabric("pplx", "choice", factors.backends["deepep"], "efa")
    for times in (0.5, 1.0, 2.0):
        nccl = msgspec.structs.replace(plain, across_s=times * plain.across_s, domain_s=times * plain.domain_s)
        known = {**factors.backends, "all_to_all": nccl, "pplx": pplx}
        here = Place(
            sizes=sizes,
            instance=find_instance("p5en.48xlarge"),
            factors=msgspec.structs.replace(factors, backends=known),
        )
        seconds, carried = {}, 0.0
        for b in ("all_to_all", "deepep_proxy", "pplx", "deepep"):
            step = decode_cost(here, layout, sequences, prompt + answer / 2, b)
            fed = prefill_cost(here, layout, 8192, prompt, b).seconds * sequences * prompt / (8192 * episodes * answer)
            seconds[b] = step.seconds + fed
            carried = step.experts / seconds[b] if b == "all_to_all" else carried
        for b in ("deepep_proxy", "pplx", "deepep"):
            gain = seconds["all_to_all"] / seconds[b]
            found.append(
                {
                    "nccl_latency": f"{1e6 * (nccl.across_s + 6 * nccl.domain_s):.0f} us a hop over 8 nodes",
                    "to": b,
                    "share_of_a_step_to_experts_before": carried,
                    "gain": gain,
                    "share_of_post": math.log(gain) / math.log(pub.POST_GAIN),
                    "others_must_bring": pub.POST_GAIN / gain,
                }
            )
    return found


def spread_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors = sorted(abs(r["error"]) for r in rows)
    within = sum(e <= 0.15 for e in errors)
    return {"rows": len(errors), "within_15": within, "median": float(np.median(errors)), "largest": errors[-1]}


def main() -> None:
    factors = fit()
    rows = [*h200_rows(factors), *refresh_rows(), *published_rows(factors)]
    groups = {
        f"{group}, {'fitted' if fitted else 'held out'}": spread_of(chosen)
        for group in dict.fromkeys(r["group"] for r in rows)
        for fitted in (True, False)
        if (chosen := [r for r in rows if r["group"] == group and r["fitted"] == fitted])
    }
    for r in rows:
        mark = "fit " if r["fitted"] else "held"
        print(f"{mark} {r['error']:+7.1%} {r['predicted']:12.4g} {r['measured']:12.4g} {r['unit']:4} {r['what']}")
    again = replay(factors)
    print(json.dumps({"groups": groups, "replay": again}, indent=1))
    print(json.dumps(msgspec.to_builtins(factors), indent=1))
    print("wrote", write("planner", rows, groups=groups, replay=again, factors=msgspec.to_builtins(factors)))


if __name__ == "__main__":
    main()
