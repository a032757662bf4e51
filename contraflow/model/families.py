"""What a model is: one frozen `ModelConfig` for every family, read from and written to Hugging Face's config.json.

Knows Qwen3-MoE, OLMoE and Mixtral (mixtures of experts), Qwen3 and Llama (dense), as transformers 4 and 5 write them.
Refuses, by name, whatever the decoder would compute wrongly. Does not touch files or tensors.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from contraflow.errors import ModelError

QKNorm = Literal["none", "head", "projection"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """What all models of one Hugging Face `model_type` have in common."""

    architecture: str
    experts: tuple[str, ...] = ()  # config keys that may hold the number of experts; none means dense
    expert_ffn: str = "intermediate_size"  # config key of an expert's width
    moe: str = ""  # tensor-name prefix of a MoE block, its experts' gate, up and down
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    qk_norm: QKNorm = "none"
    renormalise: bool | None = None  # None: the config says (norm_topk_prob)
    bias: bool = True  # the config may ask for attention biases
    kv_heads: bool = False  # num_key_value_heads must be given; otherwise it defaults to the number of heads
    head_dim: int | None = None  # when the config has none; None: hidden_size / heads
    rope_theta: float = 10000.0
    window: Literal["none", "always", "switched"] = "none"  # how sliding_window is turned on


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
class ModelConfig:
    """The shape and arithmetic of one decoder.

    Invariant: a config that exists can be built and run; whatever cannot raised ModelError.
    """

    family: str
    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int = 0  # width of a dense MLP; 0 when there is none
    experts: int = 0  # 0: a dense model
    top_k: int = 0
    expert_ffn: int = 0
    dense_layers: tuple[int, ...] = ()  # layers of a mixture that have a dense MLP instead
    renormalise: bool = False  # router weights of the chosen experts sum to 1
    attention_bias: bool = False
    clip_qkv: float | None = None
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tied: bool = False  # the head is the embedding
    context: int = 4096
    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None

    def __post_init__(self) -> None:
        for fault in _faults(self):
            raise ModelError(f"{self.family} model: {fault}")

    @property
    def qk_norm(self) -> QKNorm:
        return FAMILIES[self.family].qk_norm

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have experts: M of them."""
        return tuple(i for i in range(self.layers) if self.experts and i not in self.dense_layers)

    @classmethod
    def from_hf(cls, tree: Mapping[str, Any]) -> "ModelConfig":
        """Read the content of a config.json. Raises ModelError naming the key, its value and what is allowed."""
        kind = tree.get("model_type")
        if kind not in FAMILIES:
            raise ModelError(f"model_type {kind!r} is not known; known are {', '.join(FAMILIES)}")
        family = FAMILIES[kind]
        _refuse(tree, family)
        heads, dim, layers = (_int(tree, k) for k in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
        ffn = _int(tree, "intermediate_size")
        theta, scaling = _rope(tree, family)
        return cls(
            family=kind,
            vocab=_int(tree, "vocab_size"),
            dim=dim,
            layers=layers,
            heads=heads,
            kv_heads=_int(tree, "num_key_value_heads", missing=None if family.kv_heads else heads, null=heads),
            head_dim=_int(tree, "head_dim", missing=family.head_dim or dim // max(heads, 1), null=dim // max(heads, 1)),
            **_mixture(tree, family, layers, ffn),
            attention_bias=family.bias and bool(tree.get("attention_bias")),
            clip_qkv=tree.get("clip_qkv") if kind == "olmoe" else None,
            norm_eps=_float(tree, "rms_norm_eps"),
            rope_theta=theta,
            rope_scaling=scaling,
            tied=bool(tree.get("tie_word_embeddings")),
            context=_int(tree, "max_position_embeddings"),
            bos=tree.get("bos_token_id"),
            eos=_ids(tree.get("eos_token_id")),
            pad=tree.get("pad_token_id"),
        )

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that transformers and `from_hf` read back to the same model."""
        family = FAMILIES[self.family]
        rope: dict[str, Any] = {"rope_theta": self.rope_theta, "rope_type": "default"}
        if self.rope_scaling is not None:
            given = dataclasses.asdict(self.rope_scaling)
            given["original_max_position_embeddings"] = given.pop("original_context")
            rope |= {"rope_type": "llama3", **given}
        tree: dict[str, Any] = {
            "architectures": [family.architecture],
            "model_type": self.family,
            "vocab_size": self.vocab,
            "hidden_size": self.dim,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn or self.expert_ffn,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": rope,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": self.context,
            "bos_token_id": self.bos,
            "eos_token_id": self.eos[0] if len(self.eos) == 1 else list(self.eos) or None,
            "pad_token_id": self.pad,
        }
        if family.bias:
            tree["attention_bias"] = self.attention_bias
        if self.experts:
            tree |= {family.experts[0]: self.experts, "num_experts_per_tok": self.top_k}
            tree |= {} if family.renormalise else {"norm_topk_prob": self.renormalise}
        if self.family == "qwen3_moe":
            tree |= {"moe_intermediate_size": self.expert_ffn, "decoder_sparse_step": 1}
            tree["mlp_only_layers"] = list(self.dense_layers)
        if self.family == "olmoe":
            tree["clip_qkv"] = self.clip_qkv
        return tree

    def digest(self) -> str:
        """SHA-256 (hex) over everything that decides what the weights mean; special tokens do not."""
        fields = dataclasses.asdict(self)
        for name in ("bos", "eos", "pad"):
            del fields[name]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _faults(c: ModelConfig) -> list[str]:
    if c.family not in FAMILIES:
        return [f"not a known family; known are {', '.join(FAMILIES)}"]
    sizes = ("vocab", "dim", "layers", "heads", "kv_heads", "head_dim", "context")
    faults = [f"{name} = {getattr(c, name)} must be at least 1" for name in sizes if getattr(c, name) < 1]
    if faults:
        return faults
    if c.heads % c.kv_heads:
        faults.append(f"heads = {c.heads} must be a multiple of kv_heads = {c.kv_heads}")
    if c.head_dim % 2:
        faults.append(f"head_dim = {c.head_dim} must be even, since rotary positions turn pairs")
    if c.experts and not 1 <= c.top_k <= c.experts:
        faults.append(f"top_k = {c.top_k} must be in [1, experts = {c.experts}]")
    if bool(c.experts) != bool(FAMILIES[c.family].experts):
        faults.append(f"experts = {c.experts}: the family {'needs' if not c.experts else 'has no'} experts")
    if c.experts and (c.dim % 8 or c.expert_ffn % 8 or c.expert_ffn < 8):
        # torch's grouped matmul reads rows in steps of 16 bytes.
        faults.append(f"dim = {c.dim} and expert_ffn = {c.expert_ffn} must be multiples of 8")
    if any(not 0 <= i < c.layers for i in c.dense_layers):
        faults.append(f"dense_layers = {list(c.dense_layers)} must be in [0, layers = {c.layers})")
    if (not c.experts or c.dense_layers) and c.ffn < 1:
        faults.append(f"ffn = {c.ffn} must be at least 1, since there are dense layers")
    return faults


def _refuse(tree: Mapping[str, Any], family: Family) -> None:
    """What the decoder does not compute."""
    if tree.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act {tree['hidden_act']!r} is not supported; only 'silu' is")
    if tree.get("mlp_bias"):
        raise ModelError("mlp_bias true is not supported")
    if tree.get("quantization_config"):
        raise ModelError("quantization_config: quantised weights are not read; dequantise the checkpoint first")
    window = tree.get("sliding_window")
    on = family.window == "always" or (family.window == "switched" and bool(tree.get("use_sliding_window")))
    if on and window is not None and window < _int(tree, "max_position_embeddings"):
        raise ModelError(f"sliding_window {window} is not supported; attention here is always over the whole context")


def _mixture(tree: Mapping[str, Any], family: Family, layers: int, ffn: int) -> dict[str, Any]:
    if not family.experts:
        return {"ffn": ffn}
    key = next((k for k in family.experts if tree.get(k) is not None), family.experts[0])
    step = _int(tree, "decoder_sparse_step", missing=1)
    listed = tree.get("mlp_only_layers") or []
    dense = tuple(i for i in range(layers) if i in listed or (i + 1) % max(step, 1))
    return {
        "experts": _int(tree, key),
        "top_k": _int(tree, "num_experts_per_tok"),
        "expert_ffn": _int(tree, family.expert_ffn),
        "ffn": ffn if family.expert_ffn != "intermediate_size" else 0,
        "dense_layers": dense,
        "renormalise": bool(tree.get("norm_topk_prob")) if family.renormalise is None else family.renormalise,
    }


def _rope(tree: Mapping[str, Any], family: Family) -> tuple[float, RopeScaling | None]:
    rope = tree.get("rope_parameters") or tree.get("rope_scaling") or {}
    theta = rope.get("rope_theta", tree.get("rope_theta") or family.rope_theta)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if float(rope.get("partial_rotary_factor", tree.get("partial_rotary_factor") or 1.0)) != 1.0:
        raise ModelError("partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return float(theta), None
    if kind != "llama3":
        raise ModelError(f"rope_type {kind!r} is not supported; 'default' and 'llama3' are")
    names = ("factor", "low_freq_factor", "high_freq_factor")
    factors = {name: _float(rope, name) for name in names}
    return float(theta), RopeScaling(**factors, original_context=_int(rope, "original_max_position_embeddings"))


def _int(tree: Mapping[str, Any], key: str, *, missing: int | None = None, null: int | None = None) -> int:
    value = tree.get(key, missing)
    value = null if value is None and key in tree else value
    if value is None:
        raise ModelError(f"config key {key!r} is missing")
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelError(f"config key {key!r} = {value!r} must be an integer")
    return value


def _float(tree: Mapping[str, Any], key: str) -> float:
    value = tree.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelError(f"config key {key!r} = {value!r} must be a number" if key in tree else f"{key!r} is missing")
    return float(value)


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
