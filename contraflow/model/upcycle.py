"""Sparse upcycling (Komatsuzaki et al. 2022): a dense model becomes a mixture of experts that gives the same logits.

Every expert starts as a copy of the layer's MLP; router weights of the chosen sum to 1, so the mixture of equals is the
MLP itself. Qwen3 becomes Qwen3-MoE, Llama becomes Mixtral. Does not train anything.
"""

import dataclasses
from pathlib import Path

import torch

from contraflow.errors import ModelError
from contraflow.model.decoder import Decoder
from contraflow.model.families import ModelConfig
from contraflow.model.folder import copy_companions, load_folder, save_folder

BECOMES = {"qwen3": "qwen3_moe", "llama": "mixtral"}
ROUTER_STD = 0.02  # small and random: equal experts give equal logits, but tokens must not all choose the same ones


def upcycle(dense: Decoder, *, experts: int, top_k: int, seed: int = 0) -> Decoder:
    """A new mixture on the same device and of the same dtype as `dense`, which is left alone.

    Raises: ModelError when the model is no dense one, has what the mixture's family lacks, or the numbers do not fit.
    """
    made = Decoder(
        _becomes(dense.config, experts, top_k),
        dtype=dense.norm.dtype,
        device=dense.norm.device,
        compute_dtype=dense.compute_dtype,
    )
    weights = dict(dense.named_parameters())
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith("router.weight"):
                weight.copy_(torch.randn(weight.shape, generator=noise) * ROUTER_STD)
            else:
                weight.copy_(weights[name])  # an MLP's matrix is repeated for every expert
    return made


def upcycle_folder(dense: Path, folder: Path, *, experts: int, top_k: int, seed: int = 0) -> None:
    """Read a dense model folder and write the mixture, tokenizer included, to a new one. Raises: ModelError."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} is not empty; a new model wants a folder of its own")
    save_folder(upcycle(load_folder(dense), experts=experts, top_k=top_k, seed=seed), folder)
    copy_companions(dense, folder)


def _becomes(config: ModelConfig, experts: int, top_k: int) -> ModelConfig:
    if config.family not in BECOMES:
        raise ModelError(f"a {config.family} model cannot be upcycled; {' and '.join(BECOMES)} models can")
    family = BECOMES[config.family]
    if family == "mixtral" and config.attention_bias:
        raise ModelError("a Llama model with attention biases cannot be upcycled: Mixtral has none")
    if experts < 1:
        raise ModelError(f"experts = {experts} must be at least 1")
    return dataclasses.replace(
        config, family=family, experts=experts, top_k=top_k, expert_ffn=config.ffn, ffn=0, renormalise=True
    )
