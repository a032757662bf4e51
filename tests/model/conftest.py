"""Small models of every family with random weights everywhere, and whole sequences to feed them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import Decoder
from contraflow.model.families import ModelConfig
from contraflow.model.kinds import Latent

MakeDecoder = Callable[..., Decoder]
Forward = Callable[[Decoder, Sequence[Tensor]], Tensor]

SIZES: dict[str, Any] = {
    "vocab": 40, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "context": 64
}  # fmt: skip
EXPERTS: dict[str, Any] = {"experts": 6, "top_k": 2, "expert_ffn": 24}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS | {"ffn": 48, "dense_layers": (1,), "renormalise": True, "layers": 3},
    "olmoe": EXPERTS | {"clip_qkv": 0.8},
    "mixtral": EXPERTS | {"renormalise": True},
    "deepseek_v3": EXPERTS
    | {"kv_heads": 4, "head_dim": 24, "latent": Latent(q_rank=24, kv_rank=12, nope_dim=16, rope_dim=8, value_dim=12)}
    | {"ffn": 48, "dense_layers": (0,), "layers": 3, "groups": 3, "top_groups": 2, "shared_experts": 1}
    | {"renormalise": True, "routed_scale": 2.5},
    "glm4_moe": EXPERTS
    | {"ffn": 48, "dense_layers": (0,), "layers": 3, "rotary_dim": 4, "shared_experts": 2, "attention_bias": True},
    "gpt_oss": EXPERTS
    | {"window": 5, "window_layers": (0,), "swiglu_alpha": 1.702, "swiglu_limit": 0.5, "attention_bias": True}
    | {"renormalise": True},
    "qwen3": {"ffn": 48, "head_dim": 16, "tied": True},
    "llama": {"ffn": 48, "attention_bias": True},
}


@pytest.fixture(scope="session")
def make_config() -> Callable[..., ModelConfig]:
    def made(family: str, **changes: Any) -> ModelConfig:
        return ModelConfig(**{"family": family, **SIZES, **KINDS[family], **changes})

    return made


@pytest.fixture(scope="session")
def make_decoder(make_config: Callable[..., ModelConfig]) -> MakeDecoder:
    """Every parameter random, norms and biases included, so that none can be forgotten unseen."""

    def made(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Decoder:
        decoder = Decoder(make_config(family, **changes), dtype=dtype)
        noise = torch.Generator().manual_seed(seed)
        for name, weight in decoder.named_parameters():
            with torch.no_grad():
                weight.copy_(torch.randn(weight.shape, generator=noise) * 0.2 + name.endswith("norm"))
        return decoder

    return made


@pytest.fixture(scope="session")
def forward() -> Forward:
    """Hidden states of sequences, packed end to end."""

    def run(decoder: Decoder, sequences: Sequence[Tensor]) -> Tensor:
        starts = [0]
        for tokens in sequences:
            starts.append(starts[-1] + len(tokens))
        positions = torch.cat([torch.arange(len(tokens)) for tokens in sequences])
        return decoder(torch.cat(list(sequences)), positions, PackedPlan.of(starts))

    return run
