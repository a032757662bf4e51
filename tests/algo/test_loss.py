import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from contraflow.algo.loss import clipped_surrogate, kl_loss, policy_loss, token_shares

CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_token_mean_gives_every_token_the_same_share():
    assert token_shares(torch.tensor([2, 0, 6]), reduction="token").tolist() == [0.125] * 3


def test_sequence_mean_gives_every_sequence_the_same_share_and_skips_empty_ones():
    assert token_shares(torch.tensor([2, 0, 4]), reduction="sequence").tolist() == [0.25, 0.0, 0.125]


@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_shares_of_nothing_are_finite(reduction):
    assert token_shares(torch.tensor([], dtype=torch.int64), reduction=reduction).shape == (0,)
    assert bool(torch.isfinite(token_shares(torch.tensor([0, 0]), reduction=reduction)).all())


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.sampled_from(["token", "sequence"]))
def test_shares_sum_to_one_over_trained_tokens(lengths, reduction):
    lengths_S = torch.tensor(lengths)
    total = float((token_shares(lengths_S, reduction=reduction) * lengths_S).sum())
    assert total == pytest.approx(1.0 if sum(lengths) else 0.0)


def test_clipped_surrogate_on_every_side_of_both_bounds():
    # ratio: below, inside, above; advantage: +2 then -2
    ratios = doubles(0.5, 1.1, 1.6, 0.5, 1.1, 1.6)
    advantages_N = doubles(2, 2, 2, -2, -2, -2)
    surrogate_N = clipped_surrogate(ratios.log(), torch.zeros(6).double(), advantages_N, **CLIP)
    assert surrogate_N.tolist() == pytest.approx([1.0, 2.2, 2.6, -1.6, -2.2, -3.2])


def test_the_gradient_stops_only_where_the_clip_makes_things_worse():
    new_N = doubles(0.5, 1.1, 1.6, 0.5, 1.1, 1.6).log().requires_grad_()
    clipped_surrogate(new_N, torch.zeros(6).double(), doubles(2, 2, 2, -2, -2, -2), **CLIP).sum().backward()
    assert new_N.grad is not None
    assert new_N.grad.tolist() == pytest.approx([1.0, 2.2, 0.0, 0.0, -2.2, -3.2])


def test_on_policy_the_gradient_is_the_advantage_times_the_share():
    new_N = doubles(-1.0, -2.0, -0.5).requires_grad_()
    loss = policy_loss(new_N, new_N.detach(), doubles(1, -2, 3), doubles(0.5, 0.25, 0.25), **CLIP)
    assert float(loss.detach()) == pytest.approx(-(0.5 - 0.5 + 0.75))
    loss.backward()
    assert new_N.grad is not None
    assert new_N.grad.tolist() == pytest.approx([-0.5, 0.5, -0.75])


def test_a_ratio_that_would_overflow_leaves_the_gradient_finite():
    new_N = torch.tensor([0.0, 0.0], requires_grad=True)
    policy_loss(new_N, torch.tensor([-500.0, -500.0]), torch.tensor([1.0, -1.0]), torch.ones(2), **CLIP).backward()
    assert new_N.grad is not None
    assert new_N.grad.tolist() == [0.0, 0.0]


@settings(deadline=None)
@given(st.integers(0, 2**31))
def test_gradients_equal_finite_differences(seed):
    generator = torch.Generator().manual_seed(seed)
    new_N, old_N, reference_N = -2 * torch.rand(3, 9, generator=generator, dtype=torch.float64)
    advantages_N, weights_N = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    for bound in (math.log(0.8), math.log(1.3)):  # the clip has a kink there: no derivative to compare with
        assume(not bool(((new_N - old_N - bound).abs() < 1e-3).any()))

    def loss(x_N: torch.Tensor) -> torch.Tensor:
        return policy_loss(x_N, old_N, advantages_N, weights_N, **CLIP) + 0.3 * kl_loss(x_N, reference_N, weights_N)

    assert torch.autograd.gradcheck(loss, (new_N.clone().requires_grad_(),), eps=1e-6, atol=1e-6)


def test_micro_batches_add_up_to_the_whole():
    generator = torch.Generator().manual_seed(3)
    new_N, old_N, advantages_N, weights_N = torch.randn(4, 20, generator=generator, dtype=torch.float64)
    whole = policy_loss(new_N, old_N, advantages_N, weights_N, **CLIP)
    cuts = [slice(0, 7), slice(7, 8), slice(8, 20)]
    parts = [policy_loss(new_N[c], old_N[c], advantages_N[c], weights_N[c], **CLIP) for c in cuts]
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-12)


def test_kl_loss_is_zero_with_its_gradient_when_the_policies_agree():
    new_N = doubles(-1.0, -3.0).requires_grad_()
    loss = kl_loss(new_N, new_N.detach(), doubles(0.5, 0.5))
    loss.backward()
    assert new_N.grad is not None
    assert (float(loss.detach()), new_N.grad.tolist()) == (0.0, [0.0, 0.0])
