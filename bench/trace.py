"""Where the time of a training update goes, by what the kernels are for.

Takes a decoder (to name the parts of its forward pass while tracing) and a finished trace; gives milliseconds by group.
A kernel belongs to the operator that launched it: to a group by that operator's own name, or else to the part of the
model around it. What runs in a backward pass belongs where its forward operator did.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.utils.hooks import RemovableHandle

from contraflow.model.attention import Attention
from contraflow.model.decoder import Decoder, Layer
from contraflow.model.moe import MoE
from contraflow.model.router import Router

PART = "part:"
BACKWARD = "autograd::engine::evaluate_function: "
# The innermost operator whose name one of these finds decides; first come, first served.
NAMED = [
    ("AccumulateGrad", "gradients added up"),
    (r"Optimizer|_foreach_|fused_adam", "optimizer and clipping"),
    (r"grouped_mm|GroupedMm", "expert matmuls"),
    (r"varlen_attn|flash_attention|scaled_dot_product", "attention kernel"),
    (r"rms_norm|RMSNorm|RmsNorm", "norms"),
    (r"_to_copy|ToCopy", "casts"),
    (r"_Copied", "gradients added up"),
    (r"_Spread|_Gather|_sum_rows|_added_rows|_owned_rows|aten::sort|searchsorted", "dispatch"),
    (r"aten::(mm|addmm|linear|matmul)$|(Mm|Addmm|Linear)Backward", "dense matmuls"),
    (r"embedding|Embedding", "embedding"),
]
HEAD = r"TokenLogprobs|SplitLogprobs"
PARTS = {Attention: "attention, rest", MoE: "experts, elementwise", Router: "router", Layer: "residual"}


@contextmanager
def scopes(decoder: Decoder) -> Iterator[None]:
    """Name the decoder's parts in traces taken inside."""
    handles: list[RemovableHandle] = []
    for module in decoder.modules():
        if type(module) in PARTS:
            handles += _scoped(module, PARTS[type(module)])
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def by_group(trace: torch.profiler.profile, kernels: int = 12) -> dict[str, Any]:
    """`groups_ms` and the longest `kernels_ms`, largest first; on a CPU, operators stand for kernels."""
    events = [event for event in trace.events() or [] if event.device_type == torch.autograd.DeviceType.CPU]
    on_device = any(event.self_device_time_total > 0 for event in events)
    forwards = {
        (event.thread, event.sequence_nr): event
        for event in events
        if event.sequence_nr >= 0 and not event.name.startswith(BACKWARD) and event.fwd_thread in (None, 0)
    }
    groups: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    for event in events:
        ms = (event.self_device_time_total if on_device else event.self_cpu_time_total) / 1000
        if ms > 0:
            groups[_group(event, forwards)] += ms
            for name, part in _kernels(event, ms, on_device):
                names[name] += part
    ranked = sorted(names.items(), key=lambda item: -item[1])[:kernels]
    return {
        "busy_ms": sum(groups.values()),
        "groups_ms": dict(sorted(groups.items(), key=lambda item: -item[1])),
        "kernels_ms": {name[:110]: ms for name, ms in ranked},
    }


def _scoped(module: nn.Module, name: str) -> list[RemovableHandle]:
    running: list[Any] = []

    def enter(*_: Any) -> None:
        running.append(torch.profiler.record_function(PART + name))
        running[-1].__enter__()

    def leave(*_: Any) -> None:
        running.pop().__exit__(None, None, None)

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]


def _group(event: FunctionEvent, forwards: dict[tuple[int, int], FunctionEvent]) -> str:
    named = part = ""
    head = False
    for at in _outwards(event, forwards):
        named = named or next((group for pattern, group in NAMED if re.search(pattern, at.name)), "")
        head = head or re.search(HEAD, at.name) is not None
        if at.name.startswith(PART):
            part = at.name.removeprefix(PART)
            break
    if head:
        return f"head: {named or 'elementwise'}"
    if named == "casts" and part:
        return f"casts: {part}"
    return part if named == "dense matmuls" and part == PARTS[Router] else named or part or "loss, batch, rest"


def _outwards(event: FunctionEvent, forwards: dict[tuple[int, int], FunctionEvent]) -> Iterator[FunctionEvent]:
    """The event and all that enclose it; from a backward operator on to those that enclose its forward one."""
    at: FunctionEvent | None = event
    while at is not None:
        yield at
        forward = forwards.get((at.fwd_thread, at.sequence_nr)) if at.name.startswith(BACKWARD) else None
        at = at.cpu_parent if forward is None else forward


def _kernels(event: FunctionEvent, ms: float, on_device: bool) -> list[tuple[str, float]]:
    if not on_device:
        return [(event.name, ms)]
    return [(kernel.name, kernel.duration / 1000) for kernel in event.kernels]
