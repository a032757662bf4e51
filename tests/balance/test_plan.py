"""The planner: counts by hand, laws for any sizes, its factors fitted again, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from bench import published as pub
from bench.planner import ONE, fit, h200_rows, place, published_rows, refresh_rows, replay
from bench.rollout_work import SHAPES
from contraflow.balance.plan import Plan, check_pools, fastest, plan, pools_of, read_plan
from contraflow.balance.plan_cost import Place, decode_cost, hop_seconds, prefill_cost, refresh_seconds, train_cost
from contraflow.balance.plan_factors import Factors, read_factors
from contraflow.balance.plan_layout import (
    Workload,
    all_engines,
    all_trainers,
    cache_room,
    engine_bytes,
    engines_of,
    trainer_bytes,
)
from contraflow.balance.plan_sizes import Sizes
from contraflow.cli import app
from contraflow.cluster.instances import find_instance
from contraflow.config import Parallel, load_recipe
from contraflow.dispatch.traffic import expected_across
from contraflow.errors import ConfigError, ContraflowError, ModelError
from contraflow.model.decoder import new_decoder
from tests.balance.shapes import shape

ROOT = Path(__file__).parent.parent.parent
EIGHT = ROOT / "recipes/eks_8_nodes.toml"
WORK = Workload(prompt=1024, output=4096, groups=64, episodes=16, age=1, batch_tokens=8192)
QWEN = place(SHAPES["qwen3-30b-a3b"], Factors())
GPUS = st.sampled_from([1, 2, 4, 8, 16, 24, 32, 64, 128])


def test_parameters_are_those_of_the_decoder() -> None:
    for config in (SHAPES["tiny"], replace(SHAPES["tiny"], tied=True)):
        sizes, decoder = Sizes.of(config), new_decoder(config, seed=0)
        named = dict(decoder.named_parameters())
        assert sizes.parameters == sum(p.numel() for p in named.values())
        assert sizes.experts == config.layers * config.experts * 3 * config.dim * config.expert_ffn


@pytest.mark.parametrize(("name", "billions", "active"), [("glm_5_like", 744, 40), ("qwen3_30b_a3b", 30.5, 3.3)])
def test_published_sizes_come_out(name: str, billions: float, active: float) -> None:
    sizes = Sizes.of(shape(name))
    assert sizes.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert (sizes.active + sizes.embedding) / 1e9 == pytest.approx(active, rel=0.05)


def test_an_engine_that_keeps_latents_keeps_fifty_times_less_than_whole_heads() -> None:
    whole, latents = Sizes.of(shape("glm_5_like")), Sizes.of(shape("glm_5_like"), latents=True)
    assert latents.cache_bytes == 2 * (512 + 64) * 78
    assert whole.cache_bytes == 2 * 2 * 64 * 256 * 78


def test_a_decode_step_is_bytes_over_bandwidth_and_a_constant_a_layer() -> None:
    cost, sizes = decode_cost(QWEN, ONE, 512, 768), QWEN.sizes
    read = 2 * (sizes.parameters - sizes.embedding) + 512 * 768 * 48 * 2 * 2 * 4 * 128
    assert cost.memory == pytest.approx(read / (4.8e12 * 0.9), rel=1e-6)
    assert cost.seconds == pytest.approx(cost.memory + 48 * Factors().decode_layer_s)
    assert cost.bound == "memory"
    assert cost.reason.startswith("bound by weights and cache read from HBM: 8")


def test_a_hop_carries_the_copies_that_traffic_counts() -> None:
    backend = Factors().backends["deepep"]
    across = expected_across("hierarchical", experts=128, choices=8, domains=2, domain_ranks=8)
    row = 2048 * backend.value_bytes + 96
    by_hand = backend.across_s + 65536 * across * row / (50e9 * backend.network)
    assert hop_seconds(QWEN, backend, 16, 65536, back=False) == pytest.approx(by_hand)


def test_pipeline_stages_wait_less_with_more_micro_batches() -> None:
    few, many = (train_cost(QWEN, Parallel(pp=4, dp=8), n * 8192 * 8, 2048, 8192) for n in (2, 16))
    assert few.bubble / few.seconds == pytest.approx(3 / 2 * (few.compute + few.experts) / few.seconds)
    assert many.bubble / many.compute == pytest.approx(3 / 16)


@given(
    factor=st.floats(1, 8), batch=st.floats(1, 256), context=st.floats(64, 32768), ep=st.sampled_from([1, 8, 16, 64])
)
@settings(max_examples=60, deadline=None)
def test_more_bandwidth_is_never_slower(factor: float, batch: float, context: float, ep: int) -> None:
    node, layout = QWEN.instance, Parallel(dp=64, ep=ep)
    assert node.gpu is not None
    wider = [
        replace(node, network_gbit_s=node.network_gbit_s * factor),
        replace(node, gpu=replace(node.gpu, hbm_tb_s=node.gpu.hbm_tb_s * factor)),
        replace(node, gpu=replace(node.gpu, nvlink_gb_s=node.gpu.nvlink_gb_s * factor)),
        replace(node, gpu=replace(node.gpu, bf16_tflops=node.gpu.bf16_tflops * factor)),
    ]

    def seconds(at: Place) -> list[float]:
        return [
            decode_cost(at, layout, batch, context).seconds,
            prefill_cost(at, layout, 8192, context).seconds,
            train_cost(at, layout, 1e6, context, 8192).seconds,
            refresh_seconds(at, "collective", 64, 8),
        ]

    before = seconds(QWEN)
    for instance in wider:
        after = seconds(replace(QWEN, instance=instance))
        assert all(a <= b * (1 + 1e-9) for a, b in zip(after, before, strict=True))


@given(less=GPUS, more=GPUS)
@settings(max_examples=20, deadline=None)
def test_more_gpus_never_generate_less(less: int, more: int) -> None:
    less, more = sorted((less, more))
    few, many = (all_engines(QWEN, gpus, WORK)[0].tokens_s for gpus in (less, more))
    assert many >= few * (1 - 1e-9)


def test_nodes_that_do_not_divide_well_stay_idle() -> None:
    trainers = [all_trainers(QWEN, 8 * nodes, WORK)[:1] for nodes in (8, 9)]
    assert trainers[1][0][1] > trainers[0][0][1]  # 72 GPUs go into fewer layouts than 64
    assert fastest(trainers, lambda one: one[1]) == [trainers[0][0], trainers[0][0]]
    assert fastest([[], [3.0], [5.0], [2.0], []], float) == [None, 3.0, 3.0, 2.0, 2.0]


@given(short=st.integers(1, 10_000), longer=st.integers(0, 10_000), batch=st.integers(1, 32_768))
@settings(max_examples=60, deadline=None)
def test_memory_grows_with_context(short: int, longer: int, batch: int) -> None:
    layout = Parallel(recompute="layer")
    assert trainer_bytes(QWEN.sizes, layout, batch + longer) >= trainer_bytes(QWEN.sizes, layout, batch)
    few, many = (decode_cost(QWEN, ONE, 8, context) for context in (short, short + longer))
    assert many.memory >= few.memory
    fits = [replace(WORK, output=output) for output in (short, short + longer)]
    made = [engines_of(QWEN, Parallel(dp=8, ep=8), 8, work) for work in fits]
    batches = [one.batch if one else 0.0 for one in made]
    assert batches[1] <= batches[0]


def test_factors_are_what_the_bench_fits() -> None:
    given_, found = (msgspec.to_builtins(f) for f in (Factors(), fit()))
    backends = given_.pop("backends"), found.pop("backends")
    assert given_ == pytest.approx(found, rel=0.01)
    for name, backend in backends[0].items():
        numbers = {key: value for key, value in backend.items() if not isinstance(value, str)}
        assert numbers == pytest.approx({key: backends[1][name][key] for key in numbers}, rel=0.01)


def test_predictions_stay_as_near_to_measurements_as_the_page_says() -> None:
    rows = [*h200_rows(fit()), *refresh_rows(), *published_rows(fit())]
    for group, share in (("H200", 0.85), ("this machine", 1.0), ("fabric", 0.9)):
        held = [r for r in rows if r["group"] == group and not r["fitted"]]
        assert sum(abs(r["error"]) <= 0.15 for r in held) >= share * len(held), group
    outside = [r for r in rows if r["group"] in {"fabric", "refresh", "whole"}]
    assert len(outside) >= 12
    assert all(r["source"] for r in outside)
    assert {r.fitted for r in pub.FABRIC} == {True, False}


def test_the_replay_of_the_post_says_what_is_left_for_the_rest() -> None:
    for case in replay(Factors()):
        assert case["gain"] * case["others_must_bring"] == pytest.approx(pub.POST_GAIN)


def test_a_plan_of_a_recipe_balances_its_pools_and_says_why() -> None:
    made = read_plan(ROOT / "recipes/eks_48_nodes.toml", [], prompt=2048, answer=8192)
    given_, balanced = made.sections["split"]
    assert balanced.value <= given_.value
    assert made.sections["trainer"][-1].what == "recipe: dp 16, pp 4, cp 2, ep 32, recompute"
    assert {row.what for row in made.sections["experts"]} == {"train", "prefill", "decode"}
    assert all(row.why and row.value > 0 for rows in made.sections.values() for row in rows)


def test_the_command_prints_a_table_and_json() -> None:
    shown = CliRunner().invoke(app, ["plan", str(EIGHT), "--prompt", "1024", "--answer", "4096"])
    assert shown.exit_code == 0
    assert "in balance" in shown.stdout
    assert "bound by" in shown.stdout
    told = CliRunner().invoke(app, ["plan", str(EIGHT), "--json"])
    assert msgspec.json.decode(told.stdout, type=Plan).sections["trainer"]


def test_a_synchronous_step_adds_what_an_asynchronous_one_overlaps() -> None:
    late, never = (read_plan(EIGHT, [f"buffer.max_age={age}"], prompt=1024, answer=4096) for age in (1, 0))
    assert never.sections["split"][0].value > late.sections["split"][0].value
    assert "overlaps nothing" in never.sections["split"][0].why


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"machines": "p5en.48xl:4"}, "did you mean 'p5en.48xlarge'"),
        ({"machines": "p5en.48xlarge"}, "is not TYPE:NODES"),
        ({"machines": "m5.8xlarge:4"}, "has no GPU"),
        ({"prompt": -1}, "--prompt -1"),
        ({"config": Path("/nowhere/config.json")}, "name a config.json"),
        ({"factors": Path("/nowhere/factors.json")}, "bench/planner.py"),
        ({"machines": "g6.8xlarge:2"}, "no trainer layout fits"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_plan(
            EIGHT,
            [f"{pool}.parallel.{key}=1" for pool in ("engine", "train") for key in ("dp", "tp", "pp", "cp", "ep")],
            **options,
        )  # type: ignore[arg-type]


def test_a_layout_that_cannot_fit_is_refused_with_bytes_and_one_that_can() -> None:
    recipe = load_recipe(EIGHT, ["train.parallel.dp=1", "train.parallel.tp=2", "train.parallel.ep=2"])
    sizes = Sizes.of(shape("glm_4_5_air"))
    with pytest.raises(ConfigError, match=r"train.parallel = .* bytes\) more than .*what fits on this pool: ") as told:
        plan(recipe, sizes, WORK, pools_of(recipe), Factors())
    at = Place(sizes=sizes, instance=find_instance("p5en.48xlarge"), factors=Factors())
    over = trainer_bytes(sizes, recipe.train.parallel, WORK.batch_tokens) - 0.9 * 141e9
    assert f"({over:.0f} bytes)" in str(told.value)
    assert cache_room(at, ONE) < 0 < engine_bytes(sizes, ONE)


def test_an_engine_that_cannot_fit_is_refused_and_its_room_is_what_weights_leave() -> None:
    recipe = load_recipe(EIGHT, ["engine.parallel.dp=8", "engine.parallel.tp=1", "engine.parallel.ep=8"])
    sizes = Sizes.of(shape("glm_5_like"), latents=True)
    with pytest.raises(
        ConfigError, match=r"engine.parallel = dp 8, ep 8 needs .* on each H200.*what fits on this pool"
    ):
        plan(recipe, sizes, WORK, pools_of(recipe), Factors())
    free = 0.9 * 141e9 - 2 * QWEN.sizes.parameters
    assert cache_room(QWEN, ONE) == pytest.approx(free / (48 * 2 * 2 * 4 * 128))


def test_a_pool_of_several_nodes_needs_efa() -> None:
    pools = pools_of(recipe := load_recipe(EIGHT, []))
    with pytest.raises(ConfigError, match=r"pool .train.: 32 ranks take 4 nodes of .* which has no EFA"):
        check_pools(recipe, replace(pools, train=replace(pools.train, efa=0)))
    check_pools(recipe, replace(pools, rollout=replace(pools.rollout, efa=0)))  # its engines do not leave a node


def test_a_config_of_another_family_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ModelError, match=r"config.json: model_type 'mamba' is not known"):
        read_plan(EIGHT, config=file)


def test_factors_of_a_file_are_checked_by_name_and_size(tmp_path: Path) -> None:
    file = tmp_path / "factors.json"
    file.write_text('{"factors": {"train": 0.2}}')
    assert read_factors(file) == msgspec.structs.replace(Factors(), train=0.2)
    for text, says in (('{"trian": 1}', "'trian' is not one of"), ('{"train": 1.5}', "train = 1.5 is a share of peak")):
        file.write_text(text)
        with pytest.raises(ContraflowError, match=says):
            read_factors(file)
