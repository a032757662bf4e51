"""From a recipe to the command lines of its served engine: what runs where, or why it cannot.

Takes the recipe and the model's config, gives a `Plan`. Refuses what no engine could do with these experts on these
GPUs; what only one of them cannot do, its own planner refuses. Starts nothing.
"""

from collections.abc import Callable

from contraflow.config.engine import Engine
from contraflow.config.launch import Launch
from contraflow.errors import ConfigError
from contraflow.model.families import ModelConfig
from contraflow.rollout.launch_lines import Plan
from contraflow.rollout.launch_sglang import plan_sglang
from contraflow.rollout.launch_vllm import plan_vllm

PLANNERS: dict[str, Callable[[Engine, Launch, ModelConfig, str], Plan]] = {"vllm": plan_vllm, "sglang": plan_sglang}


def plan_engine(engine: Engine, config: ModelConfig, folder: str) -> Plan:
    """The processes of one engine that serves `folder`, as `engine.launch` spreads it.

    Raises: ConfigError naming the setting, its value, what is allowed and what to do.
    """
    if engine.kind not in PLANNERS:
        raise ConfigError(
            f"engine.kind = {engine.kind!r} runs inside this package and has no command line; those that do are"
            f" {', '.join(PLANNERS)}: --set engine.kind=vllm"
        )
    _check(engine, engine.launch, config)
    return PLANNERS[engine.kind](engine, engine.launch, config, folder)


def _check(engine: Engine, launch: Launch, config: ModelConfig) -> None:
    if not config.experts:
        raise ConfigError(f"a {config.family} model has no experts to share out among {launch.ranks} GPUs")
    slots = config.experts + launch.redundant_experts
    if slots % launch.ranks:
        more = f" and {launch.redundant_experts} replicas" if launch.redundant_experts else ""
        raise ConfigError(
            f"engine.launch: {config.experts} experts{more} on {launch.nodes} x {launch.gpus_per_node} GPUs: not the"
            f" same number on each; GPUs that fit are {_divisors(slots)}"
        )
    if config.heads % launch.tp:
        raise ConfigError(f"engine.launch.tp = {launch.tp} does not divide the model's {config.heads} attention heads")
    if launch.deepep and engine.compute != "bfloat16":
        raise ConfigError(f"engine.compute = {engine.compute!r}: DeepEP carries bf16; set it to 'bfloat16'")
    if launch.wire == "fp8" and not launch.deepep:
        raise ConfigError("engine.launch.wire = 'fp8' without DeepEP: collectives send what the layers compute in")
    if engine.context_tokens > config.context:
        raise ConfigError(
            f"engine.context_tokens = {engine.context_tokens}: the model was made for {config.context} at most"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, min(number, 256) + 1) if number % d == 0)
