"""Attention kernels of the native engine on one CUDA device: microseconds, and bytes of K/V read a second.

    python -m bench.attention_gpu [--seconds 50] [--no-sweep]

Decoding: one token of each of B sequences against scattered pages, at the head shapes of OLMoE-1B-7B and
Qwen3-30B-A3B, bf16. `plain` gathers the pages and calls torch's attention; `flash` is torch's variable-length flash
attention over keys and values that lie packed, which a paged cache does not have. Times are medians of replays of one
CUDA graph that goes round several sets of pages, more than L2 holds. `share` is of 4.3 TB/s, what the H200 reads at
most; where all sets together are small (B = 1) launches are the bound. Then chunked prefill, and the kernel before
attention, each beside its plain form. Last, the best cuts of the decode kernels (`--no-sweep` leaves them out).
A rehearsal on a CPU: `TRITON_INTERPRET=1 python -m bench.attention_gpu --rehearse`.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from bench.record import write
from bench.rollout_gpu import SHAPES
from contraflow.model import kernels_attention as kernels
from contraflow.model.attention import FLASH_GQA, Attention
from contraflow.model.cache import KVCache
from contraflow.model.families import ModelConfig
from contraflow.model.paged import KernelPlan, PagedPlan
from contraflow.model.rotary import Rotation, frequencies, rotation

PEAK_GB_S = 4300
BLOCK = 16
SET_BYTES = 200e6  # of pages that a graph goes round: several times the L2 cache
# With block tables read ahead of keys, products need 5 stages to have two tiles of keys in flight.
ALONE = [(16, 2, 1), (16, 2, 3), (32, 4, 1), (32, 4, 2), (32, 4, 3), (32, 4, 4), (64, 4, 1), (64, 8, 3)]
PRODUCTS = [(32, 2, 5), (32, 4, 3), (32, 4, 5), (64, 4, 1), (64, 4, 2), (64, 4, 3), (64, 4, 5), (128, 4, 3)]
ALL = [(*cut, 1, False) for cut in ALONE] + [(*cut, 1, True) for cut in PRODUCTS]
CUTS = {"olmoe-1b-7b": ALL, "qwen3-30b-a3b": ALL[len(ALONE) :]}
MODELS = {name: SHAPES[name] for name in CUTS}


@dataclass(frozen=True)
class Device:
    """Where to run, and how much."""

    name: str
    dtype: torch.dtype
    noise: torch.Generator

    def timed(self, calls: Sequence[Callable[[], object]]) -> float:
        """Microseconds of one call, of a graph of all of them; a plain clock on a CPU."""
        if self.name == "cpu":
            begun = time.perf_counter()
            calls[0]()
            return (time.perf_counter() - begun) * 1e6
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls[0]()  # compiles
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        took = []
        for _ in range(6):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            took.append(first.elapsed_time(last) * 1e3 / len(calls))
        graph.reset()
        return statistics.median(took[1:])


class Decoding:
    """B sequences of given lengths, their pages scattered over one layer of a cache, in several sets."""

    def __init__(self, device: Device, config: ModelConfig, lengths: Sequence[int]) -> None:
        self.device, self.config, self.lengths = device, config, lengths
        width = -(-max(lengths) // BLOCK)
        each = [-(-length // BLOCK) for length in lengths]
        itemsize = torch.empty(0, dtype=device.dtype).itemsize
        block_bytes = 2 * config.kv_heads * BLOCK * config.head_dim * itemsize
        self.bytes = sum(lengths) * block_bytes / BLOCK
        self.sets = 1 if device.name == "cpu" else max(2, min(40, int(SET_BYTES / self.bytes) + 1))
        self.cache = KVCache(
            config, blocks=sum(each) * self.sets + 1, block_tokens=BLOCK, dtype=device.dtype, device=device.name
        )
        self.cache.pool.normal_(generator=device.noise)
        order = torch.randperm(sum(each) * self.sets, generator=device.noise, device=device.name)
        self.tables = torch.full((self.sets, len(lengths), width), self.cache.blocks - 1, device=device.name)
        place = 0
        for number, (row, count) in itertools.product(range(self.sets), enumerate(each)):
            self.tables[number, row, :count] = order[place : place + count]
            place += count
        self.lengths_B = torch.tensor(lengths, device=device.name)
        shape = (len(lengths), config.heads, config.head_dim)
        self.q = torch.randn(shape, dtype=device.dtype, device=device.name, generator=device.noise)

    def ours(self, tiling: kernels.Tiling | None = None) -> float:
        """Microseconds of the decode kernel."""
        layer = self.cache.layers[0][0]
        held = [
            kernels.Pages(layer, tables, self.lengths_B, self.config.kv_heads, BLOCK) for tables in self.tables.unbind()
        ]
        seen = kernels.Seen(None, None)
        return self.device.timed([lambda p=p: kernels.decode(self.q, p, seen, tiling) for p in held])  # type: ignore[misc]

    def plain(self) -> float:
        """Microseconds of gathering and torch's attention."""
        layer = self.cache.layers[0][0]
        plans = [PagedPlan(self.cache, tables, self.lengths_B, self.lengths_B) for tables in self.tables[:2].unbind()]
        return self.device.timed([lambda p=p: p.attend(self.q, layer, None) for p in plans])  # type: ignore[misc]

    def flash(self) -> float | None:
        """Microseconds of torch's flash attention over packed keys and values."""
        if self.device.name == "cpu":
            return None
        tokens, made = sum(self.lengths), {"dtype": self.device.dtype, "device": "cuda"}
        k, v = (torch.randn(tokens, self.config.kv_heads, self.config.head_dim, **made) for _ in range(2))
        ends = torch.nn.functional.pad(self.lengths_B.cumsum(0), (1, 0)).int()
        starts = torch.arange(len(self.lengths) + 1, dtype=torch.int32, device="cuda")
        longest = max(self.lengths)
        return self.device.timed(
            [lambda: varlen_attn(self.q, k, v, starts, ends, 1, longest, window_size=(-1, 0), **FLASH_GQA)] * 2
        )


def log_normal(count: int, mean: float, cap: int, seed: int) -> list[int]:
    """Lengths with this mean before the cap."""
    spread = torch.empty(count).log_normal_(0, 0.8, generator=torch.Generator().manual_seed(seed))
    return (spread / spread.mean() * mean).clamp(1, cap).int().tolist()  # type: ignore[no-any-return]


def decoding(device: Device, rehearse: bool) -> Iterator[dict[str, Any]]:
    """A row for each case."""
    batches, contexts = ((1, 2), (20,)) if rehearse else ((1, 64, 512), (256, 768, 2048))
    for (name, config), batch in itertools.product(MODELS.items(), batches):
        one_layer = single(config)
        cases = {str(context): [context] * batch for context in contexts}
        if batch > 1:
            cases["mixed"] = log_normal(batch, 20 if rehearse else 768, 4096, 1)
        for context, lengths in cases.items():
            case = Decoding(device, one_layer, lengths)
            us, plain = case.ours(), case.plain() if context in ("768", "20") else None
            flash = case.flash() if context in ("768", "mixed") else None
            gb_s = case.bytes / us / 1e3
            yield {
                "shape": name, "batch": batch, "context": context, "us": round(us, 1), "gb_s": round(gb_s),
                "share": round(gb_s / PEAK_GB_S, 2), "plain_us": rounded(plain), "flash_us": rounded(flash),
            }  # fmt: skip


def sweep(device: Device, rehearse: bool, deadline: float) -> Iterator[dict[str, Any]]:
    """Cuts of the decode kernels at B = 512, then splits of the best at mixed lengths and at B = 64 and 1."""
    for name, config in MODELS.items():
        one_layer = single(config)
        whole = Decoding(device, one_layer, [20] * 2 if rehearse else [768] * 512)
        cuts = [kernels.Tiling(*cut) for cut in CUTS[name][: 1 if rehearse else None]]
        took = {cut: whole.ours(cut) for cut in cuts if time.perf_counter() < deadline}
        for cut, us in sorted(took.items(), key=lambda pair: pair[1])[:6]:
            yield cut_row(name, "512x768", cut, us, whole)
        if not took:
            continue
        best = min(took, key=lambda cut: took[cut])
        for label, lengths in {
            "mixed": log_normal(512, 768, 4096, 1),
            "64x2048": [2048] * 64,
            "1x2048": [2048],
        }.items():
            case = Decoding(device, one_layer, [20] if rehearse else lengths)
            for splits in (1, 2, 4) if label == "mixed" else (2, 8, 32):
                if time.perf_counter() < deadline:
                    cut = best._replace(splits=splits)
                    yield cut_row(name, label, cut, case.ours(cut), case)


def cut_row(name: str, case: str, cut: kernels.Tiling, us: float, work: Decoding) -> dict[str, Any]:
    """A row of the sweep."""
    share = round(work.bytes / us / 1e3 / PEAK_GB_S, 2)
    return {"shape": name, "case": case, **cut._asdict(), "us": round(us, 1), "share": share}


def prefilling(device: Device, rehearse: bool) -> Iterator[dict[str, Any]]:
    """Chunks of several sequences, fresh or behind a cached past, beside flash attention over packed tokens."""
    for (name, config), (count, new, past) in itertools.product(
        MODELS.items(), [(2, 5, 3)] if rehearse else [(64, 256, 0), (8, 2048, 0), (8, 512, 3072)]
    ):
        case = Decoding(device, single(config), [new + past] * count)
        queries = torch.arange(count * new, device=device.name).view(count, new)
        slots = torch.arange(count * new, device=device.name)
        plan = KernelPlan(case.cache, case.tables[0], case.lengths_B, slots, queries)
        layer, q = case.cache.layers[0][0], case.q.repeat_interleave(new, 0)
        us = device.timed([lambda: plan.attend(q, layer, None)])  # noqa: B023
        flop = 4 * count * config.heads * config.head_dim * (new * past + new * (new + 1) / 2)
        flash = None
        if device.name != "cpu":
            k, v = (torch.randn(count * (new + past), *layer_heads(config), dtype=q.dtype, device="cuda") for _ in "kv")
            ends = torch.arange(count + 1, dtype=torch.int32, device="cuda")
            limits = (ends * new, ends * (new + past), new, new + past)
            flash = device.timed([lambda: varlen_attn(q, k, v, *limits, window_size=(-1, 0), **FLASH_GQA)])  # noqa: B023
        row = {"shape": name, "prefill": f"{count}x{new} after {past}", "us": round(us, 1)}
        yield row | {"tflop_s": round(flop / us / 1e6, 1), "flash_us": rounded(flash)}


def placing(device: Device, rehearse: bool) -> Iterator[dict[str, Any]]:
    """From the projection's output to queries and cached keys: one kernel, beside the plain form."""
    for (name, config), batch in itertools.product(MODELS.items(), (2,) if rehearse else (1, 512, 16384)):
        attention = Attention(single(config), device.dtype, device.name)
        for weight in attention.parameters():
            torch.nn.init.ones_(weight)
        cache = KVCache(single(config), blocks=batch, block_tokens=BLOCK, dtype=device.dtype, device=device.name)
        slots = torch.randperm(batch * BLOCK, device=device.name, generator=device.noise)[:batch]
        plans = [made(cache, slots[:, None] // BLOCK, slots * 0 + 1, slots) for made in (KernelPlan, PagedPlan)]
        turn = rotation(slots, frequencies(config).to(device.name), device.dtype)
        heads = config.heads + 2 * config.kv_heads
        qkv = torch.randn(batch, heads, config.head_dim, generator=device.noise, device=device.name).to(device.dtype)
        us, plain = (device.timed([one_place(attention, plan, qkv, turn)] * 4) for plan in plans)
        yield {"shape": name, "place": batch, "us": round(us, 1), "plain_us": rounded(plain)}


def one_place(attention: Attention, plan: Any, qkv: Tensor, turn: Rotation) -> Callable[[], object]:
    """What comes before attention, under either plan."""
    if isinstance(plan, KernelPlan):
        return lambda: plan.layer(0).placed(qkv, turn, attention.placing)
    layer = plan.layer(0)

    def plain() -> None:
        _, k, v = attention.placed(qkv, turn)
        layer.write(k, v)

    return plain


def single(config: ModelConfig) -> ModelConfig:
    """One layer of it."""
    from dataclasses import replace

    return replace(config, layers=1)


def layer_heads(config: ModelConfig) -> tuple[int, int]:
    """Key/value heads and their dimension."""
    return config.kv_heads, config.head_dim


def rounded(us: float | None) -> float | None:
    """To a tenth."""
    return None if us is None else round(us, 1)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A line for each row, under its keys wherever these change."""
    keys: list[str] = []
    for row in rows:
        if list(row) != keys:
            keys = list(row)
            print("  ".join(f"{key:>13}" for key in keys))
        print("  ".join(f"{'' if row[key] is None else row[key]!s:>13}" for key in keys), flush=True)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=50, help="the sweep starts nothing after that")
    parser.add_argument("--no-sweep", action="store_true")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on a CPU")
    options = parser.parse_args()
    name, dtype = ("cpu", torch.float32) if options.rehearse else ("cuda", torch.bfloat16)
    device = Device(name, dtype, torch.Generator(name).manual_seed(0))
    deadline = time.perf_counter() + options.seconds
    rows = [*decoding(device, options.rehearse), *prefilling(device, options.rehearse)]
    rows += placing(device, options.rehearse)
    if not options.no_sweep:
        rows += sweep(device, options.rehearse, deadline)
    if not options.rehearse:
        print("wrote", write("attention_gpu", rows, gpu=torch.cuda.get_device_name(), peak_gb_s=PEAK_GB_S))
    show(rows)


if __name__ == "__main__":
    main()
