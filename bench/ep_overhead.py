"""What the dispatch seam costs when one rank holds all experts: beside grouped matmuls written out by hand.

    python -m bench.ep_overhead [--starts 5] [--device cpu]

One mixture layer without its router, given ids and weights: `open_dispatch` for one rank, the experts, the weighted
sum; against the same matmuls with a sort, a gather and a sum of their own. That sum is written in the two usual ways
(an `index_add` per row, or rows back in token order and a sum over choices), and the faster of them is the bar. All
forms take turns in one process, which gives two numbers: the median ratio of neighbours in time, and the ratio of least
times, to which whatever else runs on the machine can only add. On a CPU it is CPU time in one thread. Row `fused` is
the seam as `Decoder.fuse` makes it, on a GPU only.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.record import spread, write
from contraflow.dispatch.local import LocalDispatch
from contraflow.dispatch.open import open_dispatch
from contraflow.model.families import ModelConfig
from contraflow.model.moe import MoE, swiglu

Form = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """T tokens of width D, experts of width F, top K."""

    tokens: int
    dim: int
    ffn: int
    experts: int
    top_k: int
    rounds: int


CASES = {
    "cpu": {"tiny": Case(512, 64, 64, 8, 2, 100), "wide": Case(2048, 512, 512, 16, 2, 8)},
    "cuda": {"olmoe": Case(8192, 2048, 1024, 64, 8, 60)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=sorted(CASES))
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # what a process of its own is told to do
    options = parser.parse_args()
    if options.one:
        torch.set_num_threads(1)
        print(json.dumps({name: measure(case, options.device) for name, case in CASES[options.device].items()}))
        return
    command = [sys.executable, "-m", "bench.ep_overhead", "--one", "--device", options.device]
    starts = [
        json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=400).stdout)
        for _ in range(options.starts)
    ]
    rows = [
        {"case": case, "form": form, "work": work, **joined([start[case][form][work] for start in starts])}
        for case, forms in starts[0].items()
        for form, works in forms.items()
        for work in works
    ]
    print("wrote", write(f"ep_overhead_{options.device}", rows, starts=options.starts))
    print("                                   against the faster direct form [least, largest of starts]")
    print("case    form       work        ms   median of ratios       ratio of least times")
    for row in rows:
        ratios = "   ".join(
            f"{row[key]['median']:.3f} [{row[key]['least']:.3f}, {row[key]['largest']:.3f}]"
            for key in ("ratio", "ratio_of_least")
        )
        print(f"{row['case']:<7} {row['form']:<10} {row['work']:<8} {row['ms']:6.2f}   {ratios}")


def joined(parts: list[dict[str, float]]) -> dict[str, Any]:
    """One number of several starts."""
    ms = statistics.median(p["ms"] for p in parts)
    return {"ms": ms, **{key: spread([p[key] for p in parts]) for key in ("ratio", "ratio_of_least")}}


def measure(case: Case, device: str) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds and ratios of each form, forward alone and with backward."""
    layer = mixture(case, device)
    forms: dict[str, Form] = {
        "index_add": lambda *given: direct_index_add(layer, *given),
        "sum": lambda *given: direct_sum(layer, *given),
        "seam": lambda *given: through_seam(layer, *given),
    }
    if device == "cuda":
        fused = mixture(case, device)
        fused.load_state_dict(layer.state_dict())
        assert isinstance(fused.dispatch, LocalDispatch)
        fused.fuse = fused.dispatch.fuse = True
        forms["fused"] = lambda *given: through_seam(fused, *given)
    given = inputs(case, device)
    check(forms, given)
    answers: dict[str, dict[str, dict[str, float]]] = {name: {} for name in forms}
    for work in ("forward", "both"):
        seconds = alternate(forms, given, case.rounds, work == "both", device)
        medians = {name: statistics.median(seconds[name]) for name in forms}
        bar = min(("index_add", "sum"), key=medians.__getitem__)
        for name in forms:
            ratios = [mine / its for mine, its in zip(seconds[name], seconds[bar], strict=True)]
            answers[name][work] = {
                "ms": 1000 * medians[name],
                "ratio": statistics.median(ratios),
                "ratio_of_least": min(seconds[name]) / min(seconds[bar]),
            }
    return answers


def mixture(case: Case, device: str) -> MoE:
    """A layer of random weights, behind the dispatch that a run of one rank opens."""
    config = ModelConfig(
        family="olmoe", vocab=8, dim=case.dim, layers=1, heads=1, kv_heads=1, head_dim=8,
        experts=case.experts, top_k=case.top_k, expert_ffn=case.ffn,
    )  # fmt: skip
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layer = MoE(config, open_dispatch("auto", None, experts=case.experts), dtype, device)
    noise = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(0.0, 0.02, generator=noise)
    return layer


def inputs(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, and K different experts of each with weights that sum to 1."""
    noise = torch.Generator(device).manual_seed(1)
    x_TD = torch.randn(case.tokens, case.dim, generator=noise, device=device)
    weights_TK, ids_TK = torch.rand(case.tokens, case.experts, generator=noise, device=device).topk(case.top_k)
    x_TD = x_TD.bfloat16() if device == "cuda" else x_TD
    return x_TD.requires_grad_(), ids_TK, weights_TK.softmax(-1).requires_grad_()


def through_seam(layer: MoE, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """As `MoE.forward` does behind its router."""
    rows = layer.dispatch.dispatch(x_TD, ids_TK, weights_TK)
    return layer.dispatch.combine(layer.answers(rows).to(x_TD.dtype), rows.handle)


def direct_index_add(layer: MoE, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Rows are added to their tokens one by one."""
    token_R, pair_R, y_RD = _answers(layer, x_TD, ids_TK)
    y_RD = y_RD * weights_TK.view(-1).index_select(0, pair_R).unsqueeze(1)
    return torch.zeros_like(x_TD).index_add_(0, token_R, y_RD.to(x_TD.dtype))


def direct_sum(layer: MoE, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Rows go back to the order of pairs, and each token's are added up."""
    _, pair_R, y_RD = _answers(layer, x_TD, ids_TK)
    row_P = torch.empty_like(pair_R).scatter_(0, pair_R, torch.arange(len(pair_R), device=pair_R.device))
    y_TKD = y_RD.index_select(0, row_P).view(*ids_TK.shape, -1)
    return (y_TKD * weights_TK.unsqueeze(2)).sum(1).to(x_TD.dtype)


def _answers(layer: MoE, x_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keys_R, pair_R = ids_TK.view(-1).sort(stable=True)
    experts_E = torch.arange(layer.gate_up.shape[0], device=x_TD.device)
    ends_E = torch.searchsorted(keys_R, experts_E, right=True, out_int32=True)
    token_R = pair_R // ids_TK.shape[1]
    hidden_RF = swiglu(F.grouped_mm(x_TD.index_select(0, token_R), layer.gate_up.mT, offs=ends_E))
    return token_R, pair_R, F.grouped_mm(hidden_RF, layer.down.mT, offs=ends_E)


def check(forms: dict[str, Form], given: tuple[Tensor, Tensor, Tensor]) -> None:
    """All forms compute the same."""
    outs = {name: form(*given).detach().float() for name, form in forms.items()}
    for name, out in outs.items():
        gap = float((out - outs["sum"]).norm() / outs["sum"].norm())
        assert gap < (0.02 if given[0].dtype == torch.bfloat16 else 1e-5), (name, gap)


def alternate(
    forms: dict[str, Form], given: tuple[Tensor, Tensor, Tensor], rounds: int, backward: bool, device: str
) -> dict[str, list[float]]:
    """Seconds of each form, in turns; the first rounds are not kept."""
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    pull = torch.randn_like(given[0])
    clock = time.perf_counter if device == "cuda" else time.process_time
    names = list(forms)
    for number in range(rounds + 3):
        for name in names[number % len(names) :] + names[: number % len(names)]:  # each comes first in its turn
            if device == "cuda":
                torch.cuda.synchronize()
            began = clock()
            with torch.set_grad_enabled(backward):
                out = forms[name](*given)
                if backward:
                    out.backward(pull)
            if device == "cuda":
                torch.cuda.synchronize()
            if number >= 3:
                seconds[name].append(clock() - began)
    return seconds


if __name__ == "__main__":
    main()
