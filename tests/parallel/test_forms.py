"""How tokens travel is what was asked for, or what was measured; and either way it is told."""

import itertools
from pathlib import Path

import torch

from contraflow.config import Parallel
from contraflow.dispatch.phased import Phased
from contraflow.dispatch.spread import SpreadDispatch
from contraflow.model.families import ModelConfig
from contraflow.parallel.experts import open_experts
from contraflow.parallel.forms import choose_forms
from contraflow.parallel.mesh import Mesh
from tests.parallel.ranks import run

CONFIG = ModelConfig(
    family="qwen3_moe", vocab=11, dim=16, layers=1, heads=2, kv_heads=2, head_dim=8, experts=4, top_k=2, expert_ffn=8
)


def chosen(mesh: Mesh) -> tuple[dict[str, str], tuple[str, ...], str]:
    ticks = itertools.count(0.0)
    mesh, told = choose_forms(mesh, CONFIG, {"prefill": 8, "decode": 2}, clock=lambda: next(ticks), dtype=torch.float32)
    dispatch = open_experts(CONFIG, mesh)
    kind = dispatch.kind if isinstance(dispatch, SpreadDispatch) else type(dispatch).__name__
    return dict(mesh.forms), told, kind


def test_what_is_asked_for_is_what_runs(tmp_path: Path) -> None:
    parallel = Parallel(dp=2, ep=2, dispatch="per_expert")
    for forms, told, kind in run(chosen, parallel, tmp_path):
        assert forms == {"prefill": "per_expert", "decode": "per_expert"}
        assert told == ("experts: per_expert, as asked for",)
        assert kind == "per_expert"


def test_auto_is_measured_and_says_what_it_saw(tmp_path: Path) -> None:
    parallel = Parallel(dp=2, ep=2, domain_ranks=1)
    by_rank = run(chosen, parallel, tmp_path)
    assert by_rank[0] == by_rank[1]
    forms, told, kind = by_rank[0]
    assert list(forms) == ["prefill", "decode"]
    assert [line.split(": ")[0] for line in told] == ["experts, prefill", "experts, decode"]
    assert all("measured at" in line and "all_to_all" in line and "hierarchical" in line for line in told)
    assert kind in {Phased.__name__, *forms.values(), "OverlapDispatch"}


def test_where_every_rank_has_all_experts_nothing_is_measured(tmp_path: Path) -> None:
    assert run(chosen, Parallel(dp=2), tmp_path)[0] == ({}, (), "LocalDispatch")
