"""The families of models: what all of one Hugging Face `model_type` have in common, and shapes only some of them have.

Mixtures of experts: Qwen3-MoE, OLMoE, Mixtral, DeepSeek-V3 (also Kimi-K2), GLM-4.5 and gpt-oss. Dense: Qwen3 and Llama.
Plain data; reading a config is `hf_config`, the config itself `families`.
"""

import math
from dataclasses import dataclass
from typing import Literal

QKNorm = Literal["none", "head", "projection"]


@dataclass(frozen=True)
class Family:
    """What all models of one Hugging Face `model_type` have in common."""

    architecture: str
    experts: tuple[str, ...] = ()  # config keys that may hold the number of experts; none means dense
    expert_ffn: str = "intermediate_size"  # config key of an expert's width
    moe: str = ""  # tensor-name prefix of a MoE block, its router, its experts' gate, up and down
    router_name: str = "gate"
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    qk_norm: QKNorm = "none"
    qk_norm_key: str | None = None  # config key that turns the norm on
    renormalise: bool | None = None  # None: the config says (norm_topk_prob)
    bias: bool = True  # the config may ask for attention biases
    out_bias: bool = True  # which the output projection has too
    kv_heads: bool = False  # num_key_value_heads must be given; otherwise it defaults to the number of heads
    head_dim: int | None = None  # when the config has none; None: hidden_size / heads
    rope_theta: float = 10000.0
    partial_rotary: float | None = None  # part of a head that turns, when the config has none; None: always all of it
    window: Literal["none", "always", "switched", "layers"] = "none"  # how sliding_window is turned on
    latent: bool = False  # multi-head latent attention
    sigmoid: bool = False  # sigmoid router with a correction bias and groups, shared experts, dense layers first
    oss: bool = False  # attention sinks, biases in router and experts, clamped SwiGLU, fused experts on disk


FAMILIES: dict[str, Family] = {
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        experts=("num_experts", "num_local_experts"),
        expert_ffn="moe_intermediate_size",
        moe="mlp",
        qk_norm="head",
        kv_heads=True,
        window="switched",
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        experts=("num_experts", "num_local_experts"),
        moe="mlp",
        qk_norm="projection",
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        experts=("num_local_experts", "num_experts"),
        moe="block_sparse_moe",
        expert_names=("w1", "w3", "w2"),
        renormalise=True,
        bias=False,
        kv_heads=True,
        rope_theta=1e6,
        window="always",
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        experts=("n_routed_experts", "num_local_experts"),
        expert_ffn="moe_intermediate_size",
        moe="mlp",
        latent=True,
        sigmoid=True,
    ),
    "glm4_moe": Family(
        architecture="Glm4MoeForCausalLM",
        experts=("n_routed_experts", "num_local_experts"),
        expert_ffn="moe_intermediate_size",
        moe="mlp",
        qk_norm="head",
        qk_norm_key="use_qk_norm",
        out_bias=False,
        kv_heads=True,
        partial_rotary=0.5,
        sigmoid=True,
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        experts=("num_local_experts", "num_experts"),
        moe="mlp",
        router_name="router",
        renormalise=True,
        kv_heads=True,
        head_dim=64,
        rope_theta=150000.0,
        window="layers",
        oss=True,
    ),
    "qwen3": Family(architecture="Qwen3ForCausalLM", qk_norm="head", kv_heads=True, head_dim=128, window="switched"),
    "llama": Family(architecture="LlamaForCausalLM"),
}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of slow rotary frequencies (rope_type `llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN (Peng et al. 2023, rope_type `yarn`): slow frequencies are stretched, and scores grow with the stretch."""

    factor: float
    original_context: int
    beta_fast: float = 32.0  # turns within the original context from which a frequency is kept
    beta_slow: float = 1.0  # and up to which it is stretched in full
    truncate: bool = True  # the blend begins and ends at whole pairs
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None

    @property
    def turn_gain(self) -> float:
        """What turned queries and keys are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    @property
    def score_gain(self) -> float:
        """What scores of latent attention are multiplied by, over all dimensions (DeepSeek)."""
        return self._growth(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _growth(self, scale: float) -> float:
        return 1.0 + 0.1 * scale * math.log(self.factor) if self.factor > 1 else 1.0


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Shape of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_rank: int | None  # None: queries are projected directly
    kv_rank: int
    nope_dim: int  # of a query and key head, not turned by position
    rope_dim: int  # turned; in keys one for all heads
    value_dim: int
    interleaved: bool = True  # turned pairs are neighbours on disk, not half a head apart
