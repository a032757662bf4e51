"""Dispatches among real processes on one GPU or several, against closed forms and the dense sum in float64.

    python -m tests.dispatch.gpu_ranks [--ranks 2] [--backend gloo|nccl] [--kind deepep|nvlink|...] [--seconds 240]
    python -m tests.dispatch.gpu_ranks --kind all_to_all --device cpu        # rehearses the cases themselves

One process a rank, on GPU `rank % GPUs`. With DeepEP two ranks may share one GPU, since the library asks the group for
device numbers and CUDA IPC handles alone, which work between two processes on one device; kernels that wait for each
other then take turns on it, so times mean nothing. NCCL refuses two ranks on one GPU, so gloo is the group there; so
does symmetric memory, unless TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 is set: `nvlink` needs two GPUs, or that.

Each rank says which case it is in; a rank that is stuck prints where after its deadline, and all are killed a little
later. The last thing printed is a table, one line a case; the exit status is 0 if every case passed on every rank.
"""

import argparse
import contextlib
import faulthandler
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from contraflow.dispatch import deepep_library as library
from contraflow.dispatch.domains import Topology
from contraflow.dispatch.group import GroupLinks
from contraflow.dispatch.open import open_dispatch
from contraflow.errors import DispatchError, WorkerDied
from tests.dispatch.closed_form import Exact, Routing, differences, scaled
from tests.dispatch.mixture import Case, make_case, run_rank, through, wanted

MAX_TOKENS = 160  # of the small cases


ROUTINGS = [
    Routing("plain"),
    Routing("odd numbers", (1, 7)),
    Routing("no tokens on rank 0", (0, 33)),
    Routing("no tokens on rank 1", (33, 0)),
    Routing("no tokens at all", (0, 0)),
    Routing("no token has an expert", (9, 5), absent=1.0),
    Routing("all to one expert", (40, 21), experts_of=(5, -1)),
    Routing("all to rank 0", (40, 21), experts_of=(0, 2, 3)),
    Routing("all to rank 1", (40, 21), experts_of=(7, 4)),
    Routing("an expert twice in a row", (12, 5), experts_of=(6, 6, 1)),
    Routing("one expert a token", (31, 17), choices=1),
    Routing("skewed", (129, 100), experts=32, choices=4, popular=3.0),
    Routing("not contiguous", (30, 21), strided=True),
    Routing("width 72", (30, 21), dim=72),
    Routing("width 2880", (30, 21), dim=2880),
    Routing("width 7168, 8 of 64", (100, 60), dim=7168, experts=64, choices=8),
    Routing("fp32 rounded on the way", (30, 21), dtype=torch.float32, wire="bf16"),
    Routing("fp8", wire="fp8"),
    Routing("fp8, nothing on rank 1", (33, 0), wire="fp8"),
    Routing("fp8 of fp32, width 2880", (30, 21), dim=2880, dtype=torch.float32, wire="fp8"),
    Routing("128 experts a rank", (64, 64), experts=256, choices=8),
    Routing("many tokens", (1500, 4096), experts=32, choices=8, dim=2048),
]
FIXED = ["plain", "no tokens on rank 0", "no tokens at all", "all to rank 1", "skewed", "fp8", "width 72"]


@dataclass
class Bench:
    """What a rank needs to run cases, and what it found."""

    links: GroupLinks
    ranks: int
    kind: str
    device: str
    file: Path
    found: list[dict[str, Any]] = field(default_factory=list)
    parts: dict[str, Tensor] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.links.rank

    @contextlib.contextmanager
    def case(self, name: str) -> Iterator[dict[str, Any]]:
        """One line of the table. What is raised inside goes on: ranks are no longer at the same call."""
        row: dict[str, Any] = {"case": name, "rank": self.rank, "passed": False, "note": "did not end"}
        self.found.append(row)
        self.save()
        print(f"[{self.rank}] {name} ...", flush=True)
        began = time.monotonic()
        try:
            yield row
        except BaseException as fault:
            row["note"] = f"{type(fault).__name__}: {str(fault).strip()[:300]}"
            raise
        finally:
            row["ms"] = round(1e3 * (time.monotonic() - began), 1)
            state = "passed" if row["passed"] else "FAILED"
            print(f"[{self.rank}] {name}: {state}, {row['ms']} ms {row['note']}", flush=True)
            self.save()

    def save(self) -> None:
        """So that a rank which is killed has told what it did."""
        torch.save({"found": self.found, "parts": self.parts}, self.file)

    def wide(self, routing: Routing) -> Routing:
        """The tokens of two ranks, for as many as there are."""
        return replace(routing, tokens=routing.tokens * (self.ranks // 2))

    def wait(self) -> None:
        """For the GPU, so that its faults show in the case that caused them."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def open(self, routing: Routing, max_tokens: int | None = None) -> Any:
        most = max_tokens or max(MAX_TOKENS, *routing.tokens)
        return open_dispatch(
            self.kind, self.links, experts=routing.experts, wire=routing.wire, max_tokens=most,  # type: ignore[arg-type]
            capacity=most if routing.fixed else None, device=self.device,
        )  # fmt: skip

    def own(self, scale_E: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        held = len(scale_E) // self.ranks
        return scale_E[self.rank * held :][:held].to(self.device, dtype)


def judge(row: dict[str, Any], got: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Bit for bit."""
    wrong = differences(got, right)
    row["passed"], row["note"] = not wrong, "; ".join(wrong) or "bit for bit"


def exact(bench: Bench, routing: Routing) -> None:
    """Values and all gradients of one routing, bit for bit."""
    case = Exact.of(routing, bench.rank)
    with bench.case(routing.name + (", fixed rows" if routing.fixed else "")) as row:
        dispatch = bench.open(routing)
        x, ids, weights = case.inputs(routing, bench.device)
        scale_L = bench.own(case.scale_E).requires_grad_()
        out = scaled(dispatch, x, ids, weights, scale_L)
        grads = torch.autograd.grad(
            out, (x, weights, scale_L), case.pull.to(out), allow_unused=True, materialize_grads=True
        )
        bench.wait()
        dispatch.close()
        held = routing.experts // bench.ranks
        right = case.right() | {"grad experts": routing.grad_experts()[bench.rank * held :][:held]}
        judge(row, {"out": out, "grad x": grads[0], "grad weights": grads[1], "grad experts": grads[2]}, right)


def mixture(bench: Bench, name: str, wire: str, limit: float) -> None:
    """Experts that are matrices, against the dense sum in float64: the parent judges all ranks together."""
    tokens = [100, 57][: bench.ranks] * (bench.ranks // 2)
    case = dense_case(tokens)
    with bench.case(name) as row:
        dispatch = bench.open(Routing(name, tuple(tokens), wire=wire))
        moved = Case(
            case.experts, [x.to(bench.device) for x in case.x], [ids.to(bench.device) for ids in case.ids],
            [weights.to(bench.device) for weights in case.weights], case.matrices.to(bench.device),
        )  # fmt: skip
        seen = run_rank(dispatch, moved, bench.rank, bench.ranks)
        bench.wait()
        dispatch.close()
        for part in ("out", "grad_x", "grad_weights", "grad_matrices"):
            bench.parts[f"{name}/{part}"] = getattr(seen, part).cpu()
        row.update(passed=True, note="judged below", wire=wire, limit=limit, tokens=tokens)


def dense_case(tokens: list[int]) -> Case:
    case = make_case(tokens, experts=8, choices=3, dim=256, seed=9, dtype=torch.bfloat16)
    case.matrices = case.matrices / 16
    return case


def repeats(bench: Bench) -> None:
    routing = Routing("repeats give the same bits", (129, 100), experts=32, choices=4, popular=2.0)
    case = make_case([129, 100] * (bench.ranks // 2), experts=32, choices=4, dim=256, seed=1, dtype=torch.bfloat16)
    with bench.case(routing.name) as row:
        dispatch = bench.open(routing)
        seen = []
        for _ in range(5):
            x, ids, weights = (of[bench.rank].to(bench.device) for of in (case.x, case.ids, case.weights))
            x, weights = x.requires_grad_(), weights.requires_grad_()
            held = 32 // bench.ranks
            own = case.matrices[bench.rank * held :][:held].to(bench.device)
            out = through(dispatch, x, ids, weights, own)
            seen.append([out, *torch.autograd.grad(out.float().square().sum(), (x, weights))])
        same = [all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True)) for other in seen[1:]]
        dispatch.close()
        row.update(passed=all(same), note=f"{sum(same)} of {len(same)} repeats the same")


def two_in_flight(bench: Bench) -> None:
    """Handles own what they need: between the dispatches and their combines memory is taken, soiled and given back."""
    routing = Routing("two in flight, memory in demand", (129, 100))
    tokens = ((129, 100), (64, 129))
    first, second = (Exact.of(bench.wide(replace(routing, tokens=each)), bench.rank) for each in tokens)
    with bench.case(routing.name) as row:
        dispatch = bench.open(routing)
        rows = []
        for case in (first, second):
            x, ids, weights = case.inputs(routing, bench.device)
            rows.append(dispatch.dispatch(x.detach(), ids, weights.detach()))
            del x, ids, weights
            for size in (2**12, 2**16, 2**20, 2**22):
                torch.full((size,), torch.nan, device=bench.device)
        outs = [
            dispatch.combine(part.x_RD * part.weights_R.to(torch.bfloat16)[:, None], part.handle)
            for part in reversed(rows)
        ]
        bench.wait()
        dispatch.close()
        wrong = {}
        for case, out, name in zip((second, first), outs, ("second", "first"), strict=True):
            share = torch.where(case.ids >= 0, case.weights, 0.0).sum(1, keepdim=True)
            wrong[name] = int((out.double().cpu() != case.x * share).sum())
        row.update(passed=not any(wrong.values()), note=f"values that differ: {wrong}")


def refusals(bench: Bench) -> None:
    """Before anything is sent: the other rank waits for nobody, and the next dispatch works."""
    routing = bench.wide(Routing("refused before anything is sent", (3, 3)))
    case = Exact.of(routing, bench.rank)
    with bench.case(routing.name) as row:
        dispatch = bench.open(routing, max_tokens=4)
        x, ids, weights = (part.detach() for part in case.inputs(routing, bench.device))
        bad: dict[str, Callable[[], Any]] = {
            "too many tokens": lambda: dispatch.dispatch(x.repeat(2, 1), ids.repeat(2, 1), weights.repeat(2, 1)),
            "on the host": lambda: dispatch.dispatch(x.cpu(), ids.cpu(), weights.cpu()),
            "bf16 weights": lambda: dispatch.dispatch(x, ids, weights.bfloat16()),
        }
        if bench.kind == "deepep":  # nvlink takes any, but one alone: below
            bad["fp32"] = lambda: dispatch.dispatch(x.float(), ids, weights)
        silent = not_refused(bad)
        rows = dispatch.dispatch(x, ids, weights)
        dispatch.combine(rows.x_RD, rows.handle)
        late: dict[str, Callable[[], Any]] = {
            "a handle used twice": lambda: dispatch.combine(rows.x_RD, rows.handle),
            "another dtype than before": lambda: dispatch.dispatch(x.float(), ids, weights),
            "another width than before": lambda: dispatch.dispatch(x[:, :128], ids, weights),
        }
        silent += not_refused(late)
        dispatch.close()
        row.update(passed=not silent, note=f"not refused: {silent}" if silent else f"{len(bad) + len(late)} kinds")


def not_refused(calls: dict[str, Callable[[], Any]]) -> list[str]:
    silent = []
    for name, call in calls.items():
        try:
            call()
        except DispatchError:
            continue
        silent.append(name)
    return silent


def skipped(bench: Bench) -> None:
    """A rank that is in another call than the others is told so by all, and nobody waits for ever."""
    with bench.case("a rank that skipped a layer is noticed") as row:
        dispatch = bench.open(Routing("", experts=bench.ranks))
        x, one = torch.ones(1, 8, dtype=torch.bfloat16, device=bench.device), torch.ones(1, 1, device=bench.device)
        rows = dispatch.dispatch(x, one.long(), one)
        if bench.rank == 0:
            dispatch.combine(rows.x_RD, rows.handle)
        said = ""
        try:
            dispatch.dispatch(x, one.long(), one)
            dispatch.check()
        except DispatchError as fault:
            said = str(fault)
        dispatch.close()
        row.update(passed="skipped or repeated a layer" in said, note=said[:100])


def absent(bench: Bench) -> None:
    """A rank that is late beyond the deadline is named, by the device's own clock."""
    with bench.case("a rank that does not come is named") as row:
        patience, bench.links.deadline_s = bench.links.deadline_s, 1.0
        dispatch = bench.open(Routing("", experts=bench.ranks))
        x, one = torch.ones(1, 8, dtype=torch.bfloat16, device=bench.device), torch.ones(1, 1, device=bench.device)
        rows = dispatch.dispatch(x, one.long(), one)
        bench.links.deadline_s = patience
        dispatch.combine(rows.x_RD, rows.handle)
        bench.wait()
        said, began = "", time.monotonic()
        if bench.rank == 0:
            try:
                dispatch.dispatch(x, one.long(), one)
            except WorkerDied as fault:
                said = str(fault)
        waited = time.monotonic() - began
        bench.links.gather("")
        dispatch.close()
        good = bench.rank != 0 or ("rank 1" in said and 0.9 < waited < 3)
        row.update(passed=good, note=f"{waited:.2f} s: {said[:90]}" if bench.rank == 0 else "")


def graph(bench: Bench) -> None:
    """The fixed form inside a CUDA graph, replayed with other routings."""
    routing = bench.wide(Routing("inside a CUDA graph", (100, 100), fixed=True, absent=0.0))
    cases = [Exact.of(routing, bench.rank), Exact.of(replace(routing, absent=0.7), bench.rank)]
    with bench.case(routing.name) as row, torch.no_grad():
        dispatch = bench.open(routing)
        x, ids, weights = (part.detach() for part in cases[0].inputs(routing, bench.device))
        scale_L = bench.own(cases[0].scale_E)

        def step() -> Tensor:
            rows = dispatch.dispatch(x, ids, weights)
            place_R = torch.arange(rows.x_RD.shape[0], device=x.device)
            expert_R = torch.searchsorted(rows.ends_E.long(), place_R, right=True).clamp_max(len(scale_L) - 1)
            return dispatch.combine(rows.x_RD * (rows.weights_R * scale_L[expert_R]).to(x.dtype)[:, None], rows.handle)

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        stream.synchronize()
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded, stream=stream, capture_error_mode="thread_local"):
            out = step()
        wrong = []
        for case in (*cases, cases[0]):
            for target, source in zip((x, ids, weights), case.inputs(routing, bench.device), strict=True):
                target.copy_(source.detach())
            recorded.replay()
            torch.cuda.synchronize()
            wrong.append(int((out.double().cpu() != case.right()["out"]).sum()))
        row.update(passed=not any(wrong), note=f"values that differ in 3 replays: {wrong}")
        del recorded
        dispatch.close()


def decoding(bench: Bench, wire: str) -> None:
    """Low latency: bit for bit, through one dispatch of each routing."""
    routings = [
        Routing("plain", (64, 33), dim=2048),
        Routing("no tokens on rank 0", (0, 33), dim=2048),
        Routing("an expert twice in a row", (12, 5), experts_of=(6, 6, 1), dim=2048),
        Routing("all to one expert", (40, 21), experts_of=(5, -1), dim=2048),
    ]
    dispatch: Any = None
    for routing in map(bench.wide, routings):
        case = Exact.of(routing, bench.rank)
        with bench.case(f"low latency, {wire}, {routing.name}") as row, torch.no_grad():
            dispatch = dispatch or open_dispatch(
                "deepep_decode",
                bench.links,
                experts=8,
                wire=wire,
                max_tokens=64,  # type: ignore[arg-type]
            )
            x, ids, weights = (part.detach() for part in case.inputs(routing, bench.device))
            for _ in range(3):
                out = scaled(dispatch, x, ids, weights, bench.own(case.scale_E))
            judge(row, {"out": out}, {"out": case.right()["out"]})
    dispatch.close()


def ipc(bench: Bench) -> None:
    """What the library rests on: memory of one process seen by the other, on one device too."""
    from torch.multiprocessing.reductions import reduce_tensor

    with bench.case("CUDA IPC between processes") as row:
        mine = torch.full((1024,), float(bench.rank), device="cuda")
        torch.cuda.synchronize()
        told: list[Any] = [None] * bench.ranks
        dist.all_gather_object(told, reduce_tensor(mine))
        sums = [float(rebuild(*given).sum()) / 1024 for rank, (rebuild, given) in enumerate(told) if rank != bench.rank]
        dist.barrier()
        right = [float(rank) for rank in range(bench.ranks) if rank != bench.rank]
        row.update(passed=sums == right, note=f"saw {sums}")


def by_itself(bench: Bench) -> None:
    """The library with nothing of ours around it but its calls: tells a broken library from a broken adapter."""
    tokens, experts = 64, 4 * bench.ranks
    with bench.case("the library by itself") as row:
        module = library.load()
        began = time.monotonic()
        port = library.BufferPort(module, bench.links.group, experts=experts, width=256, fixed_rows=0)
        opened = time.monotonic()
        x = torch.full((tokens, 256), bench.rank + 1.0, dtype=torch.bfloat16, device="cuda")
        ids = torch.arange(bench.ranks, device="cuda").mul(4).expand(tokens, bench.ranks).contiguous()
        came = port.out(x, ids, torch.ones(ids.shape, device="cuda"))
        torch.cuda.synchronize()
        out = time.monotonic()
        assert isinstance(came.x, Tensor)
        sums, weights = port.home(came.x, came.weights_MK, came.handle)
        torch.cuda.synchronize()
        home = time.monotonic()
        assert weights is not None
        right = torch.equal(sums, x * bench.ranks) and bool((weights == 1).all())
        port.close()
        spans = {
            "open": opened - began,
            "dispatch": out - opened,
            "combine": home - out,
            "close": time.monotonic() - home,
        }
        told = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in spans.items())
        row.update(passed=right and came.pairs == tokens * bench.ranks, note=f"{came.pairs} pairs came; {told}")


def facts() -> dict[str, Any]:
    """What a failure may hang on."""
    module = library.load()
    names = ("torch", "nvidia-nccl-cu13", "nvidia-nvshmem-cu13", "tokenspeed-deepep", "deep-ep", "sgl-deep-ep")
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "versions": versions,
        "cuda": torch.version.cuda,
        "gpus": torch.cuda.device_count(),
        "gpu": f"{device.name}, {device.multi_processor_count} SMs, {device.total_memory >> 30} GiB",
        "deep_ep": getattr(module, "__file__", "?"),
        "has": [name for name in dir(module) if name.endswith("Buffer")],
        "sm90": module.Buffer.is_sm90_compiled() if hasattr(module.Buffer, "is_sm90_compiled") else "?",
        "num_sms": getattr(module.Buffer, "num_sms", "?"),
        "mapped": sorted({line.split()[-1] for line in open("/proc/self/maps") if "nvshmem" in line or "nccl" in line}),
    }


def run_rank_of(options: argparse.Namespace) -> None:
    """All cases as one rank; what was found goes to a file, also when a case raised."""
    faulthandler.dump_traceback_later(options.seconds, exit=True)
    if options.device == "cuda":
        torch.cuda.set_device(options.rank % torch.cuda.device_count())
    store = dist.FileStore(str(Path(options.folder) / "store"), options.ranks)
    dist.init_process_group(
        options.backend, store=store, rank=options.rank, world_size=options.ranks, timeout=timedelta(seconds=120)
    )
    world = dist.group.WORLD
    assert world is not None
    links = GroupLinks(
        world, topology=Topology.even(options.ranks, options.ranks), store=store, deadline_s=60,
        device="cuda" if options.backend == "nccl" else "cpu",
    )  # fmt: skip
    file = Path(options.folder) / f"rank{options.rank}.pt"
    bench = Bench(links, options.ranks, options.kind, options.device, file)
    code = 0
    try:
        all_cases(bench, options.only)
    except Exception:  # noqa: BLE001 - told in the table and in the log
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    # No orderly end: the other rank may be gone, and leaving must not wait for it.
    os._exit(code)


def all_cases(bench: Bench, only: str) -> None:
    if bench.device == "cuda" and bench.kind in ("deepep", "deepep_decode"):
        if bench.rank == 0:
            print(json.dumps(facts(), indent=1), flush=True)
        ipc(bench)
        if bench.kind == "deepep" and hasattr(library.load(), "Buffer"):
            by_itself(bench)
    if bench.kind == "deepep_decode":
        for wire in ("same", "fp8"):
            decoding(bench, wire)
        return
    wide = [bench.wide(routing) for routing in ROUTINGS]
    fixed = [replace(routing, fixed=True) for routing in wide if routing.name in FIXED]
    for routing in (*wide, *fixed):
        if only in routing.name:
            exact(bench, routing)
    if only:
        return
    mixture(bench, "experts that are matrices", "same", 0.01)
    mixture(bench, "experts that are matrices, fp8", "fp8", 0.05)
    repeats(bench)
    two_in_flight(bench)
    if bench.kind in ("deepep", "nvlink"):
        refusals(bench)
        graph(bench)
    if bench.kind == "nvlink":
        skipped(bench)
        absent(bench)


def judge_mixture(name: str, row: dict[str, Any], parts: list[dict[str, Tensor]]) -> None:
    """The relative error of all ranks' values and gradients against float64, part by part."""
    case = dense_case(row["tokens"])
    right = wanted(case)
    errors = {}
    for part in ("out", "grad_x", "grad_weights"):
        got = torch.cat([found[f"{name}/{part}"].double() for found in parts])
        want = torch.cat([getattr(seen, part) for seen in right])
        errors[part] = float((got - want).norm() / want.norm())
    total = torch.stack([found[f"{name}/grad_matrices"].double() for found in parts]).sum(0)
    errors["grad_matrices"] = float((total - right[0].grad_matrices).norm() / right[0].grad_matrices.norm())
    row["passed"] = all(error < row["limit"] for error in errors.values())
    row["note"] = f"relative error (limit {row['limit']}) " + ", ".join(f"{k} {v:.4f}" for k, v in errors.items())


def main(arguments: list[str] | None = None) -> bool:
    """Start the ranks, wait for them at most so long, print the table; whether all passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", choices=("gloo", "nccl"))
    parser.add_argument("--kind", default="deepep")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=int, default=240)
    parser.add_argument("--only", default="", help="routings with this in their name, and nothing else")
    parser.add_argument("--json", help="where to write what was found")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.backend = options.backend or ("nccl" if torch.cuda.device_count() >= options.ranks > 1 else "gloo")
    if options.rank is not None:
        run_rank_of(options)
    with tempfile.TemporaryDirectory() as folder:
        gpus = torch.cuda.device_count()
        print(f"{options.kind}: {options.ranks} ranks on {gpus} GPUs, group {options.backend}", flush=True)
        given = [
            "--ranks", str(options.ranks), "--backend", options.backend, "--kind", options.kind,
            "--device", options.device, "--seconds", str(options.seconds), "--only", options.only, "--folder", folder,
        ]  # fmt: skip
        command = [sys.executable, "-u", "-m", "tests.dispatch.gpu_ranks", *given]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(options.ranks)]
        deadline = time.monotonic() + options.seconds + 20
        try:
            for process in ranks:
                process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(f"TIMED OUT after {options.seconds + 20} s", flush=True)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return table(Path(folder), options, [process.returncode for process in ranks])


def table(folder: Path, options: argparse.Namespace, codes: list[int]) -> bool:
    """One line a case; all ranks must have passed it."""
    files = [folder / f"rank{rank}.pt" for rank in range(options.ranks)]
    saved = [torch.load(file, weights_only=True) if file.exists() else {"found": [], "parts": {}} for file in files]
    by_case: dict[str, list[dict[str, Any]]] = {}
    for rank in saved:
        for row in rank["found"]:
            by_case.setdefault(row["case"], []).append(row)
    for name, rows in by_case.items():
        if len(rows) == options.ranks and "limit" in rows[0] and all(row["passed"] for row in rows):
            judge_mixture(name, rows[0], [rank["parts"] for rank in saved])
            rows[1:] = [row | {"note": rows[0]["note"]} for row in rows[1:]]
    print(f"\n{'case':44} {'passed':7} {'ms':>8}  note")
    passed = bool(by_case) and not any(codes)
    for name, rows in by_case.items():
        good = len(rows) == options.ranks and all(row["passed"] for row in rows)
        passed &= good
        notes = " | ".join(dict.fromkeys(row["note"] for row in rows))
        print(f"{name:44} {'yes' if good else 'NO':7} {max(row.get('ms', 0) for row in rows):8.1f}  {notes}")
    print(
        f"exit codes of ranks {codes}; {'ALL PASSED' if passed else 'NOT ALL PASSED'} ({len(by_case)} cases)",
        flush=True,
    )
    if options.json:
        Path(options.json).write_text(json.dumps({"options": vars(options), "rows": list(by_case.values())}, indent=1))
    return passed


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
