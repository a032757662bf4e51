"""What all tests share: laws judged without a stopwatch, one torch thread, a tiny random model with its tokenizer."""

from pathlib import Path

import pytest
import torch
from hypothesis import settings

from contraflow.model.decoder import new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.folder import save_folder
from contraflow.model.tokenizer import Tokenizer, build_char_tokenizer

# Hypothesis judges laws, not speed: test machines are shared and slow at times.
settings.register_profile("contraflow", deadline=None)
settings.load_profile("contraflow")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: Qwen3-MoE kind, 2 layers, width 32, 4 experts top-2, random weights."""
    folder = tmp_path_factory.mktemp("tiny-moe")
    build_char_tokenizer(folder)
    tokenizer = Tokenizer.load(folder)
    config = ModelConfig(
        family="qwen3_moe",
        vocab=tokenizer.size,
        dim=32,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=16,
        experts=4,
        top_k=2,
        expert_ffn=32,
        renormalise=True,
        context=128,
        eos=(tokenizer.eos,),
    )
    save_folder(new_decoder(config, seed=7), folder)
    return folder
