"""A mixture of experts at inference on one GPU: our kernels, the plain form, and the bytes that bound both.

    python -m bench.experts_gpu [--shapes olmoe,qwen3] [--tokens 1,8,64,512] [--no-tiles]
    TRITON_INTERPRET=1 python -m bench.experts_gpu --device cpu --shapes tiny --tokens 1,5      # a rehearsal

Routing is uniform, another in each layer; weights of `--layers` layers take turns: no cache holds them. A number is the
least of `--repeats` replays of a CUDA graph of a call a layer, divided by the layers, in microseconds. The floor
is the bytes of the experts that were chosen over 4.3 TB/s. `plain` is LocalDispatch around torch's grouped matmuls.
With tiles, every tile that fits is tried in both matmuls for block heights near the mean expert; last comes, for each
number of tokens, the best height with its tiles beside what `kernels_experts.form` takes.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional

from bench.record import write
from contraflow.dispatch.local import LocalDispatch
from contraflow.model import kernels_experts as kernels
from contraflow.model import kernels_tokens, ops
from contraflow.model.families import ModelConfig
from contraflow.model.kernels_experts import Form, Tile
from contraflow.model.moe import MoE

BYTES_S = 4.3e12  # that an H200's memory gives
MOST_SHARED = 220 << 10  # bytes of shared memory for a tile
HEIGHTS = (16, 32, 64, 128)
SHAPES = {"olmoe": (64, 8, 2048, 1024), "qwen3": (128, 8, 2048, 768), "tiny": (4, 2, 32, 16)}  # E, K, D, F


class Case(NamedTuple):
    """A batch: for each layer its mixture, tokens, experts chosen and weights."""

    name: str
    tokens: int
    layers: list[MoE]
    x_TD: Tensor
    ids: list[Tensor]
    weights: list[Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", default="olmoe,qwen3")
    parser.add_argument("--tokens", default="1,8,32,64,128,256,512,1024,4096")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-tiles", action="store_true")
    options = parser.parse_args()
    sizes = [int(tokens) for tokens in options.tokens.split(",")]
    begun, rows, tiles = time.perf_counter(), list[dict[str, Any]](), list[dict[str, Any]]()
    with torch.inference_mode():
        for shape in options.shapes.split(","):
            layers = [mixture(shape, seed, options.device) for seed in range(options.layers)]
            if options.device == "cuda" and not options.no_tiles:
                build(case(shape, layers, max(sizes)))
                print(f"built tiles of {shape} by {time.perf_counter() - begun:.0f} s", flush=True)
            for tokens in sizes:
                batch = case(shape, layers, tokens)
                rows.append(measured(batch, options.repeats))
                if not options.no_tiles:
                    tiles.append(tuned(batch, options.repeats))
    if options.device == "cuda":
        write("experts_gpu", rows, tiles=tiles, gpu=torch.cuda.get_device_name(), triton=triton.__version__)
    print(f"{time.perf_counter() - begun:.0f} s in all; microseconds a layer")
    for table in (tiles, rows):
        show(table)


def mixture(shape: str, seed: int, device: str) -> MoE:
    experts, top_k, dim, ffn = SHAPES[shape]
    config = ModelConfig(
        family="olmoe", vocab=8, dim=dim, layers=1, heads=2, kv_heads=2, head_dim=16,
        experts=experts, top_k=top_k, expert_ffn=ffn, renormalise=shape == "qwen3",
    )  # fmt: skip
    half = torch.bfloat16 if device == "cuda" else torch.float16
    made = MoE(config, LocalDispatch(experts), half, device)
    noise = torch.Generator(device).manual_seed(seed)
    for weight in made.parameters():
        weight.normal_(0.0, 0.02, generator=noise)
    return made


def case(shape: str, layers: list[MoE], tokens: int) -> Case:
    weight = layers[0].down
    noise = torch.Generator(weight.device).manual_seed(tokens)
    x_TD = torch.randn(tokens, weight.shape[1], device=weight.device, generator=noise).to(weight.dtype)
    routes = [layer.router(x_TD, None) for layer in layers]
    return Case(shape, tokens, layers, x_TD, [ids for ids, _ in routes], [weights for _, weights in routes])


def timed(call: Callable[[int], Any], layers: int, repeats: int) -> float:
    """Microseconds of `call(layer)`: the least of the repeats, the mean of the layers."""
    for layer in range(layers):
        call(layer)
    if not torch.cuda.is_available():
        return 0.0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            call(layer)
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for mark in marks[:-1]:
        mark.record()
        graph.replay()
    marks[-1].record()
    torch.cuda.synchronize()
    return min(1000 * a.elapsed_time(b) for a, b in itertools.pairwise(marks)) / layers


def measured(batch: Case, repeats: int) -> dict[str, Any]:
    """The mixture as the engine runs it, its parts, and the plain form of each."""
    layers, x_TD = batch.layers, batch.x_TD
    count, dim, ffn = layers[0].down.shape
    used = sum(len(ids_TK.unique()) for ids_TK in batch.ids) / len(layers)
    norm_D = torch.ones_like(x_TD[0])

    def ours(at: int) -> Tensor:
        return kernels.experts(x_TD, batch.ids[at], batch.weights[at], layers[at].gate_up, layers[at].down)

    def plain(at: int) -> Tensor:
        return layers[at].dispatch.mix(x_TD, batch.ids[at], batch.weights[at], layers[at].answers)

    def plainly_added(_: int) -> Tensor:
        return ops.rms_norm(x_TD + x_TD, norm_D, 1e-5)

    def routed(at: int) -> Tensor:
        return layers[at].router(x_TD, None)[1]

    def plainly_routed(at: int) -> Tensor:
        logits_TE = functional.linear(x_TD.float(), layers[at].router.weight)
        return logits_TE.softmax(-1).topk(batch.ids[0].shape[1])[0]

    cut = kernels.form(batch.ids[0].numel(), count)
    wanted = plain(0)
    spent = {
        "floor": 3 * used * dim * ffn * x_TD.element_size() / BYTES_S * 1e6,
        "ours": timed(ours, len(layers), repeats),
        "plain": timed(plain, len(layers), repeats),
        **{f"{part}": value for part, value in parts(batch, cut, repeats).items()},
        "align": timed(lambda at: kernels.align(batch.ids[at], count, cut.rows), len(layers), repeats),
        "route": timed(routed, len(layers), repeats),
        "plain_route": timed(plainly_routed, len(layers), repeats),
        "norm": timed(lambda _: kernels_tokens.add_norm(x_TD, x_TD, norm_D, 1e-5), 8, repeats),
        "plain_norm": timed(plainly_added, 8, repeats),
    }
    gap = float((ours(0).float() - wanted.float()).norm() / wanted.float().norm())
    return {"shape": batch.name, "tokens": batch.tokens, **{k: round(v, 1) for k, v in spent.items()}, "gap": gap}


def parts(batch: Case, cut: Form, repeats: int) -> dict[str, float]:
    """Both matmuls apart."""
    return {
        name: matmul(batch, name, cut.rows, tile, repeats) for name, tile in (("hidden", cut.hidden), ("out", cut.out))
    }


def matmul(batch: Case, name: str, rows: int, tile: Tile, repeats: int) -> float:
    """Microseconds of one of the two matmuls."""
    kernel, tensors, grid, made = launch(batch, name, rows, tile)
    return timed(lambda at: kernel[grid](*tensors[at], **made), len(batch.layers), repeats)


def launch(
    batch: Case, name: str, rows: int, tile: Tile
) -> tuple[Any, list[tuple[Any, ...]], tuple[int], dict[str, Any]]:
    """The kernel, its arguments for each layer, its grid and what it is compiled for."""
    count, dim, ffn = batch.layers[0].down.shape
    pairs, top_k = batch.ids[0].numel(), batch.ids[0].shape[1]
    hidden_PF, answers_PD = batch.x_TD.new_zeros(pairs, ffn), batch.x_TD.new_zeros(pairs, dim)
    tensors, most = list[tuple[Any, ...]](), 0
    for layer, ids_TK, weights_TK in zip(batch.layers, batch.ids, batch.weights, strict=True):
        order_P, blocks_3B = kernels.align(ids_TK, count, rows)
        most = blocks_3B.shape[1]
        first = (
            (batch.x_TD, kernels.fetched(layer.gate_up, tile), hidden_PF)
            if name == "hidden"
            else (hidden_PF, kernels.fetched(layer.down, tile), weights_TK, answers_PD)
        )
        tensors.append((*first, order_P, blocks_3B, most, dim, ffn))
    wide, deep, kernel = (ffn, dim, kernels._hidden) if name == "hidden" else (dim, ffn, kernels._answers)
    made = kernels.constants(rows, tile, wide, deep, top_k)
    return kernel, tensors, (most * triton.cdiv(wide, tile.cols),), made


def candidates(name: str, rows: int) -> Iterator[Tile]:
    """Tiles of so many rows that fit in shared memory and registers."""
    stages = {64: (3, 5), 128: (3,), 256: (3,)}
    for cols, depth, warps, bulk, turned in itertools.product(
        (32, 64, 128, 256), stages, (4, 8), (False, True), (False, True)
    ):
        outputs = cols * (2 if name == "hidden" else 1)
        if turned and (rows > 64 or cols < 64):
            continue  # no fuller than as they lie
        if rows * outputs > 128 * 256 or outputs > 256 or depth * cols > 16384 or (depth == 256 and rows > 32):
            continue
        if (warps == 4 and rows * outputs > 8192) or (warps == 8 and rows * outputs < 8192):
            continue
        for count in stages[depth]:
            if 40 << 10 <= (outputs + rows) * depth * 2 * count <= MOST_SHARED:  # enough on its way; and room for it
                yield Tile(cols, depth, warps, count, bulk, turned)


def near(batch: Case) -> list[int]:
    """Heights to try: the least that holds the mean expert, and the next."""
    mean = batch.ids[0].numel() / len(batch.layers[0].down)
    least = next((at for at, rows in enumerate(HEIGHTS) if mean <= rows), len(HEIGHTS) - 1)
    return list(HEIGHTS[least : least + 2])


def build(batch: Case) -> None:
    """Compile every tile, as many at once as there are threads for."""
    with triton.AsyncCompileMode(ThreadPoolExecutor(16)):
        for rows, name in itertools.product(HEIGHTS, ("hidden", "out")):
            for tile in candidates(name, rows):
                kernel, tensors, grid, made = launch(batch, name, rows, tile)
                kernel.warmup(*tensors[0], grid=grid, **made)


def tuned(batch: Case, repeats: int) -> dict[str, Any]:
    """The best height and tiles, and the form in use."""
    found = list[tuple[float, Form, float, float]]()
    for rows in near(batch):
        best = {
            name: min((matmul(batch, name, rows, tile, repeats), tile) for tile in candidates(name, rows))
            for name in ("hidden", "out")
        }
        (hidden_us, hidden), (out_us, out) = best["hidden"], best["out"]
        found.append((hidden_us + out_us, Form(rows, hidden, out), hidden_us, out_us))
    found.sort()
    used = kernels.form(batch.ids[0].numel(), len(batch.layers[0].down))
    row: dict[str, Any] = {"shape": batch.name, "tokens": batch.tokens}
    row["in_use"] = round(sum(parts(batch, used, repeats).values()), 1)
    for place, (_, form, hidden_us, out_us) in enumerate(found):
        row[f"best{place}"] = f"{form.rows}: {hidden_us:.1f} {tuple(form.hidden)} + {out_us:.1f} {tuple(form.out)}"
    return row


def show(rows: list[dict[str, Any]]) -> None:
    heads = dict.fromkeys(key for row in rows for key in row)
    for line in [dict(zip(heads, heads, strict=True)), *rows]:
        cells = (line.get(key, "") for key in heads)
        print(
            " | ".join(
                f"{cell:.2g}" if key == "gap" and cell != "gap" else str(cell)
                for key, cell in zip(heads, cells, strict=True)
            )
        )


if __name__ == "__main__":
    main()
