"""Numbers that others published, for the planner to be held against; each with its source, none measured here.

`FABRIC`: microseconds of one dispatch ("out") or combine ("back") at hidden 7168, top-8 of 256 experts. `REFRESH`:
seconds to bring a version to engines. `RATIOS`: one backend's time over another's. `fitted` rows gave a factor.
"""

from typing import Any, NamedTuple


class Fabric(NamedTuple):
    backend: str
    instance: str
    nodes: int  # of 8 GPUs
    tokens: int
    way: str
    value_bytes: float
    microseconds: float
    source: str
    fitted: bool = False


WHN09 = "awslabs/awsome-distributed-ai, deepep-v2 on p5en, 12 SMs (whn09 results)"
B200 = "awslabs/awsome-distributed-ai, ep-backend-comparison/RESULTS-b200.md"
PPLX = "awslabs/awsome-distributed-ai, pplx-garden-benchmark/README.md"
FP8, BF16 = 1.03125, 2.0


def _pplx(nodes: int, tokens: int, out: float, back: float) -> list[Fabric]:
    fitted = nodes == 2
    return [
        Fabric("pplx", "p5en.48xlarge", nodes, tokens, "out", FP8, out, PPLX, fitted),
        Fabric("pplx", "p5en.48xlarge", nodes, tokens, "back", BF16, back, PPLX, fitted),
    ]


FABRIC = [
    Fabric("deepep", "p5en.48xlarge", 2, 128, "out", FP8, 169, WHN09, True),
    Fabric("deepep", "p5en.48xlarge", 2, 8192, "out", FP8, 1503, WHN09, True),
    Fabric("deepep", "p5en.48xlarge", 4, 128, "out", FP8, 184, WHN09),
    Fabric("deepep", "p5en.48xlarge", 4, 8192, "out", FP8, 3955, WHN09),
    Fabric("deepep_proxy", "p5en.48xlarge", 2, 128, "out", FP8, 365, WHN09, True),
    Fabric("deepep_proxy", "p5en.48xlarge", 2, 8192, "out", FP8, 1644, WHN09, True),
    Fabric("deepep_proxy", "p5en.48xlarge", 4, 128, "out", FP8, 1003, WHN09, True),
    Fabric("deepep_proxy", "p5en.48xlarge", 4, 8192, "out", FP8, 4315, WHN09),
    Fabric("deepep", "p6-b200.48xlarge", 2, 4096, "out", FP8, 865, B200),
    Fabric("deepep", "p6-b200.48xlarge", 2, 4096, "out", BF16, 1501, B200),
    Fabric("deepep", "p6-b200.48xlarge", 2, 4096, "back", BF16, 1615, B200),
    Fabric("deepep", "p6-b200.48xlarge", 4, 4096, "out", FP8, 2041, B200),
    Fabric("deepep", "p6-b200.48xlarge", 4, 4096, "out", BF16, 3753, B200),
    Fabric("deepep", "p6-b200.48xlarge", 4, 4096, "back", BF16, 3745, B200),
    *_pplx(2, 128, 218, 245),
    *_pplx(4, 128, 231, 337),
    *_pplx(8, 128, 269, 394),
    *_pplx(16, 128, 425, 589),
    *_pplx(2, 4096, 3181, 5374),
    *_pplx(4, 4096, 4605, 8286),
    *_pplx(8, 4096, 5396, 9855),
    *_pplx(16, 4096, 5883, 10785),
]

MILES = "miles docs/advanced/p2p-weight-transfer.md"
RESHARD = "NeMo-RL docs/design-docs/nccl-reshard-refit.md"
# what, carrier, parameters in 10^9 (taken as bf16), trainer GPUs, seconds, source, fitted
REFRESH: list[tuple[str, str, float, int, float, str, bool]] = [
    ("Qwen3-30B-A3B, 2 + 2 nodes", "collective", 30.5, 16, 2.16, MILES, True),
    ("Qwen3-235B-A22B, 8 + 8 nodes", "collective", 235.0, 64, 3.2, MILES, True),
    ("GLM-5 744B, 16 + 16 nodes", "collective", 744.0, 128, 8.5, MILES, False),
    ("Kimi-K2 1T, 32 + 32 nodes", "collective", 1000.0, 256, 7.2, MILES, False),
    ("Qwen3-30B-A3B, EP8 x PP2 to TP8 x DP2", "collective", 30.5, 16, 0.87, RESHARD, False),
    ("DeepSeek-V3, PP16 x EP16 to TP32 x DP8", "collective", 671.0, 256, 2.6, RESHARD, False),
    ("Qwen3-30B-A3B, 2 + 2 nodes", "broadcast", 30.5, 16, 2.67, MILES, True),
    ("Qwen3-235B-A22B, 8 + 8 nodes", "broadcast", 235.0, 64, 10.8, MILES, True),
    ("GLM-5 744B, 16 + 16 nodes", "broadcast", 744.0, 128, 58.3, MILES, False),
    ("Kimi-K2 1T, 32 + 32 nodes", "broadcast", 1000.0, 256, 53.3, MILES, False),
]

QWEN3_235B: dict[str, Any] = {
    "family": "qwen3_moe", "vocab": 151936, "dim": 4096, "layers": 94, "heads": 64, "kv_heads": 4, "head_dim": 128,
    "experts": 128, "top_k": 8, "expert_ffn": 1536, "renormalise": True, "context": 40960,
}  # fmt: skip
NEMO = "NeMo-RL docs/about/performance-summary.md, v0.6: Qwen3-30B-A3B, 32 H100"
NEMO_TOKENS_S_GPU, NEMO_STEP_S, NEMO_GPUS, NEMO_SEQUENCES = 1102, 192.0, 32, 2048
PREFILL_GAIN, PREFILL_SOURCE = 62 / 44, "arXiv 2512.19849v2, figure 13: SGLang prefill EP32, Qwen3-235B, H200 and EFA"
POST_GAIN = 1.40  # tokens generated, 48 p5en, six parts of the stack changed at once (AWS blog of 2026-09-25)
