"""Which form carries tokens to experts in each phase: what the settings ask for, or the fastest of a calibration.

Takes a mesh, a model's config and the token counts of the phases; gives the mesh with a form a phase, and lines that
say what was asked for, what runs and why. Does not open what it chose.
"""

import dataclasses
from collections.abc import Mapping

import torch

from contraflow.dispatch.base import Phase
from contraflow.dispatch.choose import Shape, calibrate
from contraflow.model.families import ModelConfig
from contraflow.parallel.experts import links
from contraflow.parallel.mesh import Mesh
from contraflow.telemetry import Clock

MOST_TOKENS = 1024  # measured: beyond, time grows with the tokens in every form
REPEATS = 5


def choose_forms(
    mesh: Mesh, config: ModelConfig, tokens: Mapping[Phase, int], *, clock: Clock, dtype: torch.dtype
) -> tuple[Mesh, tuple[str, ...]]:
    """A form for each phase with its most tokens a rank. Collective over the ranks that share out the experts.

    Raises: DispatchError.
    """
    parallel = mesh.parallel
    if parallel.ep == 1 or not config.moe_layers:
        return mesh, ()
    if parallel.dispatch != "auto":
        forms: dict[Phase, str] = dict.fromkeys(tokens, parallel.dispatch)
        plain = " (in training: hierarchical)" if parallel.dispatch == "overlapped" and "train" in tokens else ""
        return dataclasses.replace(mesh, forms=forms), (f"experts: {parallel.dispatch}, as asked for{plain}",)
    shape = Shape(
        experts=config.experts,
        choices=config.top_k,
        dim=config.dim,
        expert_ffn=config.expert_ffn,
        dtype=str(dtype).removeprefix("torch."),
        wire=parallel.wire,
    )
    counts = {phase: [max(min(most, MOST_TOKENS), 1)] for phase, most in tokens.items()}
    table = calibrate(links(mesh, mesh.ep), shape, counts, clock=clock, seed=0, repeats=REPEATS, device=mesh.device)
    choices = [table.pick(phase, most) for phase, most in tokens.items()]
    told = [f"experts, {choice.phase}: {choice.kind}, chosen ({choice.reason})" for choice in choices]
    return dataclasses.replace(mesh, forms={choice.phase: choice.kind for choice in choices}), tuple(told)
