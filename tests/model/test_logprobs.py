"""Chunked log-probabilities against the whole softmax in float64, in value, gradient and memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contraflow.errors import ModelError
from contraflow.model.logprobs import token_logprobs


def inputs(tokens: int, dim: int, vocab: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(tokens * 1000 + dim * 100 + vocab)
    hidden = torch.randn(tokens, dim, generator=noise) * scale
    head = torch.randn(vocab, dim, generator=noise)
    return hidden.requires_grad_(), head.requires_grad_(), torch.randint(0, vocab, (tokens,), generator=noise)


def whole(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    rows = (hidden.double() @ head.double().T / temperature).log_softmax(-1)
    return rows.gather(1, targets[:, None])[:, 0], -(rows.exp() * rows).sum(-1)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(0, 9),
    vocab=st.integers(1, 11),
    chunk=st.sampled_from([None, 1, 2, 4, 100]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    pulls=st.sampled_from([(1.0, 0.0), (0.0, 1.0), (0.7, -0.4)]),
)
def test_values_and_gradients_equal_the_whole_softmax(
    tokens: int, vocab: int, chunk: int | None, temperature: float, pulls: tuple[float, float]
) -> None:
    hidden, head, targets = inputs(tokens, 5, vocab)
    got = token_logprobs(hidden, head, targets, temperature=temperature, chunk=chunk)
    wanted = whole(hidden, head, targets, temperature)
    for mine, right in zip(got, wanted, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=1e-5)
    pull = torch.linspace(-1, 2, tokens)
    grads = torch.autograd.grad([g @ (pull * p) for g, p in zip(got, pulls, strict=True)], [hidden, head])
    right_grads = torch.autograd.grad(
        [w @ (pull.double() * p) for w, p in zip(wanted, pulls, strict=True)], [hidden, head]
    )
    torch.testing.assert_close(grads, right_grads, rtol=1e-4, atol=1e-5)


def test_extreme_logits_stay_finite() -> None:
    hidden, head, targets = inputs(6, 8, 50, scale=1e4)
    logprobs, entropy = token_logprobs(hidden, head, targets)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad is not None
    assert head.grad is not None
    for x in (logprobs, entropy, hidden.grad, head.grad):
        assert x.isfinite().all()
    assert (entropy >= 0).all()


def test_half_precision_hidden_states_are_used_in_fp32() -> None:
    hidden, head, targets = inputs(6, 8, 50)
    half = hidden.detach().bfloat16().requires_grad_()
    logprobs, _ = token_logprobs(half, head, targets)
    wanted, _ = whole(half, head, targets, 1.0)
    torch.testing.assert_close(logprobs.double(), wanted, rtol=1e-5, atol=1e-5)
    logprobs.sum().backward()
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16


def test_the_logits_of_all_tokens_are_never_held() -> None:
    hidden, head, targets = inputs(64, 4, 1000)
    largest = 0
    original = torch.log_softmax

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            if func is original:
                largest = max(largest, args[0].shape[0])
            return func(*args, **(kwargs or {}))

    with Watch():
        logprobs, _ = token_logprobs(hidden, head, targets, chunk=8)
        saved = {x.shape for x in logprobs.grad_fn.saved_tensors}  # type: ignore[union-attr]
    assert largest == 8
    assert saved == {hidden.shape, head.shape, targets.shape}


def test_a_frozen_head_gets_no_gradient_and_costs_none() -> None:
    hidden, head, targets = inputs(6, 8, 50)
    logprobs, _ = token_logprobs(hidden, head.detach(), targets)
    (grad,) = torch.autograd.grad(logprobs.sum(), hidden)
    wanted = torch.autograd.grad(whole(hidden, head, targets, 1.0)[0].sum(), hidden)[0]
    torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_above_zero_is_refused(temperature: float) -> None:
    with pytest.raises(ModelError, match="above 0"):
        token_logprobs(*inputs(2, 3, 4), temperature=temperature)


def test_shapes_that_do_not_fit_are_refused() -> None:
    hidden, head, targets = inputs(2, 3, 4)
    for bad in ((hidden, head[:, :2], targets), (hidden, head, targets[:1]), (hidden[0], head, targets)):
        with pytest.raises(ModelError, match=r"must be \[T, D\]"):
            token_logprobs(*bad)
