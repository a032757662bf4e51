"""The command lines of a vLLM server whose experts lie over all its GPUs: data and expert parallel, one process a node.

Flags are those of vLLM 0.24 to 0.32 (docs/serving/{expert,data}_parallel_deployment, vllm/config/parallel.py). There
expert-parallel size = tensor-parallel size × data-parallel size, limits are those of one data-parallel rank, and the
low-latency buffers of DeepEP are as large as `--max-num-batched-tokens`. Pure; refusals are ConfigErrors.
"""

from collections.abc import Iterator

from contraflow.config.engine import Engine
from contraflow.config.launch import Launch
from contraflow.errors import ConfigError
from contraflow.model.families import ModelConfig
from contraflow.rollout.launch_deepep import (
    MAX_LOW_LATENCY_TOKENS,
    Mode,
    check_deepep,
    check_width,
    deepep_notes,
    deepep_settings,
)
from contraflow.rollout.launch_lines import Flag, Plan, Process, Setting
from contraflow.rollout.vllm import EXTENSION

VERSIONS = "vLLM 0.24 to 0.32"
_BACKENDS = {"normal": "deepep_high_throughput", "low_latency": "deepep_low_latency"}


def plan_vllm(engine: Engine, launch: Launch, config: ModelConfig, folder: str) -> Plan:
    """Processes of one vLLM engine that serves `folder`. Raises ConfigError for what vLLM or DeepEP cannot do."""
    mode = _mode(launch)
    tokens = _step_tokens(engine, launch, mode)
    notes = [
        "the RL endpoints of VLLM_SERVER_DEV_MODE obey whoever reaches the port: keep it inside the cluster",
        "contraflow must be on every node's PYTHONPATH, and engine.server.folder be one that every node sees",
    ]
    if mode is not None:
        _check(launch, config, mode, tokens)
        notes += deepep_notes(launch, mode)
    if mode == "low_latency" and engine.compute == "bfloat16":
        notes.append("bf16 experts behind low-latency DeepEP are computed by Triton kernels, slower than fp8 ones")
    if launch.phase != "both":
        notes.append("set VLLM_NIXL_SIDE_CHANNEL_HOST to each node's own address, and put a router before both phases")
    processes = tuple(
        Process(
            node,
            ("vllm", "serve", folder),
            (*_model(engine, tokens), *_spread(launch, mode), *_place(launch, node), *_phase(launch)),
            tuple(_settings(launch, mode, tokens, node)),
        )
        for node in range(launch.nodes)
    )
    return Plan("vllm", VERSIONS, f"http://{launch.address}:{launch.port}", processes, tuple(notes))


def _mode(launch: Launch) -> Mode | None:
    """Of DeepEP; None: collectives. A server has one mode: both phases take that of decode, where the time goes."""
    if not launch.deepep:
        return None
    return "normal" if launch.phase == "prefill" else "low_latency"


def _step_tokens(engine: Engine, launch: Launch, mode: Mode | None) -> int:
    """Of one rank in one step: all its sequences, and as much prefill as there is and fits."""
    prefill = 0 if launch.phase == "decode" else engine.prefill_tokens
    return max(engine.max_sequences, min(prefill, MAX_LOW_LATENCY_TOKENS) if mode == "low_latency" else prefill)


def _check(launch: Launch, config: ModelConfig, mode: Mode, tokens: int) -> None:
    if launch.copies == 1:
        raise ConfigError(
            f"engine.launch: tp = {launch.tp} of {launch.ranks} GPUs leaves one data-parallel rank, and vLLM then sends"
            " nothing by DeepEP; lower tp, or set engine.launch.all_to_all = 'collectives'"
        )
    if launch.wire == "fp8":
        raise ConfigError(
            "engine.launch.wire = 'fp8': vLLM sends fp8 tokens only to experts that are stored in fp8 blocks, and a"
            " policy's are not; set it to 'bf16'"
        )
    check_deepep(launch, config, mode, tokens)
    if mode == "low_latency":
        check_width(config.dim, padded=True)


def _model(engine: Engine, tokens: int) -> Iterator[Flag]:
    yield Flag(("--dtype", engine.compute), "of weights and forward pass, as engine.compute")
    yield Flag(("--max-model-len", str(engine.context_tokens)), "longest sequence, as engine.context_tokens")
    yield Flag(("--max-num-seqs", str(engine.max_sequences)), "of one data-parallel rank, as engine.max_sequences")
    yield Flag(("--max-num-batched-tokens", str(tokens)), "of one rank in one step; sizes DeepEP's low-latency buffers")
    yield Flag(("--logprobs-mode", "processed_logprobs"), "those of the distribution that is sampled from")
    yield Flag(("--tokens-only",), "tokens in, tokens out")
    yield Flag(("--worker-extension-cls", EXTENSION), "loads new weights and says whose they are")
    yield Flag(("--generation-config", "vllm"), "no top-p, top-k or temperature from the model's folder")
    if engine.routes:
        yield Flag(("--enable-return-routed-experts",), "engine.routes: each token's experts come with it")


def _spread(launch: Launch, mode: Mode | None) -> Iterator[Flag]:
    yield Flag(("--tensor-parallel-size", str(launch.tp)), "GPUs that share one copy of the attention, in a node")
    yield Flag(("--data-parallel-size", str(launch.copies)), f"copies of the attention on {launch.ranks} GPUs")
    yield Flag(("--enable-expert-parallel",), f"whole experts, over all {launch.ranks} GPUs, instead of slices of each")
    if mode is None:
        yield Flag(("--all2all-backend", "allgather_reducescatter"), "by NCCL alone: every token to every rank")
    else:
        reason = {"normal": "prefill: large batches", "low_latency": "decode: small batches, in CUDA graphs"}[mode]
        yield Flag(("--all2all-backend", _BACKENDS[mode]), f"DeepEP, {mode} mode; {reason}")
    if launch.redundant_experts:
        balance = f'{{"num_redundant_experts":{launch.redundant_experts}}}'
        yield Flag(("--enable-eplb",), "experts are placed anew by their load, while the engine runs")
        yield Flag(("--eplb-config", balance), "replicas, over all GPUs")


def _place(launch: Launch, node: int) -> Iterator[Flag]:
    local = launch.gpus_per_node // launch.tp
    if launch.nodes > 1:
        yield Flag(("--data-parallel-size-local", str(local)), "copies of the attention on each node")
        yield Flag(("--data-parallel-address", launch.address), "node 0, where the others find it")
        yield Flag(("--data-parallel-rpc-port", str(launch.rendezvous_port)), "and its port for them")
    if node:
        yield Flag(("--data-parallel-start-rank", str(node * local)), "ranks on the nodes before this one")
        yield Flag(("--headless",), "no HTTP here: node 0 answers for all")
        return
    yield Flag(("--host", "0.0.0.0"), "reached from other machines")
    yield Flag(("--port", str(launch.port)), "of HTTP")
    yield Flag(("--api-server-count", "1"), "one process sees every request and every pause")


def _phase(launch: Launch) -> Iterator[Flag]:
    if launch.phase != "both":
        carry = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
        yield Flag(("--kv-transfer-config", carry), "keys and values go from prefill to decode engines by NIXL")


def _settings(launch: Launch, mode: Mode | None, tokens: int, node: int) -> Iterator[Setting]:
    if node == 0:
        yield Setting("VLLM_SERVER_DEV_MODE", "1", "endpoints that pause, load weights and resume")
    yield from network_settings(launch)
    if mode is not None:
        yield from deepep_settings(launch, mode, tokens)


def network_settings(launch: Launch) -> Iterator[Setting]:
    """Which network the ranks of several nodes meet on, for any engine."""
    if launch.nodes == 1:
        return
    if launch.interface:
        yield Setting("GLOO_SOCKET_IFNAME", launch.interface, "where ranks meet; a wrong guess hangs the start")
    if launch.fabric == "efa":
        yield Setting("NCCL_SOCKET_IFNAME", "^lo,docker", "by exclusion: a named interface has put NCCL on TCP")
    elif launch.interface:
        yield Setting("NCCL_SOCKET_IFNAME", launch.interface, "where NCCL's ranks meet")
