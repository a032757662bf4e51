"""On a GPU: fused pieces really compiled, and a head in two halves on matrix units, beside the plain forms."""

import dataclasses

import pytest
import torch
from torch import Tensor

from contraflow.compiled import compiled
from contraflow.model.attention import Attention, PackedPlan
from contraflow.model.copies import compute_copies
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.logprobs import token_logprobs
from contraflow.model.rotary import frequencies, rotation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")]
CONFIG = ModelConfig(
    family="olmoe", vocab=96, dim=64, layers=2, heads=2, kv_heads=2, head_dim=32, experts=4, top_k=4, expert_ffn=32
)  # every expert of every token: no routing to flip by rounding


def learnt(tokens: int, *, fast: bool) -> tuple[Tensor, dict[str, Tensor]]:
    decoder = Decoder(CONFIG, device="cuda", compute_dtype=torch.bfloat16)
    decoder.load_state_dict(new_decoder(CONFIG, seed=3, std=0.1).state_dict())
    if fast:
        decoder.fuse()
    decoder.recompute = fast
    ids = torch.arange(tokens, device="cuda") * 7 % CONFIG.vocab
    hidden = decoder(ids, torch.arange(tokens, device="cuda"), PackedPlan([0, 5, tokens], "cuda"))
    logprobs, entropy = token_logprobs(hidden, decoder.head, ids.roll(-1), split=fast, fuse=fast, chunk=40)
    with compute_copies(decoder):
        (logprobs.sum() + entropy.sum()).backward()
    return logprobs.detach(), {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tokens", [130, 77, 33])
def test_the_fast_forms_are_as_near_to_the_plain_ones_as_bf16_is(tokens: int) -> None:
    (fast, fast_grads), (plain, plain_grads) = learnt(tokens, fast=True), learnt(tokens, fast=False)
    torch.testing.assert_close(fast, plain, rtol=0, atol=0.1)
    assert fast_grads.keys() == plain_grads.keys()
    for name, grad in plain_grads.items():
        assert float((fast_grads[name] - grad).norm() / grad.norm()) < 0.05, name


@pytest.mark.parametrize("fuse", [False, True])
def test_the_split_head_is_nearly_fp32(fuse: bool) -> None:
    noise = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(300, 256, device="cuda", generator=noise).bfloat16()
    head = torch.randn(1000, 256, device="cuda", generator=noise)
    targets = torch.randint(0, 1000, (300,), device="cuda", generator=noise)
    logprobs, entropy = token_logprobs(hidden, head, targets, split=True, fuse=fuse, chunk=128)
    rows = (hidden.double() @ head.double().T).log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), rows.gather(1, targets[:, None])[:, 0], rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(entropy.double(), -(rows.exp() * rows).sum(-1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tokens", [16376, 16381])
def test_the_gradient_of_a_wide_norm_s_weight_survives_compiling(tokens: int) -> None:
    """Over many rows the compiler sums in two passes, which torch 2.11 gets wrong for its own rms_norm."""
    wide = dataclasses.replace(CONFIG, dim=2048, heads=16, kv_heads=16, head_dim=128)
    attention = Attention(wide, torch.float32, "cuda")
    noise = torch.Generator("cuda").manual_seed(tokens)
    qkv = torch.randn(tokens, 48, 128, device="cuda", generator=noise).bfloat16()
    turn = rotation(torch.arange(tokens, device="cuda"), frequencies(wide).cuda(), torch.bfloat16)
    pull = torch.randn(tokens, 48, 128, device="cuda", generator=noise).bfloat16()
    weight = attention.qk_norm
    assert weight is not None
    with torch.no_grad():
        weight.fill_(1.0)

    def gradient(wanted: bool) -> Tensor:
        placed = compiled(Attention.placed, wanted)(attention, qkv, turn)
        (found,) = torch.autograd.grad(torch.cat(placed, 1), weight, pull)
        return found

    plain = gradient(False)
    assert float((gradient(True) - plain).norm() / plain.norm()) < 0.02
