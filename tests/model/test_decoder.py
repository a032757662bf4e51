"""The decoder's own promises: names, dtypes, seeds, and a decode step that never asks the host."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from contraflow.dispatch.local import LocalDispatch
from contraflow.dispatch.reference import ReferenceDispatch
from contraflow.model.cache import KVCache
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.families import FAMILIES, ModelConfig
from contraflow.model.names import parts
from contraflow.model.paged import PagedPlan

Forward = Callable[[Decoder, Sequence[Tensor]], Tensor]
SEQUENCES = [torch.arange(11) * 7 % 40, torch.tensor([3]), torch.arange(6)]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_element_of_every_weight_has_its_one_place_on_disk(
    family: str, make_config: Callable[..., ModelConfig]
) -> None:
    decoder = Decoder(make_config(family))
    table = parts(decoder.config)
    assert set(table) == {name for name, _ in decoder.named_parameters()}
    for name, weight in decoder.named_parameters():
        seen = torch.zeros(weight.shape)
        for part in table[name]:
            assert part.of(seen).shape == part.shape
            part.of(seen).add_(1)
        assert torch.equal(seen, torch.ones_like(seen)), name


def test_weights_travel_by_name_and_nothing_else_does(make_decoder: Callable[..., Decoder], forward: Forward) -> None:
    one, other = make_decoder("qwen3_moe", seed=1), make_decoder("qwen3_moe", seed=2)
    assert list(one.state_dict()) == [name for name, _ in one.named_parameters()]
    other.load_state_dict(one.state_dict())
    with torch.no_grad():
        assert torch.equal(forward(one, SEQUENCES), forward(other, SEQUENCES))


def test_a_seed_decides_a_new_decoder(make_config: Callable[..., ModelConfig]) -> None:
    config = make_config("qwen3_moe")
    one, same, other = (new_decoder(config, seed=s) for s in (1, 1, 2))
    weights = [dict(d.named_parameters()) for d in (one, same, other)]
    assert all(torch.equal(weights[0][n], weights[1][n]) for n in weights[0])
    assert not torch.equal(weights[0]["embed"], weights[2]["embed"])
    assert torch.equal(weights[0]["layers.0.attention.qk_norm"], torch.ones(2, 8))


def test_a_tied_head_is_the_embedding(make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder("qwen3")
    assert decoder.head is decoder.embed
    assert "lm_head" not in decoder.state_dict()


def test_fp32_weights_may_compute_in_half_precision(
    make_config: Callable[..., ModelConfig], make_decoder: Callable[..., Decoder], forward: Forward
) -> None:
    full = make_decoder("qwen3_moe")
    half = Decoder(full.config, compute_dtype=torch.bfloat16)
    half.load_state_dict(full.state_dict())
    out = forward(half, SEQUENCES)
    assert out.dtype == torch.bfloat16
    assert half.logits(out).dtype == torch.float32
    wanted = forward(full, SEQUENCES)
    assert torch.nn.functional.cosine_similarity(out.float(), wanted).min() > 0.9
    half.logits(out).square().mean().backward()
    for name, weight in half.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.dtype == torch.float32
        assert weight.grad.isfinite().all()


def test_any_dispatch_gives_the_same_model(make_decoder: Callable[..., Decoder], forward: Forward) -> None:
    decoder = make_decoder("qwen3_moe")
    with torch.no_grad():
        wanted = forward(decoder, SEQUENCES)
        for dispatch in (ReferenceDispatch(6), LocalDispatch(6, capacity=500)):
            decoder.use_dispatch(dispatch)
            torch.testing.assert_close(forward(decoder, SEQUENCES), wanted, rtol=0, atol=1e-5)


def test_every_parameter_gets_a_gradient(make_decoder: Callable[..., Decoder], forward: Forward) -> None:
    for family in FAMILIES:
        decoder = make_decoder(family)
        decoder.logits(forward(decoder, SEQUENCES)).square().mean().backward()
        for name, weight in decoder.named_parameters():
            if name.endswith("correction_bias"):
                assert not weight.requires_grad
                continue
            assert weight.grad is not None, (family, name)
            assert weight.grad.abs().amax() > 0, (family, name)


def decode_step(decoder: Decoder, **made: Any) -> Tensor:
    cache = KVCache(decoder.config, blocks=9, block_tokens=4, dtype=torch.bfloat16, device="cpu")
    counts = torch.ones(4, dtype=torch.int64)
    plan = PagedPlan(cache, torch.zeros(4, 2, dtype=torch.int64), counts, counts, **made)
    return decoder.logits(decoder(counts, counts, plan))


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.experts])
def test_a_decode_step_of_fixed_capacity_reads_nothing_on_the_host(
    family: str, make_config: Callable[..., ModelConfig]
) -> None:
    # A fake tensor has no values, so whoever asks for one fails; torch's fake grouped matmul knows bf16 only.
    with FakeTensorMode(), torch.no_grad():
        config = make_config(family)
        decoder = Decoder(config, dtype=torch.bfloat16, dispatch=LocalDispatch(6, capacity=8))
        assert decode_step(decoder).shape == (4, 40)
        prefill = torch.zeros(4, 2, dtype=torch.int64)
        assert decode_step(decoder, queries_BQ=prefill).shape == (4, 40)
        decoder.use_dispatch(LocalDispatch(6))
        with pytest.raises(DataDependentOutputException):
            decode_step(decoder)
