"""The command lines of an SGLang server whose experts lie over all its GPUs: DP attention, DeepEP, one process a node.

Flags are those of SGLang 0.5.15 to 0.5.23 (docs/advanced_features/{server_arguments,expert_parallelism}). There
`--tp-size` counts all GPUs and expert-parallel size equals it; with DP attention `--chunked-prefill-size` and
`--max-running-requests` are shared out among the copies. Pure; refusals are ConfigErrors.
"""

from collections.abc import Iterator

from contraflow.config.engine import Engine
from contraflow.config.launch import Launch
from contraflow.errors import ConfigError
from contraflow.model.families import ModelConfig
from contraflow.rollout.launch_deepep import Mode, check_deepep, check_width, deepep_notes, deepep_settings
from contraflow.rollout.launch_lines import Flag, Plan, Process, Setting
from contraflow.rollout.launch_vllm import network_settings

RESERVED_TOKENS = 6  # of a context: a prompt must be shorter by as many (srt/managers/scheduler, max_req_input_len)
VERSIONS = "SGLang 0.5.15 to 0.5.23"
_KERNELS: dict[Mode, str] = {
    "normal": "for prefill",
    "low_latency": "for decode, in CUDA graphs",
    "auto": "normal ones for prefill, low-latency ones in CUDA graphs for decode",
}
_MODES: dict[str, Mode] = {"both": "auto", "prefill": "normal", "decode": "low_latency"}


def plan_sglang(engine: Engine, launch: Launch, config: ModelConfig, folder: str) -> Plan:
    """Processes of one SGLang engine that serves `folder`. Raises ConfigError for what SGLang or DeepEP cannot do."""
    mode = _mode(launch)
    notes = [
        "control endpoints obey whoever reaches the port: keep it inside the cluster, or add --api-key",
        "engine.server.folder must be one that every node sees",
    ]
    if engine.context_tokens + RESERVED_TOKENS > config.context:
        raise ConfigError(
            f"engine.context_tokens = {engine.context_tokens}: SGLang keeps {RESERVED_TOKENS} tokens of its context to"
            f" itself, and the model was made for {config.context}; at most {config.context - RESERVED_TOKENS}"
        )
    if mode is not None:
        check_deepep(launch, config, mode, engine.max_sequences)
        if mode != "normal":
            check_width(config.dim, padded=False)
        notes += deepep_notes(launch, mode)
        notes.append("bf16 experts behind DeepEP need DeepGEMM's bf16 kernels: look for the MoE runner in the log")
    processes = tuple(
        Process(
            node,
            ("python3", "-m", "sglang.launch_server"),
            (*_model(engine, launch, mode, folder), *_spread(launch, config, mode), *_place(launch, node)),
            tuple(_settings(engine, launch, mode)),
        )
        for node in range(launch.nodes)
    )
    return Plan("sglang", VERSIONS, f"http://{launch.address}:{launch.port}", processes, tuple(notes))


def _mode(launch: Launch) -> Mode | None:
    """Of DeepEP; None: collectives."""
    return _MODES[launch.phase] if launch.deepep else None


def _model(engine: Engine, launch: Launch, mode: Mode | None, folder: str) -> Iterator[Flag]:
    copies, sequences = launch.copies, engine.max_sequences
    # A decode-only server in low-latency mode has no other kernel for what little it does prefill.
    chunk = sequences if mode == "low_latency" else engine.prefill_tokens
    yield Flag(("--model-path", folder), "config, weights and tokenizer")
    yield Flag(("--dtype", engine.compute), "of weights and forward pass, as engine.compute")
    context = engine.context_tokens + RESERVED_TOKENS
    yield Flag(("--context-length", str(context)), f"engine.context_tokens, and {RESERVED_TOKENS} that it keeps")
    yield Flag(("--max-running-requests", str(sequences * copies)), f"{sequences} in each of {copies} copies")
    yield Flag(("--chunked-prefill-size", str(chunk * copies)), f"{chunk} tokens in each of {copies} copies")
    if mode != "normal":
        yield Flag(("--cuda-graph-max-bs", str(sequences)), "graphs for as many sequences as a copy has, not more")
    yield Flag(("--skip-tokenizer-init",), "tokens in, tokens out")
    yield Flag(("--incremental-streaming-output",), "a stream says each token once; its length does not grow squared")
    yield Flag(("--sampling-defaults", "openai"), "no top-p, top-k or temperature from the model's folder")
    if engine.routes:
        yield Flag(("--enable-return-routed-experts",), "engine.routes: each token's experts come with it")


def _spread(launch: Launch, config: ModelConfig, mode: Mode | None) -> Iterator[Flag]:
    yield Flag(("--tp-size", str(launch.ranks)), "all GPUs; DP attention divides the attention's share of them")
    yield Flag(("--ep-size", str(launch.ranks)), f"whole experts, over all {launch.ranks} GPUs")
    if launch.copies > 1:
        yield Flag(("--dp-size", str(launch.copies)), f"copies of the attention; GPUs of each: {launch.tp}")
        yield Flag(("--enable-dp-attention",), "each copy has sequences and a cache of its own")
        yield Flag(("--enable-dp-lm-head",), "logits of a copy stay in it")
        if config.dense_layers and launch.tp == 1:
            yield Flag(("--moe-dense-tp-size", "1"), "dense layers whole on each GPU: slices would be too thin")
    if mode is None:
        yield Flag(("--moe-a2a-backend", "none"), "by NCCL alone: every token to every rank")
    else:
        yield Flag(("--moe-a2a-backend", "deepep"), "DeepEP V1: a token travels once to each GPU that has its experts")
        yield Flag(("--deepep-mode", mode), f"its kernels; {_KERNELS[mode]}")
        yield Flag(("--deepep-dispatcher-output-dtype", launch.wire), "tokens travel so; the default is fp8")
        yield Flag(("--moe-runner-backend", "deep_gemm"), "grouped matmuls in the layouts that DeepEP leaves")
    if launch.redundant_experts:
        yield Flag(("--enable-eplb",), "experts are placed anew by their load, while the engine runs")
        yield Flag(("--ep-num-redundant-experts", str(launch.redundant_experts)), "replicas, over all GPUs")


def _place(launch: Launch, node: int) -> Iterator[Flag]:
    if launch.nodes > 1:
        yield Flag(("--nnodes", str(launch.nodes)), "machines of this engine")
        yield Flag(("--node-rank", str(node)), "this one's number")
        yield Flag(("--dist-init-addr", f"{launch.address}:{launch.rendezvous_port}"), "node 0, where ranks meet")
    yield Flag(("--host", "0.0.0.0"), "reached from other machines")
    yield Flag(("--port", str(launch.port)), "of HTTP; node 0 answers for all")
    if launch.phase != "both":
        yield Flag(("--disaggregation-mode", launch.phase), "keys and values go from prefill to decode engines")


def _settings(engine: Engine, launch: Launch, mode: Mode | None) -> Iterator[Setting]:
    yield from network_settings(launch)
    if mode is None:
        return
    tokens = engine.max_sequences
    if mode != "normal":
        reason = "sequences of a copy, one token each: sizes the low-latency buffers of all ranks alike"
        yield Setting("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", str(tokens), reason)
    yield from deepep_settings(launch, mode, tokens)
