"""A head in two bf16 halves against the whole softmax in float64: nearly fp32 in value, bf16 in gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contraflow.errors import ModelError
from contraflow.model.logprobs import token_logprobs


def inputs(tokens: int, dim: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(tokens * 1000 + dim * 100 + vocab)
    hidden = torch.randn(tokens, dim, generator=noise).bfloat16()
    head = torch.randn(vocab, dim, generator=noise)
    return hidden.requires_grad_(), head.requires_grad_(), torch.randint(0, vocab, (tokens,), generator=noise)


def whole(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    return of_logits(hidden.double() @ head.double().T, targets, temperature)


def of_logits(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    rows = (logits / temperature).log_softmax(-1)
    return rows.gather(1, targets[:, None])[:, 0], -(rows.exp() * rows).sum(-1)


def off(got: Tensor, right: Tensor) -> float:
    got, right = got.detach().double(), right.detach().double()
    return float((got - right).norm() / right.norm().clamp_min(1e-6))


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(0, 9),
    vocab=st.integers(1, 11),
    chunk=st.sampled_from([None, 1, 2, 4, 100]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    pulls=st.sampled_from([(1.0, 0.0), (0.0, 1.0), (0.7, -0.4)]),
)
def test_values_are_nearly_fp32_and_gradients_bf16(
    tokens: int, vocab: int, chunk: int | None, temperature: float, pulls: tuple[float, float]
) -> None:
    hidden, head, targets = inputs(tokens, 5, vocab)
    got = token_logprobs(hidden, head, targets, temperature=temperature, chunk=chunk, split=True)
    logits = (hidden.double() @ head.double().T).detach().requires_grad_()
    wanted = of_logits(logits, targets, temperature)
    for mine, right in zip(got, wanted, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), right, rtol=0, atol=2e-4)
    pull = torch.linspace(-1, 2, tokens)
    grads = torch.autograd.grad([g @ (pull * p) for g, p in zip(got, pulls, strict=True)], [hidden, head])
    (by_logits,) = torch.autograd.grad([w @ (pull.double() * p) for w, p in zip(wanted, pulls, strict=True)], logits)
    # Rounding three times to bf16 (the logits' gradient, what it is multiplied with, the result) is off by 3 * 2^-8 of
    # the sum of the terms' sizes at most: terms may cancel.
    for mine, left, right in ((grads[0], by_logits, head), (grads[1], by_logits.T, hidden)):
        exact, sizes = left @ right.double(), left.abs() @ right.double().abs()
        assert ((mine.double() - exact).abs() <= 3 * 2**-8 * sizes + 1e-4).all()
    assert (grads[0].dtype, grads[1].dtype) == (torch.bfloat16, torch.float32)


def test_a_logit_is_off_by_a_hundredth_of_what_bf16_or_tf32_would_lose() -> None:
    hidden, head, targets = inputs(200, 256, 300)
    wanted = whole(hidden, head, targets, 1.0)[0]
    split = token_logprobs(hidden, head, targets, split=True)[0]
    rounded = whole(hidden, head.bfloat16(), targets, 1.0)[0]
    assert off(split, wanted) < 3e-6
    assert off(split, wanted) < 0.01 * off(rounded, wanted)


def test_gradients_of_a_wide_head_point_where_those_of_float64_do() -> None:
    hidden, head, targets = inputs(200, 64, 300)
    grads = torch.autograd.grad(token_logprobs(hidden, head, targets, split=True)[0].sum(), [hidden, head])
    wanted = torch.autograd.grad(whole(hidden, head, targets, 1.0)[0].sum(), [hidden, head])
    assert all(off(mine, right) < 5e-3 for mine, right in zip(grads, wanted, strict=True))


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, head, targets = inputs(6, 8, 50)
    token_logprobs(hidden, head.detach(), targets, split=True)[0].sum().backward()
    assert head.grad is None
    assert hidden.grad is not None


def test_hidden_states_of_another_precision_are_refused() -> None:
    hidden, head, targets = inputs(2, 3, 4)
    with pytest.raises(ModelError, match=r"float32: only bfloat16"):
        token_logprobs(hidden.float(), head, targets, split=True)
