"""Dispatch and combine on two GPUs or more: all_to_all over NCCL, our kernels over NVLink, the DeepEP adapter, and the
last two by themselves.

    python -m bench.dispatch_gpu [--starts 3] [--sms 24,48]
    python -m bench.dispatch_gpu --kinds rawnvlink@24:32768x32,rawnvlink@24:32768x16 --starts 1       # tiles and warps
    python -m bench.dispatch_gpu --kinds stepsrawnvlink@24 --starts 1       # where the time of nvlink goes
    python -m bench.dispatch_gpu --device cpu --tokens 64 --shapes 256:8 --kinds per_expert,all_to_all    # a rehearsal

Routing is uniform, experts are the identity, tokens are bf16, no gradients. Timed is all that a layer waits for, the
exchange of layout or counts included, from the caller's tensors to rows sorted by expert, and from the experts' answers
to the caller's sums. The raw forms leave out what each does with rows of one rank: `raw` (DeepEP) ends with one row per
(token, rank), compact, in a tensor of its own; `rawnvlink` ends with the same rows in slots of the shared memory, where
the next call but one overwrites them, and begins its way home with sums that lie there, where `nvlink` makes them.
What the whole takes more than the raw form is the seam's price; those local steps run on all SMs, in every form.
Before each timed call caches are flushed and a small all-reduce lines ranks up. A number is the median of
`--iterations` calls on the slowest rank; the table gives median, least and largest of `--starts` process starts.

GB/s: rows from other ranks, one per (token, rank), over the time, for every kind alike: one that sends more rows
(per_expert) shows a lower number. SMs are those of the kernels that go over the link; NCCL chooses its own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.nvlink_steps import steps
from bench.record import spread, write
from contraflow.dispatch import deepep_library as library
from contraflow.dispatch import nvlink_memory as memory
from contraflow.dispatch.base import Rows
from contraflow.dispatch.domains import Topology
from contraflow.dispatch.group import GroupLinks
from contraflow.dispatch.nvlink import NvlinkDispatch, row_bytes
from contraflow.dispatch.open import open_dispatch
from contraflow.dispatch.wire import Wire

Call = Callable[[], Any]


@dataclass(frozen=True)
class Shape:
    """What each rank brings, and among how many experts it chooses."""

    tokens: int
    dim: int
    experts: int
    choices: int


class RawDeepEP:
    """DeepEP with nothing of ours around it but the call that opens its buffers."""

    def __init__(self, links: GroupLinks, shape: Shape) -> None:
        topology, module = links.topology, library.load()
        width = library.library_width("buffer", topology, shape.dim, fp8=False)
        assert width == shape.dim, "the comparison pads nothing"
        self._port = library.BufferPort(module, links.group, experts=shape.experts, width=width, fixed_rows=0)

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Rows[Any]:
        """Its rows as they come, not sorted."""
        came = self._port.out(x_TD, ids_TK, weights_TK)
        assert isinstance(came.x, Tensor)
        return Rows(came.x, came.weights_MK.sum(1), came.ids_MK[:0, 0], came.handle)

    def combine(self, y_RD: Tensor, handle: Any) -> Tensor:
        return self._port.home(y_RD, None, handle)[0]

    def close(self) -> None:
        self._port.close()


class RawNvlink:
    """Our kernels over the link, with nothing of the local steps."""

    def __init__(self, links: GroupLinks, shape: Shape, sizes: memory.Sizes) -> None:
        layout = memory.Layout(
            links.topology.ranks, shape.tokens, shape.choices, row_bytes(shape.dim, torch.bfloat16, "same")
        )
        self._dim = shape.dim
        self.ground = memory.open_ground(
            links.group, layout, experts=shape.experts, sizes=sizes, deadline_s=links.deadline_s
        )

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Rows[Any]:
        self.ground.push(x_TD, ids_TK, weights_TK, torch.bfloat16)
        self.ground.meet(memory.OUT)
        return Rows(x_TD, weights_TK, ids_TK, ids_TK)

    def answers(self, rows: Rows[Any]) -> Tensor:
        """Put the answers of identities where the local step of `nvlink` puts its sums. Not timed."""
        lay, turn = self.ground.layout, int(self.ground.turn)
        halves = self.ground.own.view(2, lay.half)
        here, there = halves[turn % 2], halves[(turn + 1) % 2]
        weights = here[lay.weights_at :][: 4 * lay.ranks * lay.most * lay.choices].view(torch.float32)
        shape = lay.ranks * lay.most, lay.row_bytes
        x, y = (half[lay.rows_at :][: shape[0] * shape[1]].view(torch.bfloat16) for half in (here, there))
        share = weights.view(shape[0], lay.choices).sum(1, keepdim=True)
        y.view(shape[0], -1).copy_(x.view(shape[0], -1).float() * share)
        return y

    def combine(self, y: Tensor, handle: Tensor) -> Tensor:
        self.ground.meet(memory.HOME)
        out = torch.empty(handle.shape[0], self._dim, dtype=torch.bfloat16, device=y.device)
        self.ground.pull(out, None, handle, torch.bfloat16)
        return out

    def close(self) -> None:
        faults = memory.lost(self.ground.told()[1], tuple(range(self.ground.layout.ranks)), self.ground.rank, 60)
        if faults is not None:
            raise faults


def identity(rows: Rows[Any]) -> Tensor:
    return (rows.x_RD.float() * rows.weights_R[:, None]).to(rows.x_RD.dtype)


def open_kind(kind: str, links: GroupLinks, shape: Shape, device: str) -> Any:
    """`kind` may carry SMs, as in `deepep@24`; `-fixed` is the form that looks at no counts, `-fp8` the wire."""
    name, _, settings = kind.partition("@")
    base, *marks = name.split("-")
    wire: Wire = "fp8" if "fp8" in marks else "same"
    sms, _, tile = settings.partition(":")
    if name == "rawnvlink":
        return RawNvlink(links, shape, sizes_of(int(sms), tile))
    if base == "nvlink" and sms:
        return NvlinkDispatch(
            links, experts=shape.experts, max_tokens=shape.tokens, wire=wire, fixed="fixed" in marks, sms=int(sms)
        )
    if sms:
        library.load().Buffer.set_num_sms(int(sms))
    if name == "raw":
        return RawDeepEP(links, shape)
    return open_dispatch(
        base, links, experts=shape.experts, wire=wire, max_tokens=shape.tokens, device=device,
        capacity=shape.tokens if "fixed" in marks else None,
    )  # fmt: skip


def show_steps(raw: RawNvlink, kind: str, inputs: tuple[Tensor, Tensor, Tensor], clock: "Clock", turns: int) -> None:
    """Print where the time of `nvlink` goes, the slowest rank's median of each step."""
    found = steps(raw.ground, inputs, clock.time, turns)
    if inputs[0].is_cuda:
        torch.cuda.synchronize()
    told = {name: clock.slowest([each() for each in of]) for name, of in found.items()}
    if dist.get_rank() == 0:
        line = ", ".join(f"{name} {microseconds:.1f}" for name, microseconds in told.items())
        print(f"steps of {kind.replace('steps', '')}, width {inputs[0].shape[1]}, us: {line}", flush=True)


def sizes_of(sms: int, tile: str) -> memory.Sizes:
    """`tile` as in `32768x16`: bytes in flight for each program, and its warps."""
    local = 4 * torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    if not tile:
        return memory.Sizes(sms=sms, local=local)
    nbytes, _, warps = tile.partition("x")
    return memory.Sizes(sms=sms, local=local, tile_bytes=int(nbytes), warps=int(warps))


class Clock:
    """Times calls on one rank: events of the stream on a GPU, the wall on a CPU."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._one = torch.ones(1, device=device)
        self._cache = torch.empty(2**26 if self._cuda else 1, dtype=torch.int32, device=device)  # 256 MiB

    def time(self, call: Call) -> tuple[Any, Callable[[], float]]:
        """What the call gives, and a function for its microseconds, good once the device is done."""
        self._cache.zero_()
        dist.all_reduce(self._one)
        if not self._cuda:
            began = time.perf_counter()
            result, seconds = call(), time.perf_counter() - began
            return result, lambda: seconds * 1e6
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        result = call()
        end.record()
        return result, lambda: start.elapsed_time(end) * 1e3

    def slowest(self, microseconds: list[float]) -> float:
        """The median on the rank where it is largest."""
        if self._cuda:
            torch.cuda.synchronize()
        worst = torch.tensor([statistics.median(microseconds)], dtype=torch.float64, device=self._one.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst)


def measure(dispatch: Any, inputs: tuple[Tensor, ...], clock: Clock, iterations: int) -> tuple[float, float, Tensor]:
    """Microseconds of dispatch and of combine, and what came home the last time."""
    x, ids, weights = inputs
    out, answers = x, getattr(dispatch, "answers", identity)
    times: tuple[list[Callable[[], float]], list[Callable[[], float]]] = ([], [])
    for turn in range(iterations + 5):
        rows, there = clock.time(lambda: dispatch.dispatch(x, ids, weights))
        y_RD = answers(rows)
        out, back = clock.time(lambda y_RD=y_RD, rows=rows: dispatch.combine(y_RD, rows.handle))
        if turn >= 5:
            times[0].append(there)
            times[1].append(back)
    if x.is_cuda:
        torch.cuda.synchronize()
    there_us, back_us = ([each() for each in part] for part in times)
    return clock.slowest(there_us), clock.slowest(back_us), out


def as_rank(options: argparse.Namespace) -> None:
    """All kinds and shapes as one rank; rank 0 writes what all found."""
    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.set_device(options.rank)
    store = dist.FileStore(str(Path(options.folder) / "store"), options.ranks)
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=options.rank, world_size=options.ranks,
        timeout=timedelta(seconds=120), device_id=torch.device("cuda", options.rank) if cuda else None,
    )  # fmt: skip
    world = dist.group.WORLD
    assert world is not None
    one_domain = Topology.even(options.ranks, options.ranks)
    links = GroupLinks(world, topology=one_domain, store=store, device=options.device, deadline_s=60)
    clock, found = Clock(options.device), []
    for shape in options.shapes:
        inputs = draw(shape, options.rank, options.device)
        wire = torch.tensor([wire_rows(inputs[1], shape, options.ranks)], device=options.device)
        dist.all_reduce(wire)  # by receiving rank
        for kind in options.kinds:
            dispatch = open_kind(kind.removeprefix("steps"), links, shape, options.device)
            if kind.startswith("steps"):
                show_steps(dispatch, kind, inputs, clock, options.iterations)
                dispatch.close()
                continue
            with torch.no_grad():
                there, back, out = measure(dispatch, inputs, clock, options.iterations)
            error = float((out.float() - right(inputs)).norm() / right(inputs).norm())
            dispatch.close()
            assert error < (0.05 if "fp8" in kind else 0.01), f"{kind} came home wrong by {error}"
            arrived = int(wire[0].max())
            found.append({"kind": kind, **vars(shape), "dispatch_us": there, "combine_us": back, "wire_rows": arrived})
            if options.rank == 0:
                print(f"{kind} {shape}: dispatch {there:.1f} us, combine {back:.1f} us, error {error:.4f}", flush=True)
    if options.rank == 0:
        (Path(options.folder) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # buffers that were closed leave nothing to wait for; others must not be waited for


def draw(shape: Shape, rank: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, distinct experts chosen evenly, weights that add up to 1."""
    noise = torch.Generator().manual_seed(rank)
    x = torch.randn(shape.tokens, shape.dim, generator=noise).to(device, torch.bfloat16)
    ids = torch.rand(shape.tokens, shape.experts, generator=noise).topk(shape.choices).indices.to(device)
    weights = torch.rand(shape.tokens, shape.choices, generator=noise).to(device)
    return x, ids, weights / weights.sum(1, keepdim=True)


def right(inputs: tuple[Tensor, ...]) -> Tensor:
    return inputs[0].float() * inputs[2].sum(1, keepdim=True)


def wire_rows(ids_TK: Tensor, shape: Shape, ranks: int) -> list[int]:
    """Rows that this rank sends to each other one, one per (token, rank); 0 to itself."""
    owner_TK = ids_TK // (shape.experts // ranks)
    counts = [int((owner_TK == rank).any(1).sum()) for rank in range(ranks)]
    counts[dist.get_rank()] = 0
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, help="2, or as many as there are GPUs")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--choices", type=int, default=8)
    parser.add_argument("--shapes", default="7168:256,2048:128", help="WIDTH:EXPERTS,...")
    parser.add_argument("--kinds", help="those of the table, comma between; default by --sms")
    parser.add_argument("--sms", default="24,48")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--result", default="dispatch_gpu", help="name of the file in bench/results")
    parser.add_argument("--seconds", type=int, default=150, help="for each start")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    options.ranks = options.ranks or max(2, gpus)
    if options.device == "cuda" and gpus < options.ranks:
        parser.error(f"{options.ranks} ranks need as many GPUs, and here are {gpus}: two on one would take turns")
    by_sms = [f"{kind}@{sms}" for sms in options.sms.split(",") for kind in ("rawnvlink", "raw", "nvlink", "deepep")]
    options.kinds = options.kinds.split(",") if options.kinds else ["all_to_all", *by_sms]
    options.shapes = [
        Shape(options.tokens, int(dim), int(experts), min(options.choices, int(experts)))
        for dim, experts in (shape.split(":") for shape in options.shapes.split(","))
    ]
    if options.rank is not None:
        as_rank(options)
    rows = summary([one_start(options) for _ in range(options.starts)])
    if options.device == "cuda" and rows:
        facts = {"gpus": gpus, "gpu": torch.cuda.get_device_name(), "nccl": torch.cuda.nccl.version()}
        print("wrote", write(options.result, rows, **facts))
    show(rows)


def one_start(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What one start of all processes found. Raises RuntimeError when a rank failed or took too long."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.dispatch_gpu", *sys.argv[1:], "--folder", folder]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(options.ranks)]
        deadline = time.monotonic() + options.seconds
        try:
            codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
        found: list[dict[str, Any]] = json.loads((Path(folder) / "found.json").read_text())
        return found


def summary(starts: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row a kind and shape: spreads over starts, and GB/s of the medians."""
    rows = []
    for each in zip(*starts, strict=True):
        row = dict(each[0]) | {"starts": len(each)}
        for what in ("dispatch", "combine"):
            row[f"{what}_us"] = spread([found[f"{what}_us"] for found in each])
            row[f"{what}_GBs"] = row["wire_rows"] * row["dim"] * 2 / row[f"{what}_us"]["median"] / 1e3
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'kind':24} {'tokens x width':>14} {'dispatch us (least to largest)':>34} {'GB/s':>7}", end="")
    print(f" {'combine us':>34} {'GB/s':>7}")
    for row in rows:
        print(f"{row['kind']:24} {row['tokens']:>6} x {row['dim']:>5}", end="")
        for what in ("dispatch", "combine"):
            of = row[f"{what}_us"]
            times = f"{of['median']:.1f} ({of['least']:.1f} to {of['largest']:.1f})"
            print(f" {times:>34} {row[f'{what}_GBs']:>7.1f}", end="")
        print()


if __name__ == "__main__":
    main()
