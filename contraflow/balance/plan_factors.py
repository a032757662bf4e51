"""What of a chip's and a link's speed is reached: the planner's calibration, each number with where it is from.

`bench/planner.py` fits those marked "fitted" on rows it names, and writes them; a file of its own can be given instead.
The others are assumptions or read off a published row, and say so. Times are in seconds, rates in GB/s (10^9 bytes).
"""

from pathlib import Path
from typing import Literal

import msgspec

from contraflow.errors import ConfigError


class Backend(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens get to their experts. A hop takes `latency + max(network bytes / rate, NVLink bytes / rate)`."""

    copies: Literal["choice", "rank", "node"]  # a token travels once for each expert, or rank, or node that it goes to
    value_bytes: float  # of one element on its way to experts; 2 on the way back
    inside_s: float  # latency of a hop inside one NVLink domain
    nvlink: float  # share of NVLink's rate
    out_s: float = 0.0  # more on the way out, inside one domain: counts and layout
    across_s: float = 0.0  # latency of a hop between two domains
    domain_s: float = 0.0  # more for each further domain
    network: float = 0.0  # share of the network's rate; 0: cannot leave its domain
    needs: str = ""  # what an instance must have: "efa", "gda", or nothing


NODE = 320 / 450  # share of NVLink inside a node of p5en, by the README of UCCL-EP
OWN_S = 15.1e-6  # fitted: latency of own kernels, one H200 pair (dispatch_two_gpus); assumed for DeepEP in one node
BACKENDS = {
    # fitted: gather + wire and wire + sum, one H200 pair. The network's share is NCCL's all-to-all of 40.4 of 50 GB/s
    # between 8 p5 (awslabs ep-backend-comparison). Its latencies over the network are assumed
    "all_to_all": Backend(
        copies="rank", value_bytes=2, inside_s=30.9e-6, nvlink=0.281, across_s=100e-6, domain_s=25e-6, network=0.81
    ),
    # fitted: own kernels at 24 SMs, one H200 pair (dispatch_two_gpus)
    "nvlink": Backend(copies="rank", value_bytes=2, inside_s=OWN_S, nvlink=0.371, out_s=145e-6),
    # fitted: V2 with transfers posted by GPUs, 128 and 8192 tokens at 2 nodes of p5en (whn09)
    "deepep": Backend(
        copies="node", value_bytes=1.03125, inside_s=OWN_S, nvlink=NODE, across_s=148e-6, network=0.902, needs="gda"
    ),
    # fitted: the same where a processor's thread posts, 128 and 8192 tokens at 2 nodes, 128 at 4 (whn09)
    "deepep_proxy": Backend(
        copies="node",
        value_bytes=1.03125,
        inside_s=OWN_S,
        nvlink=NODE,
        across_s=345e-6,
        domain_s=302e-6,
        network=0.941,
        needs="efa",
    ),
}


class Factors(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of peak, and times that do not shrink."""

    decode_hbm: float = 0.9  # assumed: of HBM's rate, weights and cache read in decoding
    decode_layer_s: float = 67.9e-6  # fitted: what a layer costs beside bytes; rollout_gpu, OLMoE, 256 and 1024 tokens
    prefill: float = 0.483  # fitted: of peak FLOP/s in prefill; rollout_gpu, Qwen3-30B-A3B, 256 tokens
    train: float = 0.355  # fitted: of peak in training, recomputed work counted; train_gpu, variant whole+all
    matrices: float = 0.6  # assumed: of peak in decoding's larger matrix products
    pcie_gb_s: float = 25.0  # assumed: between GPUs without NVLink
    collective_network: float = 0.8  # assumed: of the network's rate in reductions and gathers
    collective_nvlink: float = 0.7  # assumed: the same of NVLink's
    overlap: float = 0.5  # assumed: share of a trainer's gathers and reductions hidden behind compute
    sender_gb_s: float = 2.18  # fitted: of one sending GPU in a sharded refresh; miles p2p, 30B and 235B (2b)
    broadcast_gb_s: float = 33.1  # fitted: of one sender's broadcast; miles NCCL, 30B and 235B (2b)
    blob_gb_s: float = 2.5  # assumed: of one node through an object store
    refresh_s: float = 0.2  # assumed: of any refresh: pause, proof, go on
    memory_kept: float = 0.1  # assumed: share of HBM for graphs, kernels and buffers
    backends: dict[str, Backend] = msgspec.field(default_factory=lambda: dict(BACKENDS))


def read_factors(path: Path) -> Factors:
    """Factors from a JSON file: an object of them, or one with the key `factors`, as bench/planner.py writes.

    Raises: ConfigError naming the file and what is wrong.
    """
    try:
        tree = msgspec.json.decode(path.read_bytes())
        tree = tree.get("factors", tree) if isinstance(tree, dict) else tree
        unknown = sorted(set(tree) - set(Factors.__struct_fields__))
        if unknown:
            raise ConfigError(f"{path}: factor {unknown[0]!r} is not one of {', '.join(Factors.__struct_fields__)}")
        found = msgspec.convert(tree, Factors)
    except (OSError, msgspec.MsgspecError) as fault:
        raise ConfigError(f"{path}: {fault}; give what bench/planner.py wrote, or leave the option out") from None
    for name in ("decode_hbm", "prefill", "train", "matrices", "collective_network", "collective_nvlink"):
        if not 0 < getattr(found, name) <= 1:
            raise ConfigError(f"{path}: {name} = {getattr(found, name)} is a share of peak: above 0, at most 1")
    return found
