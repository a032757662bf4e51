"""Configs are read as transformers 4 and 5 write them, written so that they read back, and refused by name."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from contraflow.errors import ModelError
from contraflow.model.families import ModelConfig
from contraflow.model.kinds import FAMILIES, Latent, RopeScaling, Yarn

QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "num_experts": 6,
    "max_position_embeddings": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3_ROPE: dict[str, Any] = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32
}  # fmt: skip


def without(tree: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in tree.items() if k != key}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_reads_back_the_same(family: str, make_config: Callable[..., ModelConfig]) -> None:
    config = make_config(family, bos=1, eos=(2, 3), pad=0, norm_eps=1e-5, rope_theta=5e5)
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_rope_scaling_reads_back_the_same(make_config: Callable[..., ModelConfig]) -> None:
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=32)
    config = make_config("llama", rope_scaling=scaling)
    assert ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5},
    ],
)
def test_rope_theta_is_read_where_transformers_4_and_5_put_it(keys: dict[str, Any]) -> None:
    assert ModelConfig.from_hf(LLAMA | keys).rope_theta == 5e5


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_ROPE}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3_ROPE}},
    ],
)
def test_llama3_scaling_is_read_where_transformers_4_and_5_put_it(keys: dict[str, Any]) -> None:
    config = ModelConfig.from_hf(LLAMA | keys)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=32
    )


@pytest.mark.parametrize(
    "rope", [{"beta_fast": None}, {"beta_slow": 2, "truncate": False, "mscale": 1, "type": "yarn"}]
)
def test_yarn_is_read_with_what_it_leaves_out(rope: dict[str, Any]) -> None:
    given = {"rope_type": "yarn", "factor": 8, "original_max_position_embeddings": 32}
    config = ModelConfig.from_hf(LLAMA | {"rope_theta": 5e5, "rope_scaling": given | rope})
    slow, mscale = (2.0, 1.0) if "mscale" in rope else (1.0, None)
    assert config.rope_scaling == Yarn(
        factor=8.0, original_context=32, beta_slow=slow, truncate=mscale is None, mscale=mscale
    )
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_the_number_of_experts_is_read_under_both_names() -> None:
    assert ModelConfig.from_hf(QWEN3_MOE).experts == 6
    assert ModelConfig.from_hf(without(QWEN3_MOE, "num_experts") | {"num_local_experts": 6}).experts == 6


@pytest.mark.parametrize(
    ("keys", "moe_layers"),
    [
        ({}, (0, 1, 2, 3)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"mlp_only_layers": [0, 3]}, (1, 2)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (3,)),
    ],
)
def test_layers_with_experts_follow_step_and_list(keys: dict[str, Any], moe_layers: tuple[int, ...]) -> None:
    assert ModelConfig.from_hf(QWEN3_MOE | keys).moe_layers == moe_layers


def test_what_a_family_leaves_out_has_its_family_s_default() -> None:
    assert ModelConfig.from_hf(LLAMA).kv_heads == 4
    assert ModelConfig.from_hf(LLAMA).head_dim == 8
    assert not ModelConfig.from_hf(QWEN3_MOE).renormalise
    qwen3 = {**LLAMA, "model_type": "qwen3", "num_key_value_heads": 2}
    assert ModelConfig.from_hf(qwen3).head_dim == 128
    mixtral = {**without(QWEN3_MOE, "head_dim"), "model_type": "mixtral", "num_local_experts": 6}
    assert ModelConfig.from_hf(mixtral).rope_theta == 1e6
    assert ModelConfig.from_hf(mixtral).renormalise


@pytest.mark.parametrize("eos", [None, 2, [2, 3]])
def test_one_or_several_end_tokens_are_read(eos: Any) -> None:
    assert ModelConfig.from_hf(LLAMA | {"eos_token_id": eos}).eos == {None: (), 2: (2,)}.get(
        eos if not isinstance(eos, list) else -1, (2, 3)
    )


@pytest.mark.parametrize("key", [k for k in QWEN3_MOE if k not in ("model_type", "head_dim")])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ModelError, match=f"'{key}' is missing"):
        ModelConfig.from_hf(without(QWEN3_MOE, key))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not known; known are qwen3_moe, olmoe, mixtral, deepseek_v3, "),
        ({"model_type": None}, "known are"),
        ({"hidden_size": "32"}, "'hidden_size' = '32' must be an integer"),
        ({"num_hidden_layers": True}, "must be an integer"),
        ({"rms_norm_eps": "small"}, "must be a number"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"use_sliding_window": True, "sliding_window": 32}, "sliding_window 32"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            "'dynamic' is not supported; 'default', 'llama3' and",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "'factor' is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "heads = 4 must be a multiple of kv_heads = 3"),
        ({"head_dim": 7}, "head_dim = 7 must be even"),
        ({"num_experts_per_tok": 7}, "top_k = 7"),
        ({"moe_intermediate_size": 20}, "multiples of 8"),
        ({"num_hidden_layers": 0}, "layers = 0 must be at least 1"),
        ({"num_attention_heads": 0}, "heads = 0 must be at least 1"),
        ({"num_experts": 0}, "needs experts"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        ModelConfig.from_hf(QWEN3_MOE | keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"use_sliding_window": False, "sliding_window": 32},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 64},
    ],
)
def test_a_window_that_hides_nothing_is_fine(keys: dict[str, Any]) -> None:
    ModelConfig.from_hf(QWEN3_MOE | keys)


def test_mixtral_s_window_needs_no_switch() -> None:
    mixtral = {**QWEN3_MOE, "model_type": "mixtral", "num_local_experts": 6, "sliding_window": 32}
    with pytest.raises(ModelError, match="sliding_window 32"):
        ModelConfig.from_hf(mixtral)


def test_the_digest_changes_with_the_architecture_and_not_with_special_tokens(
    make_config: Callable[..., ModelConfig],
) -> None:
    config = make_config("qwen3_moe")
    assert dataclasses.replace(config, eos=(7,), bos=1, pad=0).digest() == config.digest()
    changed = {"rope_theta": 5e5, "top_k": 3, "renormalise": False, "layers": 4, "norm_eps": 1e-5}
    digests = {dataclasses.replace(config, **{k: v}).digest() for k, v in changed.items()}
    assert len(digests | {config.digest()}) == len(changed) + 1


@pytest.mark.parametrize(
    ("family", "digest"),
    [
        ("qwen3_moe", "818852a4aa64c4ed"),
        ("olmoe", "3874e3a11fcd2427"),
        ("mixtral", "f600ee2d2a0ec2eb"),
        ("qwen3", "40d26ad28bb20859"),
        ("llama", "807f9b14dc23694d"),
    ],
)
def test_digests_stay_what_they_were_since_checkpoints_name_them(
    family: str, digest: str, make_config: Callable[..., ModelConfig]
) -> None:
    assert make_config(family).digest().startswith(digest)


def test_what_came_later_is_in_the_digest_where_it_is_used(make_config: Callable[..., ModelConfig]) -> None:
    changed: list[tuple[str, dict[str, Any]]] = [
        ("glm4_moe", {"rotary_dim": 8}),
        ("glm4_moe", {"qk_normed": False}),
        ("glm4_moe", {"routed_scale": 2.0}),
        ("glm4_moe", {"shared_experts": 1}),
        ("glm4_moe", {"groups": 3, "top_groups": 1}),
        ("gpt_oss", {"window": 6}),
        ("gpt_oss", {"window_layers": (1,)}),
        ("gpt_oss", {"swiglu_limit": 7.0}),
        ("deepseek_v3", {"rope_scaling": Yarn(factor=2.0, original_context=32)}),
        ("deepseek_v3", {"latent": Latent(q_rank=16, kv_rank=12, nope_dim=16, rope_dim=8, value_dim=12)}),
    ]
    for family, change in changed:
        config = make_config(family)
        assert dataclasses.replace(config, **change).digest() != config.digest(), change
    config = make_config("deepseek_v3")
    assert dataclasses.replace(config, mtp_layers=1).digest() == config.digest()


def spoilt(family: str, make_config: Callable[..., ModelConfig], keys: dict[str, Any]) -> dict[str, Any]:
    tree = make_config(family).to_hf() | keys
    return {key: value for key, value in tree.items() if value != "gone"}


@pytest.mark.parametrize(
    ("family", "keys", "said"),
    [
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; only 'sigmoid'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method 'greedy'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ("deepseek_v3", {"kv_lora_rank": "gone"}, "'kv_lora_rank' is missing"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "latent kv_rank = 0 must be at least 1"),
        ("deepseek_v3", {"q_lora_rank": "24"}, "'q_lora_rank' = '24' must be an integer"),
        ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}, "attention_bias without a q_rank"),
        ("deepseek_v3", {"v_head_dim": 32}, "value_dim = 32 must be at most head_dim = 24"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "kv_heads = 2 must be heads = 4"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "must be even"),
        ("deepseek_v3", {"n_group": 4}, "groups = 4 must divide 6 experts"),
        ("deepseek_v3", {"n_group": 6}, "groups = 6 must divide 6 experts into twos"),
        ("deepseek_v3", {"topk_group": 4}, "top_groups in"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "top_k = 5 is more than 2 of 3 groups"),
        ("deepseek_v3", {"n_shared_experts": 0}, "shared_experts = 0"),
        ("deepseek_v3", {"n_shared_experts": None}, "'n_shared_experts' is missing"),
        ("deepseek_v3", {"first_k_dense_replace": "gone"}, "'first_k_dense_replace' is missing"),
        ("glm4_moe", {"partial_rotary_factor": 0.4}, "rotary_dim = 3 must be even"),
        ("glm4_moe", {"routed_scaling_factor": None}, "'routed_scaling_factor' = None"),
        ("gpt_oss", {"rope_parameters": None}, "'rope_scaling' is missing"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "must be 2 of"),
        ("gpt_oss", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ("gpt_oss", {"sliding_window": 0}, "window = 0"),
        ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu_limit = 0.0 must be above 0"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantised"),
    ],
)
def test_what_a_special_family_cannot_compute_is_refused_by_name(
    family: str, keys: dict[str, Any], said: str, make_config: Callable[..., ModelConfig]
) -> None:
    with pytest.raises(ModelError, match=said):
        ModelConfig.from_hf(spoilt(family, make_config, keys))


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("llama", {"latent": Latent(q_rank=None, kv_rank=4, nope_dim=4, rope_dim=4, value_dim=4)}, "has no latent"),
        ("deepseek_v3", {"latent": None}, "needs latent attention"),
        ("llama", {"window": 4, "window_layers": (0,)}, "only gpt_oss has one"),
        ("glm4_moe", {"dense_layers": (1,)}, "must be the first ones"),
    ],
)
def test_a_config_of_another_family_s_parts_is_refused(
    family: str, change: dict[str, Any], said: str, make_config: Callable[..., ModelConfig]
) -> None:
    with pytest.raises(ModelError, match=said):
        make_config(family, **change)


def test_older_gpt_oss_configs_leave_out_layers_and_swiglu(make_config: Callable[..., ModelConfig]) -> None:
    keys = {"layer_types": None, "swiglu_alpha": "gone", "swiglu_limit": "gone", "attention_bias": "gone"}
    config = ModelConfig.from_hf(spoilt("gpt_oss", make_config, keys))
    assert (config.window_layers, config.swiglu_alpha, config.swiglu_limit) == ((0,), 1.702, 7.0)
    assert config.attention_bias
