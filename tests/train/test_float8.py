"""The trainer's proof of a version in float8 is what a decoder of the published weights computes."""

import numpy as np
import torch

from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.families import ModelConfig
from contraflow.train.float8 import expert_matrices, raised_experts
from contraflow.weights.fp8 import lowered, raised
from contraflow.weights.probe import probe_logprobs, probe_prompts

MODEL = ModelConfig(
    family="qwen3_moe", vocab=32, dim=96, layers=2, heads=2, kv_heads=1, head_dim=16,
    experts=4, top_k=2, expert_ffn=160, renormalise=True, context=64,
)  # fmt: skip


def test_passes_with_raised_experts_are_those_of_a_decoder_that_holds_what_was_published() -> None:
    trained = new_decoder(MODEL, seed=3, std=0.2)
    prompts = probe_prompts(MODEL.vocab, prompts=3, tokens=9, seed=0)
    matrices = expert_matrices(trained)
    assert sorted({name.rpartition(".")[2] for name in matrices}) == ["down", "gate_up"]
    assert {weight.ndim for weight in matrices.values()} == {3}

    published = {name: tensor.detach() for name, tensor in trained.state_dict().items()}
    for name, weight in matrices.items():
        published |= lowered(name, weight)
    engine = Decoder(MODEL, dtype=torch.bfloat16)
    engine.load_state_dict(raised(published))

    with trained.computing_in(torch.bfloat16):
        plain = probe_logprobs(trained, prompts)
        with raised_experts(trained):
            proof = probe_logprobs(trained, prompts)
        after = probe_logprobs(trained, prompts)
    held = probe_logprobs(engine, prompts)
    for row in range(len(prompts)):
        np.testing.assert_array_equal(proof[row], held[row])
        np.testing.assert_array_equal(plain[row], after[row])
    assert max(np.abs(a - b).max() for a, b in zip(plain, proof, strict=True)) > 1e-2
