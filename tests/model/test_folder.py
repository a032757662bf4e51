"""Folders against transformers, both ways; and folders that are torn, short, of another shape, or hold too much."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from contraflow.errors import ModelError
from contraflow.model.decoder import Decoder
from contraflow.model.folder import INDEX, SINGLE, load_folder, save_folder

BASE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
SIGMOID: dict[str, Any] = {
    "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}  # fmt: skip
DEEPSEEK = SIGMOID | {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 10, "num_nextn_predict_layers": 0,
}  # fmt: skip
GLM = SIGMOID | {"head_dim": 16, "use_qk_norm": True, "attention_bias": True, "num_nextn_predict_layers": 0}
OSS: dict[str, Any] = {
    "num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 5,
    "rope_parameters": YARN | {"truncate": False, "rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0},
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": MOE | {"moe_intermediate_size": 24, "head_dim": 16, "norm_topk_prob": True},
    "qwen3_moe every second layer": MOE
    | {"moe_intermediate_size": 24, "head_dim": 8, "decoder_sparse_step": 2, "attention_bias": True},
    "qwen3_moe first layer dense": MOE
    | {"moe_intermediate_size": 24, "head_dim": 8, "mlp_only_layers": [0], "tie_word_embeddings": True},
    "olmoe": MOE | {"clip_qkv": 0.5},
    "olmoe renormalised": MOE | {"norm_topk_prob": True, "num_key_value_heads": 4, "attention_bias": True},
    "deepseek_v3": DEEPSEEK | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 4.0}},
    "deepseek_v3 as published": DEEPSEEK | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "deepseek_v3 as Kimi-K2": DEEPSEEK | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827},
    "deepseek_v3 direct queries": DEEPSEEK
    | {"q_lora_rank": None, "rope_interleave": False, "n_shared_experts": 3, "first_k_dense_replace": 3 - 1},
    "deepseek_v3 biased, all layers sparse": DEEPSEEK
    | {"attention_bias": True, "first_k_dense_replace": 0, "norm_topk_prob": False, "rms_norm_eps": 1e-5}
    | {"v_head_dim": 20, "n_group": 2, "topk_group": 1, "tie_word_embeddings": True},
    "glm4_moe": GLM,
    "glm4_moe as Air": GLM | {"use_qk_norm": False, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
    "glm4_moe a quarter turns": GLM
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}}
    | {"attention_bias": False, "n_shared_experts": 2, "first_k_dense_replace": 2, "norm_topk_prob": False},
    "glm4_moe stretched": GLM
    | {"rope_parameters": YARN | {"partial_rotary_factor": 0.5, "attention_factor": 1.3}, "head_dim": 24},
    "gpt_oss": OSS,
    "gpt_oss other layers": OSS
    | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "swiglu_limit": 0.4}
    | {"num_key_value_heads": 1, "swiglu_alpha": 1.1},
    "gpt_oss sees itself only": OSS | {"sliding_window": 1, "attention_bias": False, "num_key_value_heads": 4},
    "gpt_oss sees all": OSS | {"layer_types": ["full_attention"] * 3, "rope_parameters": YARN},
    "qwen3_moe stretched": MOE | {"moe_intermediate_size": 24, "head_dim": 16, "rope_parameters": YARN},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 3},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "llama": {},
    "llama biased": {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1},
    "llama stretched": {"rope_parameters": LLAMA3, "rms_norm_eps": 1e-5},
}
Forward = Callable[[Decoder, list[Tensor]], Tensor]


def as_configured(model: Any) -> Any:
    """transformers before 5.20 clamps gpt-oss's experts at 7 and scales by 1.702, whatever the config says."""
    for module in model.modules():
        if type(module).__name__ == "GptOssExperts":
            module.limit = getattr(model.config, "swiglu_limit", 7.0)
            module.alpha = getattr(model.config, "swiglu_alpha", 1.702)
    return model


def theirs(name: str, keys: dict[str, Any] | None = None) -> Any:
    """A transformers model with every parameter random."""
    config = AutoConfig.for_model(name.split(maxsplit=1)[0], **BASE | (MODELS[name] if keys is None else keys))
    model = as_configured(AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval())
    noise = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=noise) * 0.2 + ("norm" in weight_name))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=noise) * 0.2)
    return model


def sequences(seed: int = 0) -> list[Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 40, (length,), generator=noise) for length in (30, 1, 7)]


@torch.no_grad()
def their_logits(model: Any) -> Tensor:
    return torch.cat([model(tokens[None]).logits[0] for tokens in sequences()])


@torch.no_grad()
def our_logits(decoder: Decoder, forward: Forward) -> Tensor:
    return decoder.logits(forward(decoder, sequences()))


@pytest.fixture
def folder(tmp_path: Path, make_decoder: Callable[..., Decoder]) -> Path:
    save_folder(make_decoder("qwen3_moe"), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers_both_ways(name: str, tmp_path: Path, forward: Forward) -> None:
    model = theirs(name)
    model.save_pretrained(tmp_path / "theirs")
    decoder = load_folder(tmp_path / "theirs")
    wanted = their_logits(model)
    assert wanted.std() > 0.3  # otherwise equality would say little
    torch.testing.assert_close(our_logits(decoder, forward), wanted, rtol=0, atol=1e-4)

    save_folder(decoder, tmp_path / "ours")
    again, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    weights = again.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
    torch.testing.assert_close(
        their_logits(as_configured(again)), wanted, rtol=0, atol=1e-5
    )  # sums depend on where weights lie
    for special in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(again.config, special) == BASE[special]


def drawn(family: str, draws: random.Random) -> dict[str, Any]:
    """A config of the family with sizes at random."""
    sizes = {"hidden_size": draws.choice([16, 40]), "num_hidden_layers": draws.choice([1, 2, 4])}
    kv_heads, head_dim = draws.choice([1, 2, 3]), draws.choice([4, 6, 16])
    sizes |= {"num_attention_heads": kv_heads * draws.choice([1, 2, 5]), "num_key_value_heads": kv_heads}
    sizes |= {"vocab_size": 41, "rms_norm_eps": draws.choice([1e-6, 1e-5]), "attention_bias": draws.random() < 0.5}
    yarn = YARN | {"factor": draws.choice([1.0, 2.5, 40.0]), "truncate": draws.random() < 0.5, "beta_fast": 8.0}
    if family == "gpt_oss":
        kinds = [draws.choice(["sliding_attention", "full_attention"]) for _ in range(sizes["num_hidden_layers"])]
        experts = {"num_local_experts": draws.choice([2, 7]), "num_experts_per_tok": draws.choice([1, 2])}
        sizes |= experts | {"layer_types": kinds, "sliding_window": draws.choice([2, 9, 40]), "head_dim": head_dim}
        return OSS | sizes | {
            "rope_parameters": yarn, "intermediate_size": 8, "swiglu_limit": draws.choice([0.3, 7.0])
        }  # fmt: skip
    groups, each = draws.choice([1, 2, 3]), draws.choice([2, 4])
    top_groups = draws.randint(1, groups)
    sizes |= {"n_group": groups, "n_routed_experts": groups * each, "topk_group": top_groups}
    sizes |= {
        "num_experts_per_tok": draws.randint(1, each * top_groups),
        "moe_intermediate_size": draws.choice([8, 16]),
    }
    sizes |= {"n_shared_experts": draws.choice([1, 2]), "norm_topk_prob": draws.random() < 0.5}
    sizes |= {"first_k_dense_replace": draws.randint(0, 4), "routed_scaling_factor": draws.choice([1.0, 2.5])}
    if family == "glm4_moe":
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": draws.choice([0.5, 1.0])}
        head_dim = draws.choice([4, 12, 16])
        return GLM | sizes | {"head_dim": head_dim, "use_qk_norm": draws.random() < 0.5, "rope_parameters": rope}
    gains = {"mscale": draws.choice([0.7, 1.0]), "mscale_all_dim": draws.choice([0.0, 1.0])}
    nope, rope_dim = draws.choice([3, 8]), draws.choice([2, 6, 8])
    return DEEPSEEK | sizes | {"num_key_value_heads": sizes["num_attention_heads"], "rope_parameters": yarn | gains} | {
        "qk_nope_head_dim": nope, "qk_rope_head_dim": rope_dim, "v_head_dim": draws.randint(1, nope + rope_dim),
        "q_lora_rank": draws.choice([5, 16]), "kv_lora_rank": draws.choice([4, 9]),
        "rope_interleave": draws.random() < 0.5,
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "gpt_oss"])
def test_logits_of_random_shapes_equal_those_of_transformers(
    family: str, seed: int, tmp_path: Path, forward: Forward
) -> None:
    model = theirs(family, drawn(family, random.Random(seed)))
    model.save_pretrained(tmp_path)
    wanted = their_logits(model)
    torch.testing.assert_close(our_logits(load_folder(tmp_path), forward), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "gpt_oss", "gpt_oss other layers"])
def test_gradients_equal_those_of_transformers(name: str, tmp_path: Path, forward: Forward) -> None:
    """Gradients travel as weights do: theirs are saved in place of weights, and read into a decoder of ours."""
    model = theirs(name)
    model.save_pretrained(tmp_path / "weights")
    decoder = load_folder(tmp_path / "weights")
    model.model.embed_tokens.padding_idx = None  # else the padding token's row would get none
    torch.cat([model(tokens[None]).logits[0] for tokens in sequences()]).square().mean().backward()
    decoder.logits(forward(decoder, sequences())).square().mean().backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.grad)
    model.save_pretrained(tmp_path / "gradients")
    wanted = dict(load_folder(tmp_path / "gradients").named_parameters())
    for weight_name, weight in decoder.named_parameters():
        if weight.requires_grad:
            assert weight.grad is not None, weight_name
            scale = wanted[weight_name].abs().amax().item()
            assert scale > 0, weight_name
            torch.testing.assert_close(
                weight.grad, wanted[weight_name], rtol=0, atol=1e-4 * scale + 1e-7, msg=weight_name
            )


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_layers_for_multi_token_prediction_are_left_out_if_the_config_counts_them(
    family: str, tmp_path: Path, make_decoder: Callable[..., Decoder]
) -> None:
    decoder = make_decoder(family)
    save_folder(decoder, tmp_path)
    edit(tmp_path, lambda t: t.update({"model.layers.3.eh_proj.weight": torch.ones(4)}))
    with pytest.raises(ModelError, match=r"'model\.layers\.3\.eh_proj\.weight' is not part"):
        load_folder(tmp_path)
    tree = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(tree | {"num_nextn_predict_layers": 1}))
    found = load_folder(tmp_path)
    assert found.config.mtp_layers == 1
    assert found.config.digest() == decoder.config.digest()
    save_folder(found, tmp_path)
    assert load_folder(tmp_path).config == decoder.config
    edit(tmp_path, lambda t: t.update({"model.layers.4.norm.weight": torch.ones(4)}))
    with pytest.raises(ModelError, match="is not part"):
        load_folder(tmp_path)


def test_a_correction_bias_keeps_all_its_bits_in_a_half_precision_folder(
    tmp_path: Path, make_decoder: Callable[..., Decoder]
) -> None:
    decoder = make_decoder("deepseek_v3", dtype=torch.bfloat16)
    save_folder(decoder, tmp_path)
    name = "layers.1.mlp.router.correction_bias"
    bias, again = (dict(d.named_parameters())[name] for d in (decoder, load_folder(tmp_path, dtype=torch.bfloat16)))
    assert bias.dtype == again.dtype == torch.float32
    assert torch.equal(bias, again)


def test_shards_of_transformers_are_read_and_ours_are_read_by_it(tmp_path: Path, forward: Forward) -> None:
    model = theirs("qwen3_moe")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    assert (tmp_path / "theirs" / INDEX).is_file()
    decoder = load_folder(tmp_path / "theirs")
    wanted = their_logits(model)
    torch.testing.assert_close(our_logits(decoder, forward), wanted, rtol=0, atol=1e-4)

    save_folder(decoder, tmp_path / "ours", shard_bytes=40_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    torch.testing.assert_close(their_logits(again), wanted, rtol=0, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in both(load_folder(tmp_path / "ours"), decoder))


def both(one: Decoder, other: Decoder) -> list[tuple[Tensor, Tensor]]:
    return list(zip(one.parameters(), other.parameters(), strict=True))


def test_saving_again_leaves_nothing_of_what_was_there(tmp_path: Path, make_decoder: Callable[..., Decoder]) -> None:
    save_folder(make_decoder("mixtral"), tmp_path, shard_bytes=20_000)
    decoder = make_decoder("mixtral", seed=1)
    save_folder(decoder, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {SINGLE, "config.json"}
    save_folder(make_decoder("mixtral", seed=2), tmp_path, shard_bytes=20_000)
    save_folder(decoder, tmp_path, shard_bytes=30_000)
    assert all(torch.equal(a, b) for a, b in both(load_folder(tmp_path), decoder))
    assert {*json.loads((tmp_path / INDEX).read_text())["weight_map"].values()} == {
        file.name for file in tmp_path.glob("*.safetensors")
    }


def test_half_precision_keeps_router_and_head_in_fp32(tmp_path: Path, make_decoder: Callable[..., Decoder]) -> None:
    save_folder(make_decoder("qwen3_moe", dtype=torch.bfloat16), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    decoder = load_folder(tmp_path, dtype=torch.bfloat16)
    kinds = {name: weight.dtype for name, weight in decoder.named_parameters()}
    assert {name for name, kind in kinds.items() if kind == torch.float32} == {
        "lm_head",
        "layers.0.mlp.router.weight",
        "layers.2.mlp.router.weight",
    }
    assert all(torch.equal(a, b) for a, b in both(decoder, make_decoder("qwen3_moe", dtype=torch.bfloat16)))


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


UP = "model.layers.2.mlp.experts.4.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(UP), f"'{UP}' is missing"),
        (lambda t: (t.pop(UP), t.pop("model.norm.weight")), "missing, and 1 more"),
        (lambda t: t.update(stray=torch.ones(2)), f"{SINGLE}: tensor 'stray' is not part of a qwen3_moe"),
        (lambda t: t.update({UP: torch.ones(24, 31)}), rf"{SINGLE}: tensor '{UP}' is \[24, 31\].* \[24, 32\]"),
        (lambda t: t.update({UP: torch.ones(24, 32).int()}), f"'{UP}' is torch.int32"),
        (lambda t: t.update({UP: torch.ones(24, 32).to(torch.float8_e4m3fn)}), f"'{UP}' is torch.float8_e4m3fn"),
        (lambda t: t.update({"lm_head.bias": torch.ones(40)}), "'lm_head.bias' is not part"),
    ],
)
def test_a_tensor_too_few_too_many_or_of_another_shape_is_named(
    folder: Path, change: Callable[[dict[str, Tensor]], Any], said: str
) -> None:
    edit(folder, change)
    with pytest.raises(ModelError, match=said):
        load_folder(folder)


@pytest.mark.parametrize("kept", [0, 5, 300, -1])
def test_truncated_safetensors_are_refused(folder: Path, kept: int) -> None:
    file = folder / SINGLE
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match=f"{SINGLE} is not a whole safetensors file"):
        load_folder(folder)


def test_a_folder_without_weights_or_config_is_refused(folder: Path) -> None:
    (folder / SINGLE).unlink()
    with pytest.raises(ModelError, match="holds neither"):
        load_folder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        load_folder(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\udcff"])
def test_a_config_that_is_no_json_object_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json"):
        load_folder(folder)


def test_a_missing_config_key_is_named_with_its_file(folder: Path) -> None:
    tree = json.loads((folder / "config.json").read_text())
    del tree["hidden_size"]
    (folder / "config.json").write_text(json.dumps(tree))
    with pytest.raises(ModelError, match=r"config\.json: config key 'hidden_size' is missing"):
        load_folder(folder)


def shard(folder: Path, **changes: Any) -> dict[str, str]:
    """Move the weights behind an index, then spoil it."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).rename(folder / "a.safetensors")
    weight_map: dict[str, Any] = dict.fromkeys(tensors, "a.safetensors") | changes
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_an_index_that_names_an_absent_file_is_refused(folder: Path) -> None:
    shard(folder, **{UP: "b.safetensors"})
    with pytest.raises(ModelError, match=r"b\.safetensors is missing"):
        load_folder(folder)


def test_an_index_that_promises_an_absent_tensor_is_refused(folder: Path) -> None:
    shard(folder, promised="a.safetensors")
    with pytest.raises(ModelError, match="'promised' is missing"):
        load_folder(folder)


@pytest.mark.parametrize("file", ["../a.safetensors", "/etc/passwd", 3])
def test_an_index_cannot_point_out_of_its_folder(folder: Path, file: Any) -> None:
    shard(folder, **{UP: file})
    with pytest.raises(ModelError, match="not the name of a file beside it"):
        load_folder(folder)


@pytest.mark.parametrize("tree", [{}, {"weight_map": []}, {"weight_map": {}}])
def test_an_index_without_a_map_is_refused(folder: Path, tree: dict[str, Any]) -> None:
    shard(folder)
    (folder / INDEX).write_text(json.dumps(tree))
    with pytest.raises(ModelError, match="no weight_map"):
        load_folder(folder)


def test_a_tied_checkpoint_may_repeat_its_embedding_and_old_rotary_frequencies(
    tmp_path: Path, make_decoder: Callable[..., Decoder]
) -> None:
    save_folder(make_decoder("qwen3"), tmp_path)
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone(), **frequencies}))
    load_folder(tmp_path)
    edit(tmp_path, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        load_folder(tmp_path)


def test_writing_where_no_folder_can_be_is_refused(tmp_path: Path, make_decoder: Callable[..., Decoder]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="could not write the model"):
        save_folder(make_decoder("llama"), tmp_path / "file")


def test_a_write_that_fails_leaves_the_old_model_whole(
    tmp_path: Path, folder: Path, make_decoder: Callable[..., Decoder]
) -> None:
    before = load_folder(folder)
    (folder / "model-0.partial").mkdir()  # the new file cannot be written
    with pytest.raises(ModelError, match="could not write the model"):
        save_folder(make_decoder("qwen3_moe", seed=9), folder)
    shutil.rmtree(folder / "model-0.partial")
    assert all(torch.equal(a, b) for a, b in both(load_folder(folder), before))
