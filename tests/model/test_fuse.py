"""Fused pieces and held copies change rounding and passes over memory, and nothing else.

What `torch.compile` makes of the pieces is left to it here (they run as they are written); tests/model/test_gpu.py
compiles them.
"""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from contraflow.dispatch.local import LocalDispatch
from contraflow.model.attention import PackedPlan
from contraflow.model.copies import compute_copies
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.moe import swiglu, weighted_swiglu

CONFIG = ModelConfig(
    family="olmoe", vocab=32, dim=16, layers=2, heads=2, kv_heads=2, head_dim=8, experts=5, top_k=2, expert_ffn=8
)
STARTS = [0, 3, 4, 21]
TOKENS = torch.arange(STARTS[-1]) * 7 % 32


@pytest.fixture(autouse=True)
def _as_written() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def olmoe(capacity: int | None = None, compute: torch.dtype | None = None) -> Decoder:
    made = new_decoder(CONFIG, seed=1, std=0.3)
    decoder = Decoder(CONFIG, compute_dtype=compute, dispatch=LocalDispatch(CONFIG.experts, capacity))
    decoder.load_state_dict(made.state_dict())
    return decoder


def gradients(decoder: Decoder, times: int = 1) -> dict[str, Tensor]:
    decoder.zero_grad()
    for _ in range(times):
        decoder.logits(decoder(TOKENS, TOKENS, PackedPlan(STARTS))).square().mean().backward()
    return {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("capacity", [None, 60])
def test_a_fused_decoder_is_the_same_function_with_the_same_gradients(capacity: int | None) -> None:
    plain, fused = olmoe(capacity), olmoe(capacity)
    fused.fuse()
    torch.testing.assert_close(fused(TOKENS, TOKENS, PackedPlan(STARTS)), plain(TOKENS, TOKENS, PackedPlan(STARTS)))
    torch.testing.assert_close(gradients(fused), gradients(plain))


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_weighted_swiglu_is_swiglu_times_the_weight(rows: int) -> None:
    gate_up, weights = torch.randn(rows, 10), torch.rand(rows)
    torch.testing.assert_close(weighted_swiglu(gate_up, weights), swiglu(gate_up) * weights[:, None])
    assert weighted_swiglu(gate_up.bfloat16(), weights).dtype == torch.bfloat16


@pytest.mark.parametrize("recompute", [False, True])
def test_held_copies_give_what_casting_at_use_gives_bit_for_bit(recompute: bool) -> None:
    decoder = olmoe(compute=torch.bfloat16)
    decoder.recompute = recompute
    wanted = gradients(decoder)
    with compute_copies(decoder):
        assert decoder.layers[0].mlp.down.compute_copy.dtype == torch.bfloat16
        held = gradients(decoder)
    assert held.keys() == wanted.keys()
    assert all(torch.equal(held[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "gpt_oss"])
def test_held_copies_and_fused_pieces_change_no_other_family(family: str, make_decoder: Callable[..., Decoder]) -> None:
    whole = make_decoder(family)
    plain, fused = gradients(whole), copy.deepcopy(whole)
    fused.fuse()
    torch.testing.assert_close(gradients(fused), plain, rtol=1e-4, atol=1e-5)
    half = Decoder(whole.config, compute_dtype=torch.bfloat16)
    half.load_state_dict(whole.state_dict())
    wanted = gradients(half)
    with compute_copies(half):
        copied = {name for name, weight in half.named_parameters() if hasattr(weight, "compute_copy")}
        held = gradients(half)
    large = [name for name, weight in half.named_parameters() if weight.ndim > 1 and "layers" in name]
    assert copied == {name for name in large if not name.endswith(("router.weight", "_bias", "_norm"))}
    assert all(torch.equal(held[name], wanted[name]) for name in wanted)


def test_gradients_of_several_passes_over_held_copies_add_up() -> None:
    decoder = olmoe(compute=torch.bfloat16)
    wanted = gradients(decoder, times=3)
    with compute_copies(decoder):
        held = gradients(decoder, times=3)
    assert all(torch.equal(held[name], wanted[name]) for name in wanted)


def test_copies_are_gone_afterwards_so_that_moved_weights_are_seen() -> None:
    decoder = olmoe(compute=torch.bfloat16)
    with pytest.raises(ZeroDivisionError), compute_copies(decoder):
        1 / 0  # noqa: B018
    before = decoder(TOKENS, TOKENS, PackedPlan(STARTS))
    with torch.no_grad():
        decoder.layers[1].mlp.down.mul_(2)
    assert not torch.equal(decoder(TOKENS, TOKENS, PackedPlan(STARTS)), before)


def test_a_decoder_that_computes_in_its_own_dtype_gets_no_copies() -> None:
    decoder = olmoe()
    with compute_copies(decoder):
        assert not any(hasattr(p, "compute_copy") for p in decoder.parameters())


def test_a_fused_decoder_can_be_copied() -> None:
    decoder = olmoe()
    decoder.fuse()
    twin = copy.deepcopy(decoder)
    assert torch.equal(decoder(TOKENS, TOKENS, PackedPlan(STARTS)), twin(TOKENS, TOKENS, PackedPlan(STARTS)))


@pytest.mark.parametrize("shape", [(7, 3), (1, 1), (4, 0), (0, 2)])
def test_fused_dispatch_keeps_pairs_without_an_expert_and_odd_shapes_right(shape: tuple[int, int]) -> None:
    tokens = shape[0]
    ids = torch.randint(-1, 3, shape)
    x, weights = torch.randn(tokens, 4, requires_grad=True), torch.rand(shape)
    outs, grads = [], []
    for fuse in (False, True):
        dispatch = LocalDispatch(3, capacity=100)
        dispatch.fuse = fuse
        rows = dispatch.dispatch(x, ids, weights)
        out = dispatch.combine(rows.x_RD * rows.weights_R[:, None], rows.handle)
        outs.append(out)
        grads.append(torch.autograd.grad(out.square().sum(), x)[0])
    torch.testing.assert_close(outs[1], outs[0])
    torch.testing.assert_close(grads[1], grads[0])
