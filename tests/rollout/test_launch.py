"""Command lines of served engines: golden ones, laws over random layouts, what is refused, and what is printed."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from contraflow.cli import app
from contraflow.config import Engine, check_section
from contraflow.errors import ConfigError
from contraflow.model.families import ModelConfig
from contraflow.rollout.launch import plan_engine
from contraflow.rollout.launch_lines import Plan
from tests.model.test_published import DEEPSEEK_V3, GLM_45, GPT_OSS_20B, QWEN3_30B

PLANS = Path(__file__).parent / "plans"
# Options that the documentation of each engine lists: vLLM 0.24 to 0.32, SGLang 0.5.15 to 0.5.23.
DOCUMENTED = {
    "vllm": (
        "--dtype --max-model-len --max-num-seqs --max-num-batched-tokens --logprobs-mode --generation-config "
        "--enable-return-routed-experts --tensor-parallel-size --data-parallel-size --data-parallel-size-local "
        "--data-parallel-address --data-parallel-rpc-port --data-parallel-start-rank --headless --api-server-count "
        "--enable-expert-parallel --all2all-backend --enable-eplb --eplb-config --kv-transfer-config --host --port "
        "--tokens-only --worker-extension-cls"
    ),
    "sglang": (
        "--model-path --dtype --context-length --max-running-requests --chunked-prefill-size --cuda-graph-max-bs "
        "--skip-tokenizer-init --incremental-streaming-output --sampling-defaults --enable-return-routed-experts "
        "--tp-size --ep-size --dp-size --enable-dp-attention --enable-dp-lm-head --moe-dense-tp-size "
        "--moe-a2a-backend --deepep-mode --deepep-dispatcher-output-dtype --moe-runner-backend --enable-eplb "
        "--ep-num-redundant-experts --nnodes --node-rank --dist-init-addr --host --port --disaggregation-mode"
    ),
}
TWO_NODES = {"nodes": 2, "address": "node-0", "interface": "eth0"}


def planned(kind: str, tree: dict[str, Any], launch: dict[str, Any], **engine: Any) -> Plan:
    keys = {"compute": "bfloat16", "context_tokens": 8192, "prefill_tokens": 8192, "routes": True, **engine}
    section = check_section(Engine, {"kind": kind, "launch": launch, **keys})
    return plan_engine(section, ModelConfig.from_hf(tree), "/models/policy")


def value(argv: list[str], option: str) -> str:
    return argv[argv.index(option) + 1]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("name", "tree", "launch"),
    [
        ("qwen3_30b_one_node", QWEN3_30B, {}),
        ("deepseek_v3_two_nodes", DEEPSEEK_V3, TWO_NODES),
        ("deepseek_v3_two_nodes_prefill", DEEPSEEK_V3, {**TWO_NODES, "phase": "prefill"}),
        ("deepseek_v3_two_nodes_decode", DEEPSEEK_V3, {**TWO_NODES, "phase": "decode", "fabric": "efa"}),
    ],
)
def test_a_plan_is_the_one_that_was_read_and_approved(
    kind: str, name: str, tree: dict[str, Any], launch: dict[str, Any]
) -> None:
    golden = json.loads((PLANS / f"{kind}_{name}.json").read_text(encoding="utf-8"))
    plan = planned(kind, tree, launch)
    assert [{"node": p.node, "argv": p.argv, "env": p.env} for p in plan.processes] == golden


@settings(deadline=None, max_examples=30)
@given(
    kind=st.sampled_from(["vllm", "sglang"]),
    nodes=st.sampled_from([1, 2, 4, 8]),
    tp=st.sampled_from([1, 2, 4]),
    phase=st.sampled_from(["both", "prefill", "decode"]),
    means=st.sampled_from(["auto", "collectives", "deepep"]),
    fabric=st.sampled_from(["infiniband", "efa"]),
    sequences=st.integers(1, 1024),
    prefill=st.integers(1, 20000),
)
def test_any_layout_uses_every_gpu_once_with_documented_options_and_a_reason_for_each(
    kind: str, nodes: int, tp: int, phase: str, means: str, fabric: str, sequences: int, prefill: int
) -> None:
    launch = {"nodes": nodes, "tp": tp, "phase": phase, "all_to_all": means, "fabric": fabric, "address": "a.b"}
    plan = planned(kind, DEEPSEEK_V3, launch, max_sequences=sequences, prefill_tokens=prefill)
    assert [process.node for process in plan.processes] == list(range(nodes))
    for process in plan.processes:
        argv, options = process.argv, [word for word in process.argv if word.startswith("--")]
        assert set(options) <= set(DOCUMENTED[kind].split())
        assert len(options) == len(set(options))
        assert all(process.reasons[name] for name in (*options, *process.env))
        assert shlex.split(shlex.join(argv)) == argv
        copies = 8 * nodes // tp
        if kind == "vllm":
            ranks, first = int(value(argv, "--data-parallel-size")), process.node * 8 // tp
            assert int(value(argv, "--tensor-parallel-size")) * ranks == 8 * nodes
            assert int(value(argv, "--data-parallel-size-local") if nodes > 1 else ranks) * tp == 8
            assert ("--headless" in argv) == (process.node > 0)
            assert int(value(argv, "--data-parallel-start-rank")) == first if process.node else True
            tokens = int(value(argv, "--max-num-batched-tokens"))
            assert tokens >= int(value(argv, "--max-num-seqs")) == sequences
            if value(argv, "--all2all-backend") == "deepep_low_latency":
                assert tokens <= 1024
                assert int(process.env.get("NVSHMEM_QP_DEPTH", "1024")) >= 2 * (tokens + 1)
        else:
            assert int(value(argv, "--tp-size")) == int(value(argv, "--ep-size")) == 8 * nodes
            assert int(value(argv, "--max-running-requests")) == sequences * copies
            assert int(value(argv, "--chunked-prefill-size")) % copies == 0
            if value(argv, "--moe-a2a-backend") == "deepep" and value(argv, "--deepep-mode") != "normal":
                assert int(value(argv, "--cuda-graph-max-bs")) == sequences
                assert int(process.env["SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"]) == sequences
                assert int(process.env.get("NVSHMEM_QP_DEPTH", "1024")) >= 2 * (sequences + 1)
        assert ("FI_PROVIDER" in process.env) == (nodes > 1 and fabric == "efa" and means != "collectives")


def test_nodes_differ_only_in_their_place() -> None:
    for kind in DOCUMENTED:
        first, second = (set(process.flags) for process in planned(kind, DEEPSEEK_V3, TWO_NODES).processes)
        places = {flag.words[0] for flag in first ^ second}
        assert places <= {"--data-parallel-start-rank", "--headless", "--host", "--port", "--api-server-count"} | {
            "--node-rank"
        }


def test_an_engine_that_is_never_refreshed_may_replicate_hot_experts() -> None:
    launch = {"redundant_experts": 16, "frozen": True}
    vllm = planned("vllm", QWEN3_30B, launch).processes[0].argv
    assert json.loads(value(vllm, "--eplb-config")) == {"num_redundant_experts": 16}
    sglang = planned("sglang", QWEN3_30B, launch).processes[0].argv
    assert value(sglang, "--ep-num-redundant-experts") == "16"
    assert "--enable-eplb" in vllm
    assert "--enable-eplb" in sglang


@pytest.mark.parametrize(
    ("kind", "tree", "launch", "engine", "says"),
    [
        ("native", QWEN3_30B, {}, {}, "engine.kind = 'native' runs inside this package"),
        ("vllm", QWEN3_30B, {"gpus_per_node": 6}, {}, "128 experts on 1 x 6 GPUs: not the same number on each"),
        ("vllm", QWEN3_30B, {"redundant_experts": 3, "frozen": True}, {}, "128 experts and 3 replicas on 1 x 8 GPUs"),
        ("sglang", QWEN3_30B, {"redundant_experts": 8}, {}, "redundant_experts = 8 with frozen = false"),
        ("vllm", QWEN3_30B, {"tp": 3}, {}, "tp = 3 does not divide gpus_per_node = 8"),
        ("vllm", QWEN3_30B, {"tp": 16}, {}, "tp = 16 does not divide gpus_per_node = 8"),
        ("vllm", {**QWEN3_30B, "num_attention_heads": 4}, {"tp": 8}, {}, "does not divide the model's 4 attention"),
        ("vllm", QWEN3_30B, {"nodes": 2}, {}, "address = '127.0.0.1' with nodes = 2"),
        ("vllm", QWEN3_30B, {"address": "a; reboot"}, {}, "launch.address = 'a; reboot'"),
        ("vllm", QWEN3_30B, {"port": 0}, {}, "launch.port = 0"),
        ("vllm", QWEN3_30B, {}, {"context_tokens": 100000}, "the model was made for 40960 at most"),
        ("sglang", QWEN3_30B, {}, {"context_tokens": 40955}, "SGLang keeps 6 tokens of its context to itself"),
        ("vllm", QWEN3_30B, {"all_to_all": "deepep"}, {"compute": "float32"}, "DeepEP carries bf16"),
        ("vllm", QWEN3_30B, {"wire": "fp8"}, {}, "wire = 'fp8' without DeepEP"),
        ("vllm", QWEN3_30B, {"all_to_all": "deepep", "wire": "fp8"}, {}, "only to experts that are stored in fp8"),
        ("vllm", QWEN3_30B, {"all_to_all": "deepep", "tp": 8}, {}, "leaves one data-parallel rank"),
        (
            "sglang",
            QWEN3_30B,
            {**TWO_NODES, "gpus_per_node": 4},
            {},
            "gpus_per_node = 4 on 2 nodes: it takes 8 a node",
        ),
        (
            "sglang",
            {**QWEN3_30B, "num_experts": 120},
            {**TWO_NODES, "nodes": 5, "phase": "prefill"},
            {},
            "40 GPUs in normal mode: it has settings for 2, 4, 8, 16",
        ),
        (
            "sglang",
            {**QWEN3_30B, "num_experts": 2048},
            {**TWO_NODES, "phase": "prefill"},
            {},
            "128 experts on each of 16 GPUs: its counting kernels take 64",
        ),
        ("sglang", QWEN3_30B, TWO_NODES, {"max_sequences": 1025}, "1025 tokens of a rank in one low-latency call"),
        ("vllm", QWEN3_30B, TWO_NODES, {"max_sequences": 2000}, "2000 tokens of a rank in one low-latency call"),
        ("vllm", {**QWEN3_30B, "num_experts_per_tok": 16}, TWO_NODES, {}, "16 experts a token in low_latency mode"),
        ("sglang", GPT_OSS_20B, TWO_NODES, {}, "hidden size 2880 in low-latency mode"),
        ("vllm", {**QWEN3_30B, "hidden_size": 9216}, TWO_NODES, {}, "hidden size 9216 in low-latency mode"),
        ("vllm", GLM_45, {**TWO_NODES, "nodes": 8}, {}, "160 experts on 8 x 8 GPUs"),
    ],
)
def test_what_cannot_be_is_refused_with_the_setting_and_what_is_allowed(
    kind: str, tree: dict[str, Any], launch: dict[str, Any], engine: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as fault:
        planned(kind, tree, launch, **engine)
    assert says in str(fault.value)


def test_a_dense_model_has_no_experts_to_spread() -> None:
    dense = {"model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    dense |= {"num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 4}
    dense |= {"rms_norm_eps": 1e-6, "max_position_embeddings": 8192, "rope_theta": 1e4}
    with pytest.raises(ConfigError, match="a qwen3 model has no experts"):
        planned("vllm", dense, {})


def test_vllm_pads_a_width_that_has_no_kernel_and_sglang_can_do_without_one() -> None:
    planned("vllm", GPT_OSS_20B, TWO_NODES)
    planned("sglang", GPT_OSS_20B, {**TWO_NODES, "phase": "prefill"})
    planned("sglang", GPT_OSS_20B, {**TWO_NODES, "all_to_all": "collectives"})


def test_a_shell_reads_back_exactly_the_words_and_no_path_can_add_a_line() -> None:
    hostile = '/models/a b\'; touch "$HOME"\n# `x`'
    plan = plan_engine(Engine(kind="vllm"), ModelConfig.from_hf(QWEN3_30B), hostile)
    script = plan.shell().replace("vllm serve", f"{sys.executable} -c 'import sys; print(sys.argv[1:])' serve")
    said = subprocess.run(["sh", "-e"], input=script, capture_output=True, text=True, check=True)
    assert said.stderr == ""
    assert said.stdout == f"{plan.processes[0].argv[1:]}\n"


def test_the_command_prints_a_plan_for_people_and_for_programs(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    text = "[weights]\nrefresh_deadline_s = 600.0\n[engine]\nkind = 'sglang'\ncontext_tokens = 64\n"
    text += "[engine.launch]\ngpus_per_node = 4\n"
    recipe.write_text(text, encoding="utf-8")
    shown = CliRunner().invoke(app, ["plan-engine", str(recipe)])
    assert shown.exit_code == 0, shown.output
    assert shown.output.splitlines()[-1].startswith("python3 -m sglang.launch_server --model-path ")
    told = CliRunner().invoke(app, ["plan-engine", str(recipe), "--json", "--set", "engine.kind=vllm"])
    tree = json.loads(told.output)
    assert tree["processes"][0]["argv"][:2] == ["vllm", "serve"]
    assert set(tree["processes"][0]["env"]) <= set(tree["why"])
