"""The configs of published models, built without memory, have the published number of parameters."""

from typing import Any

import pytest
import torch

from contraflow.model.decoder import Decoder
from contraflow.model.families import ModelConfig
from contraflow.model.names import parts

DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5,
    "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "max_position_embeddings": 163840, "attention_bias": False, "num_nextn_predict_layers": 1,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
KIMI_K2 = DEEPSEEK_V3 | {
    "vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384,
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0, "rope_theta": 50000.0, "max_position_embeddings": 131072,
}  # fmt: skip
GLM_45: dict[str, Any] = {
    "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 5120, "intermediate_size": 12288,
    "moe_intermediate_size": 1536, "num_hidden_layers": 92, "num_attention_heads": 96, "num_key_value_heads": 8,
    "head_dim": 128, "n_shared_experts": 1, "n_routed_experts": 160, "num_experts_per_tok": 8, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 3,
    "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 1000000,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_nextn_predict_layers": 1,
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "swiglu_limit": 7.0,
    "attention_bias": True, "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False,
    },
}  # fmt: skip
QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960, "rope_theta": 1000000.0,
}  # fmt: skip
QWEN3_235B = QWEN3_30B | {
    "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
    "num_attention_heads": 64,
}  # fmt: skip

# In billions, as their publishers say: all without the layers for multi-token prediction.
PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "DeepSeek-V3": (DEEPSEEK_V3, 671.0),
    "Kimi-K2": (KIMI_K2, 1026.0),  # "1T"; the exact sum of its checkpoint's tensors
    "GLM-4.5": (GLM_45, 355.0),
    "gpt-oss-20b": (GPT_OSS_20B, 20.9),
    "gpt-oss-120b": (GPT_OSS_20B | {"num_hidden_layers": 36, "num_local_experts": 128}, 116.8),
    "Qwen3-30B-A3B": (QWEN3_30B, 30.5),
    "Qwen3-235B-A22B": (QWEN3_235B, 235.0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_gives_the_published_number_of_parameters(name: str) -> None:
    tree, billions = PUBLISHED[name]
    config = ModelConfig.from_hf(tree)
    decoder = Decoder(config, dtype=torch.bfloat16, device="meta")
    weights = dict(decoder.named_parameters())
    assert sum(weight.numel() for weight in weights.values()) / 1e9 == pytest.approx(billions, rel=0.01)
    disk = parts(config)
    assert disk.keys() == weights.keys()
    assert all(sum(map(_size, disk[name])) == weights[name].numel() for name in weights)


def _size(part: Any) -> int:
    return int(torch.Size(part.shape).numel())
