"""What a model is: one frozen `ModelConfig` for every family, read from and written to Hugging Face's config.json.

Knows the families of `kinds`. Refuses, by name, whatever the decoder would compute wrongly. Does not touch files or
tensors.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contraflow.errors import ModelError
from contraflow.model.hf_config import FULL, WINDOW, read_fields, rope_tree
from contraflow.model.kinds import FAMILIES, Latent, QKNorm, RopeScaling, Yarn


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
    rope_scaling: RopeScaling | Yarn | None = None
    tied: bool = False  # the head is the embedding
    context: int = 4096
    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    # What came later stands in a digest only where it is not the default, so that older digests hold.
    qk_normed: bool = True  # the family's query and key norm is there
    rotary_dim: int = 0  # dimensions of a head that turn with its position, the first ones; 0: all
    latent: Latent | None = None  # keys and values are made from a latent; `head_dim` is a query's, `kv_heads` = heads
    window: int = 0  # positions that a token of the `window_layers` sees, its own among them
    window_layers: tuple[int, ...] = ()
    shared_experts: int = 0  # that every token of a mixture goes to, as one MLP of so many times `expert_ffn`
    groups: int = 1  # of experts, of which a token goes to the best `top_groups` only
    top_groups: int = 1
    routed_scale: float = 1.0  # of router weights, after they are made to sum to 1
    swiglu_alpha: float = 0.0  # of gpt-oss's experts: gain of the gate's sigmoid, and the clamp of gate and up
    swiglu_limit: float = 0.0
    mtp_layers: int = 0  # layers for multi-token prediction on disk, behind the others: neither computed nor kept

    def __post_init__(self) -> None:
        for fault in _faults(self):
            raise ModelError(f"{self.family} model: {fault}")

    @property
    def qk_norm(self) -> QKNorm:
        return FAMILIES[self.family].qk_norm if self.qk_normed else "none"

    @property
    def rotary(self) -> int:
        """Dimensions that turn with the position: of a head, or of the part of it that latent attention turns."""
        return self.latent.rope_dim if self.latent is not None else self.rotary_dim or self.head_dim

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have experts: M of them."""
        return tuple(i for i in range(self.layers) if self.experts and i not in self.dense_layers)

    @classmethod
    def from_hf(cls, tree: Mapping[str, Any]) -> "ModelConfig":
        """Read the content of a config.json. Raises ModelError naming the key, its value and what is allowed."""
        return cls(**read_fields(tree))

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that transformers and `from_hf` read back to the same model."""
        family = FAMILIES[self.family]
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
            "rope_parameters": rope_tree(self.rope_theta, self.rope_scaling),
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
        return tree | self._special_tree()

    def _special_tree(self) -> dict[str, Any]:
        """Keys that only some families have."""
        family, tree = FAMILIES[self.family], dict[str, Any]()
        if family.sigmoid:
            tree |= {"moe_intermediate_size": self.expert_ffn, "first_k_dense_replace": len(self.dense_layers)}
            tree |= {"n_shared_experts": self.shared_experts, "routed_scaling_factor": self.routed_scale}
            tree |= {"n_group": self.groups, "topk_group": self.top_groups, "num_nextn_predict_layers": 0}
        if family.partial_rotary is not None:
            tree["partial_rotary_factor"] = self.rotary / self.head_dim
        if family.qk_norm_key is not None:
            tree[family.qk_norm_key] = self.qk_normed
        if self.latent is not None:
            latent = self.latent
            tree |= {"q_lora_rank": latent.q_rank, "kv_lora_rank": latent.kv_rank, "v_head_dim": latent.value_dim}
            tree |= {"qk_nope_head_dim": latent.nope_dim, "qk_rope_head_dim": latent.rope_dim}
            tree |= {"rope_interleave": latent.interleaved, "head_dim": latent.rope_dim}
        if family.oss:
            kinds = [WINDOW if i in self.window_layers else FULL for i in range(self.layers)]
            tree |= {"sliding_window": self.window or self.context, "layer_types": kinds}
            tree |= {"swiglu_alpha": self.swiglu_alpha, "swiglu_limit": self.swiglu_limit}
        return tree

    def digest(self) -> str:
        """SHA-256 (hex) over everything that decides what the weights mean; special tokens do not."""
        fields = dataclasses.asdict(self)
        for name in ("bos", "eos", "pad", "mtp_layers"):
            del fields[name]
        for field in dataclasses.fields(self):
            if field.name in _LATER and getattr(self, field.name) == field.default:
                fields.pop(field.name, None)
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


_LATER = (
    *("qk_normed", "rotary_dim", "latent", "window", "window_layers", "shared_experts", "groups", "top_groups"),
    *("routed_scale", "swiglu_alpha", "swiglu_limit"),
)


def _faults(c: ModelConfig) -> list[str]:
    if c.family not in FAMILIES:
        return [f"not a known family; known are {', '.join(FAMILIES)}"]
    sizes = ("vocab", "dim", "layers", "heads", "kv_heads", "head_dim", "context")
    faults = [f"{name} = {getattr(c, name)} must be at least 1" for name in sizes if getattr(c, name) < 1]
    if faults:
        return faults
    if c.heads % c.kv_heads:
        faults.append(f"heads = {c.heads} must be a multiple of kv_heads = {c.kv_heads}")
    if c.head_dim % 2 and c.rotary == c.head_dim:
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
    return faults + _special_faults(c)


def _special_faults(c: ModelConfig) -> list[str]:
    """Of what only some families have."""
    family, faults = FAMILIES[c.family], []
    if not 0 <= c.rotary_dim <= c.head_dim or c.rotary % 2:
        faults.append(f"rotary_dim = {c.rotary} must be even and at most head_dim = {c.head_dim}")
    if bool(c.latent) != family.latent:
        faults.append(f"latent = {c.latent}: the family {'needs' if family.latent else 'has no'} latent attention")
    if c.latent is not None:
        faults += _latent_faults(c, c.latent)
    if bool(c.window) != bool(c.window_layers) or (c.window and not family.oss) or c.window < 0:
        faults.append(f"window = {c.window} of layers {list(c.window_layers)}: only gpt_oss has one, of 1 or more")
    if family.oss and not (c.swiglu_alpha > 0 and c.swiglu_limit > 0):
        faults.append(f"swiglu_alpha = {c.swiglu_alpha} and swiglu_limit = {c.swiglu_limit} must be above 0")
    if family.sigmoid and c.dense_layers != tuple(range(len(c.dense_layers))):
        faults.append(f"dense_layers = {list(c.dense_layers)} must be the first ones")
    if family.sigmoid and c.shared_experts < 1:
        faults.append(f"shared_experts = {c.shared_experts} must be at least 1")
    if not 1 <= c.top_groups <= c.groups or (c.groups > 1 and (c.experts % c.groups or c.experts < 2 * c.groups)):
        faults.append(
            f"groups = {c.groups} must divide {c.experts} experts into twos or more, top_groups in [1, groups]"
        )
    elif c.top_k > c.experts // c.groups * c.top_groups:
        faults.append(f"top_k = {c.top_k} is more than {c.top_groups} of {c.groups} groups of experts hold")
    return faults


def _latent_faults(c: ModelConfig, latent: Latent) -> list[str]:
    faults = []
    sizes = {name: getattr(latent, name) for name in ("kv_rank", "nope_dim", "rope_dim", "value_dim")}
    if latent.q_rank is not None:
        sizes["q_rank"] = latent.q_rank
    faults += [f"latent {name} = {size} must be at least 1" for name, size in sizes.items() if size < 1]
    if c.kv_heads != c.heads or c.head_dim != latent.nope_dim + latent.rope_dim:
        faults.append(f"kv_heads = {c.kv_heads} must be heads = {c.heads}, head_dim = {c.head_dim} nope_dim + rope_dim")
    if latent.value_dim > c.head_dim:
        # Keys and values share a cache.
        faults.append(f"latent value_dim = {latent.value_dim} must be at most head_dim = {c.head_dim}")
    if c.attention_bias and latent.q_rank is None:
        faults.append("attention_bias without a q_rank is not supported")
    return faults
