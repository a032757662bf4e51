"""What served engines need to send tokens to experts by DeepEP: what it cannot do, and its variables.

Both engines use its `Buffer` (V1) over NVSHMEM, in its normal mode for prefill and its low-latency mode for decode.
Limits are those of `dispatch.deepep_library`. Pure: no library is imported or asked.
"""

from typing import Literal

from contraflow.config.launch import Launch
from contraflow.dispatch.deepep_library import (
    BUFFER_RANKS,
    GRID_EXPERTS,
    LOW_LATENCY_CHOICES,
    LOW_LATENCY_WIDTHS,
    NODE_EXPERTS,
    NODE_RANKS,
)
from contraflow.errors import ConfigError
from contraflow.model.families import ModelConfig
from contraflow.rollout.launch_lines import Setting

Mode = Literal["normal", "low_latency", "auto"]  # auto: normal for prefill, low_latency for decode, in one server

MAX_LOW_LATENCY_TOKENS = 1024  # of one rank in one call: a tag in its messages ends there (internode_ll.cu)
QUEUE_DEPTH = 1024  # of a send queue, which holds two entries a token and two to spare, unless told otherwise


def check_deepep(launch: Launch, config: ModelConfig, mode: Mode, tokens: int) -> None:
    """Raise ConfigError if DeepEP cannot carry this model over these GPUs; `tokens` a rank in a low-latency call."""
    ranks, nodes = launch.ranks, launch.nodes
    if nodes > 1 and launch.gpus_per_node != NODE_RANKS:
        raise _refusal(f"gpus_per_node = {launch.gpus_per_node} on {nodes} nodes: it takes {NODE_RANKS} a node")
    if mode != "low_latency" and ranks not in BUFFER_RANKS:
        raise _refusal(f"{ranks} GPUs in {mode} mode: it has settings for {', '.join(map(str, BUFFER_RANKS))}")
    if ranks > NODE_RANKS and ranks % NODE_RANKS:
        raise _refusal(f"{ranks} GPUs: more than {NODE_RANKS} must be a multiple of it")
    held, most = (config.experts + launch.redundant_experts) // ranks, NODE_EXPERTS if nodes == 1 else GRID_EXPERTS
    if mode != "low_latency" and held > most:
        raise _refusal(f"{held} experts on each of {ranks} GPUs: its counting kernels take {most}; use more GPUs")
    if mode == "normal":
        return
    if not 1 <= tokens <= MAX_LOW_LATENCY_TOKENS:
        raise _refusal(f"{tokens} tokens of a rank in one low-latency call: it takes {MAX_LOW_LATENCY_TOKENS};"
                       " lower engine.max_sequences")  # fmt: skip
    if config.top_k > LOW_LATENCY_CHOICES:
        raise _refusal(f"{config.top_k} experts a token in {mode} mode: it takes {LOW_LATENCY_CHOICES}")


def check_width(width: int, *, padded: bool) -> None:
    """Raise ConfigError if there is no low-latency kernel of this width, nor of a larger one if the engine pads."""
    allowed = ", ".join(map(str, LOW_LATENCY_WIDTHS))
    if width not in LOW_LATENCY_WIDTHS and not (padded and width < LOW_LATENCY_WIDTHS[-1]):
        raise _refusal(f"hidden size {width} in low-latency mode: its kernels are compiled for {allowed}")


def deepep_settings(launch: Launch, mode: Mode, tokens: int) -> tuple[Setting, ...]:
    """Variables of every node's process."""
    settings: list[Setting] = []
    if mode != "normal" and 2 * (tokens + 1) > QUEUE_DEPTH:
        depth = 1 << (2 * tokens + 1).bit_length()
        settings.append(Setting("NVSHMEM_QP_DEPTH", str(depth), f"two entries for each of {tokens} tokens, and two"))
    if launch.nodes == 1:
        return tuple(settings)
    if launch.fabric == "infiniband":
        settings.append(Setting("NVSHMEM_IB_ENABLE_IBGDA", "1", "GPUs post to the network cards themselves"))
    else:
        settings += [
            Setting("NVSHMEM_REMOTE_TRANSPORT", "libfabric", "EFA is reached by libfabric, it has no IBGDA"),
            Setting("NVSHMEM_LIBFABRIC_PROVIDER", "efa", "its provider"),
            Setting("FI_PROVIDER", "efa", "and not TCP, silently"),
        ]
    if launch.interface:
        settings.append(Setting("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", launch.interface, "where its ranks meet"))
    return tuple(settings)


def deepep_notes(launch: Launch, mode: Mode) -> list[str]:
    """What has to be there before the engine is started."""
    notes = ["the module deep_ep (DeepEP V1, class Buffer) must be in every node's image, built for its torch and CUDA"]
    if launch.nodes > 1 and launch.fabric == "infiniband":
        notes.append("IBGDA needs the nodes' drivers set up for it, and containers on the host's network")
    if launch.nodes > 1 and launch.fabric == "efa":
        notes.append("EFA delivers out of order: DeepEP must be the port for it, with NVSHMEM 3.7 or newer")
    if mode == "auto":
        notes.append("auto keeps the buffers of both modes, which takes several GB of each GPU")
    return notes


def _refusal(what: str) -> ConfigError:
    return ConfigError(f"engine.launch: DeepEP cannot carry {what}; or set engine.launch.all_to_all = 'collectives'")
