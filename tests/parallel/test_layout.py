"""Every element of every tensor is held by exactly the ranks that should hold it, for any mesh and any model."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contraflow.config import Parallel
from contraflow.errors import ConfigError
from contraflow.model.decoder import Decoder
from contraflow.model.families import ModelConfig
from contraflow.model.kinds import Latent
from contraflow.parallel.layout import Shard, check_fit, cut, place, shards, stage_layers

MOE = ModelConfig(
    family="qwen3_moe", vocab=11, dim=16, layers=5, heads=4, kv_heads=4, head_dim=4, ffn=16, experts=8, top_k=2,
    expert_ffn=8, dense_layers=(1,), attention_bias=True,
)  # fmt: skip

SHAPES = {name: tuple(p.shape) for name, p in Decoder(MOE).named_parameters()}


def paste(whole: torch.Tensor, shard: Shard | None, part: torch.Tensor) -> None:
    """Write a rank's part back to where `cut` took it from."""
    if shard is None:
        whole.copy_(part)
        return
    at = 0
    for start, end in shard.ranges:
        whole.narrow(shard.dim, start, end - start).copy_(part.narrow(shard.dim, at, end - start))
        at += end - start


@st.composite
def meshes(draw: st.DrawFn) -> Parallel:
    size = st.sampled_from([1, 2])
    dp, tp, cp, pp = (draw(size) for _ in range(4))
    ep = draw(st.sampled_from([e for e in (1, 2, 4, 8) if (dp * tp * cp) % e == 0]))
    return Parallel(dp=dp, tp=tp, cp=cp, pp=pp, ep=ep, schedule=draw(st.sampled_from(["1f1b", "interleaved"])))


@settings(max_examples=60, deadline=None)
@given(parallel=meshes())
def test_ranks_hold_every_element_as_often_as_the_mesh_says(parallel: Parallel) -> None:
    held: dict[str, Counter[int]] = {name: Counter() for name in SHAPES}
    for rank in range(parallel.ranks):
        for name, shard in shards(MOE, parallel, place(rank, parallel)).items():
            numbered = torch.arange(math.prod(SHAPES[name])).view(SHAPES[name])
            held[name].update(cut(numbered, shard).flatten().tolist())
    for name, counts in held.items():
        experts = name.endswith(("mlp.gate_up", "mlp.down")) and not name.startswith("layers.1.")
        split = name.endswith(("qkv", "qkv_bias", "attention.out", "gate_up", "down"))
        copies = parallel.stage_ranks // (parallel.ep if experts else parallel.tp if split else 1)
        assert set(counts.values()) == {copies}, name
        assert len(counts) == math.prod(SHAPES[name]), name


SMALL = {"vocab": 11, "dim": 16, "layers": 3, "heads": 4, "kv_heads": 4, "head_dim": 4, "ffn": 16}
MIXTURE = SMALL | {"experts": 8, "top_k": 2, "expert_ffn": 8}
SIGMOID = MIXTURE | {"dense_layers": (0,), "shared_experts": 2}
LATENT = Latent(q_rank=8, kv_rank=8, nope_dim=2, rope_dim=2, value_dim=3)
SPECIAL = {
    "deepseek_v3": ModelConfig(family="deepseek_v3", **SIGMOID, latent=LATENT, attention_bias=True),
    "deepseek_v3 direct": ModelConfig(
        family="deepseek_v3", **SIGMOID, latent=Latent(q_rank=None, kv_rank=8, nope_dim=2, rope_dim=2, value_dim=3)
    ),
    "glm4_moe": ModelConfig(family="glm4_moe", **SIGMOID, attention_bias=True),
    "gpt_oss": ModelConfig(family="gpt_oss", **MIXTURE, attention_bias=True, swiglu_alpha=1.0, swiglu_limit=1.0),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_experts_of_every_family_are_cut_and_the_rest_is_whole(name: str) -> None:
    config, parallel = SPECIAL[name], Parallel(dp=2, ep=2)
    shapes = {name: tuple(p.shape) for name, p in Decoder(config).named_parameters()}
    held = [shards(config, parallel, place(rank, parallel)) for rank in range(2)]
    assert set(held[0]) == set(shapes)
    experts = {n for n in shapes if n.endswith(("mlp.gate_up", "mlp.down", "mlp.gate_up_bias", "mlp.down_bias"))}
    experts -= {f"layers.{layer}.mlp.{part}" for layer in config.dense_layers for part in ("gate_up", "down")}
    for tensor, shape in shapes.items():
        whole = torch.arange(math.prod(shape)).view(shape)
        parts = [cut(whole, rank[tensor]) for rank in held]
        if tensor in experts:
            assert torch.equal(torch.cat(parts), whole), tensor
        else:
            assert all(torch.equal(part, whole) for part in parts), tensor


@pytest.mark.parametrize(
    ("name", "wanted", "said"),
    [
        ("deepseek_v3", {"tp": 2}, r"tp = 2: latent attention \(deepseek_v3\) is not cut by heads"),
        ("gpt_oss", {"tp": 2}, "tp = 2: attention sinks"),
    ],
)
def test_attention_that_cannot_be_spread_is_refused(name: str, wanted: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_fit(SPECIAL[name], Parallel(**wanted))


def test_glm_may_be_cut_by_heads() -> None:
    parallel = Parallel(tp=2)
    held = shards(SPECIAL["glm4_moe"], parallel, place(1, parallel))
    assert held["layers.1.attention.qkv"] is not None
    assert held["layers.1.mlp.shared.gate_up"] is None


@settings(max_examples=60, deadline=None)
@given(parallel=meshes(), data=st.data())
def test_parts_pasted_back_give_the_whole(parallel: Parallel, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(SHAPES)))
    whole = torch.randn(SHAPES[name])
    built = torch.full_like(whole, torch.nan)
    for rank in range(parallel.ranks):
        held = shards(MOE, parallel, place(rank, parallel))
        if name in held:
            paste(built, held[name], cut(whole, held[name]))
    assert torch.equal(built, whole)


@given(layers=st.integers(1, 40), count=st.integers(1, 8))
def test_stages_share_the_layers_in_order_and_evenly(layers: int, count: int) -> None:
    if count > layers:
        with pytest.raises(ConfigError, match="at least one layer"):
            stage_layers(layers, count)
        return
    found = stage_layers(layers, count)
    assert [layer for stage in found for layer in stage] == list(range(layers))
    assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize(
    ("wanted", "said"),
    [({"dp": 3, "ep": 3}, "ep = 3 must divide the model's 8 experts"), ({"tp": 8}, "heads = 4")],
)
def test_sizes_that_do_not_divide_are_refused(wanted: dict[str, int], said: str) -> None:
    parallel = Parallel(**wanted)
    with pytest.raises(ConfigError, match=said):
        shards(MOE, parallel, place(0, parallel))


def test_a_rank_outside_the_mesh_has_no_place() -> None:
    with pytest.raises(ConfigError, match=r"rank 2 is not in \[0, 2\)"):
        place(2, Parallel(dp=2))
