"""Hugging Face's config.json, as transformers 4 and 5 write it, to the fields of a `ModelConfig`.

Takes the parsed tree; refuses, by name, whatever the decoder would compute wrongly. Layers for multi-token prediction
are counted, and neither computed nor kept. Does not touch files or tensors.
"""

from collections.abc import Mapping
from typing import Any

from contraflow.errors import ModelError
from contraflow.model.kinds import FAMILIES, Family, Latent, RopeScaling, Yarn

Tree = Mapping[str, Any]
WINDOW, FULL = "sliding_attention", "full_attention"
# What must be said like this, if it is said at all.
_ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}


def read_fields(tree: Tree) -> dict[str, Any]:
    """Fields of the `ModelConfig`. Raises ModelError naming the key, its value and what is allowed."""
    kind = tree.get("model_type")
    if kind not in FAMILIES:
        raise ModelError(f"model_type {kind!r} is not known; known are {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    _refuse(tree, family)
    heads, dim, layers = (_int(tree, k) for k in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    kv_heads = _int(tree, "num_key_value_heads", missing=None if family.kv_heads else heads, null=heads)
    latent = _latent(tree) if family.latent else None
    if latent is not None:
        head_dim = latent.nope_dim + latent.rope_dim
    else:
        head_dim = _int(tree, "head_dim", missing=family.head_dim or dim // max(heads, 1), null=dim // max(heads, 1))
    return {
        "family": kind,
        "vocab": _int(tree, "vocab_size"),
        "dim": dim,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "latent": latent,
        **_mixture(tree, family, layers, _int(tree, "intermediate_size")),
        **_windows(tree, family, layers),
        **_rope(tree, family, head_dim),
        "attention_bias": family.bias and bool(tree.get("attention_bias", family.oss)),
        "qk_normed": family.qk_norm_key is None or bool(tree.get(family.qk_norm_key)),
        "clip_qkv": tree.get("clip_qkv") if kind == "olmoe" else None,
        "norm_eps": _float(tree, "rms_norm_eps"),
        "tied": bool(tree.get("tie_word_embeddings")),
        "context": _int(tree, "max_position_embeddings"),
        "bos": tree.get("bos_token_id"),
        "eos": _ids(tree.get("eos_token_id")),
        "pad": tree.get("pad_token_id"),
    }


def rope_tree(theta: float, scaling: RopeScaling | Yarn | None) -> dict[str, Any]:
    """`rope_parameters` as transformers 5 reads them."""
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    if scaling is None:
        return rope
    given = {name: value for name, value in vars(scaling).items() if value is not None}
    given["original_max_position_embeddings"] = given.pop("original_context")
    return rope | {"rope_type": "yarn" if isinstance(scaling, Yarn) else "llama3", **given}


def _refuse(tree: Tree, family: Family) -> None:
    """What the decoder does not compute."""
    for key, allowed in _ONLY.items():
        if tree.get(key, allowed) != allowed and tree[key] is not None:
            raise ModelError(f"{key} {tree[key]!r} is not supported; only {allowed!r} is")
    if tree.get("quantization_config"):
        raise ModelError("quantization_config: quantised weights are not read; dequantise the checkpoint first")
    window = tree.get("sliding_window")
    on = family.window == "always" or (family.window == "switched" and bool(tree.get("use_sliding_window")))
    if on and window is not None and window < _int(tree, "max_position_embeddings"):
        raise ModelError(f"sliding_window {window} is not supported: this family attends to the whole context")


def _mixture(tree: Tree, family: Family, layers: int, ffn: int) -> dict[str, Any]:
    if not family.experts:
        return {"ffn": ffn}
    key = next((k for k in family.experts if tree.get(k) is not None), family.experts[0])
    found = {
        "experts": _int(tree, key),
        "top_k": _int(tree, "num_experts_per_tok"),
        "expert_ffn": _int(tree, family.expert_ffn),
        "ffn": ffn if family.expert_ffn != "intermediate_size" else 0,
        "renormalise": _renormalise(tree, family),
    }
    if family.oss:
        return found | {name: _float(tree, name, missing=known) for name, known in _SWIGLU.items()}
    if family.sigmoid:
        return found | {
            "dense_layers": tuple(range(min(_int(tree, "first_k_dense_replace"), layers))),
            "shared_experts": _int(tree, "n_shared_experts"),
            "groups": _int(tree, "n_group"),
            "top_groups": _int(tree, "topk_group"),
            "routed_scale": _float(tree, "routed_scaling_factor"),
            "mtp_layers": _int(tree, "num_nextn_predict_layers", missing=0, null=0),
        }
    step = _int(tree, "decoder_sparse_step", missing=1)
    listed = tree.get("mlp_only_layers") or []
    return found | {"dense_layers": tuple(i for i in range(layers) if i in listed or (i + 1) % max(step, 1))}


def _renormalise(tree: Tree, family: Family) -> bool:
    return bool(tree.get("norm_topk_prob", family.sigmoid)) if family.renormalise is None else family.renormalise


_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # gpt-oss's, which older configs leave out


def _windows(tree: Tree, family: Family, layers: int) -> dict[str, Any]:
    if family.window != "layers" or tree.get("sliding_window") is None:
        return {}
    kinds = tree.get("layer_types") or [FULL if i % 2 else WINDOW for i in range(layers)]
    if len(kinds) != layers or set(kinds) - {WINDOW, FULL}:
        raise ModelError(f"layer_types {kinds} must be {layers} of {WINDOW!r} and {FULL!r}")
    found = tuple(i for i, kind in enumerate(kinds) if kind == WINDOW)
    return {"window": _int(tree, "sliding_window") if found else 0, "window_layers": found}


def _latent(tree: Tree) -> Latent:
    rank = tree.get("q_lora_rank")
    return Latent(
        q_rank=None if rank is None else _int(tree, "q_lora_rank"),
        kv_rank=_int(tree, "kv_lora_rank"),
        nope_dim=_int(tree, "qk_nope_head_dim"),
        rope_dim=_int(tree, "qk_rope_head_dim"),
        value_dim=_int(tree, "v_head_dim"),
        interleaved=bool(tree.get("rope_interleave", True)),
    )


def _rope(tree: Tree, family: Family, head_dim: int) -> dict[str, Any]:
    rope = tree.get("rope_parameters") or tree.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type"))
    if family.oss and kind is None:
        raise ModelError("config key 'rope_scaling' is missing, and gpt-oss models are stretched in different ways")
    part = rope.get("partial_rotary_factor", tree.get("partial_rotary_factor")) or family.partial_rotary or 1.0
    if part != 1.0 and family.partial_rotary is None:
        raise ModelError(f"partial_rotary_factor {part} is not supported; only 1 is")
    return {
        "rope_theta": float(rope.get("rope_theta", tree.get("rope_theta")) or family.rope_theta),
        "rope_scaling": _scaling(rope, kind or "default"),
        "rotary_dim": int(head_dim * part) if part != 1.0 else 0,
    }


def _scaling(rope: Tree, kind: str) -> RopeScaling | Yarn | None:
    if kind == "default":
        return None
    if kind not in ("llama3", "yarn"):
        raise ModelError(f"rope_type {kind!r} is not supported; 'default', 'llama3' and 'yarn' are")
    factor, context = _float(rope, "factor"), _int(rope, "original_max_position_embeddings")
    if kind == "llama3":
        low, high = (_float(rope, name) for name in ("low_freq_factor", "high_freq_factor"))
        return RopeScaling(factor=factor, low_freq_factor=low, high_freq_factor=high, original_context=context)
    betas = {"beta_fast": 32.0, "beta_slow": 1.0}
    gains = ("mscale", "mscale_all_dim", "attention_factor")
    return Yarn(
        factor=factor,
        original_context=context,
        truncate=bool(rope.get("truncate", True)),
        **{name: _float(rope, name) if rope.get(name) else known for name, known in betas.items()},
        **{name: _float(rope, name) for name in gains if rope.get(name) is not None},
    )


def _int(tree: Tree, key: str, *, missing: int | None = None, null: int | None = None) -> int:
    value = tree.get(key, missing)
    value = null if value is None and key in tree else value
    if value is None:
        raise ModelError(f"config key {key!r} is missing")
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelError(f"config key {key!r} = {value!r} must be an integer")
    return value


def _float(tree: Tree, key: str, *, missing: float | None = None) -> float:
    value = tree.get(key, missing)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelError(f"config key {key!r} = {value!r} must be a number" if key in tree else f"{key!r} is missing")
    return float(value)


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
