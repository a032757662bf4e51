"""The norm against its formula in float64, in value and gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contraflow.model.ops import cast, linear, rms_norm


def formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(0, 5),
    width=st.sampled_from([2, 7, 64]),
    eps=st.sampled_from([1e-6, 1e-5, 0.5]),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
    heads=st.booleans(),
)
def test_the_norm_is_its_formula(tokens: int, width: int, eps: float, scale: float, heads: bool) -> None:
    noise = torch.Generator().manual_seed(width)
    x = (torch.randn(tokens, 3, width, generator=noise) * scale).requires_grad_()
    weight = torch.randn((3, width) if heads else (width,), generator=noise).requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    wanted, got = formula(*wide, eps), rms_norm(x, weight, eps)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(rms_norm(x, weight, eps), got, rtol=1e-6, atol=1e-7)
    pull = torch.randn(x.shape, generator=noise)
    grads, right = torch.autograd.grad(got, [x, weight], pull), torch.autograd.grad(wanted, wide, pull.double())
    for grad, right_grad in zip(grads, right, strict=True):
        torch.testing.assert_close(grad.double(), right_grad, rtol=1e-4, atol=1e-5 / scale if scale < 1 else 1e-5)


def test_a_row_of_zeros_stays_zero_and_its_gradient_finite() -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    out = rms_norm(x, torch.ones(8), 1e-6)
    out.sum().backward()
    assert not out.any()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(64,), (3, 64)])
def test_half_precision_is_normed_in_fp32(shape: tuple[int, ...]) -> None:
    noise = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 3, 64, generator=noise).bfloat16(), torch.randn(shape, generator=noise)
    out = rms_norm(x, weight, 1e-6)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), formula(x.float(), weight, 1e-6), rtol=2e-2, atol=1e-2)


def test_weights_are_cast_only_when_they_must_be() -> None:
    weight = torch.ones(4, 4)
    assert cast(weight, torch.float32) is weight
    assert linear(torch.ones(1, 4).bfloat16(), weight, torch.ones(4)).dtype == torch.bfloat16
