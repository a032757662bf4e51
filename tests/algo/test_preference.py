import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contraflow.algo.preference import bradley_terry_loss

REWARDS = st.floats(-20, 20)


@given(REWARDS, REWARDS, st.floats(0, 5))
def test_the_loss_is_the_surprise_of_the_preference(chosen, rejected, margin):
    given_ = [torch.tensor([x], dtype=torch.float64) for x in (chosen, rejected, margin)]
    assert float(bradley_terry_loss(*given_)) == pytest.approx(
        math.log1p(math.exp(rejected + margin - chosen)), abs=1e-9
    )


def test_the_gradient_is_the_chance_that_the_other_one_was_preferred():
    chosen_P, rejected_P = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    margin_P = torch.rand(5, dtype=torch.float64)
    bradley_terry_loss(chosen_P, rejected_P, margin_P).sum().backward()
    wrong_P = torch.sigmoid(rejected_P + margin_P - chosen_P).detach()
    torch.testing.assert_close(chosen_P.grad, -wrong_P)
    torch.testing.assert_close(rejected_P.grad, wrong_P)
    assert torch.autograd.gradcheck(bradley_terry_loss, (chosen_P, rejected_P, margin_P))


def test_far_apart_rewards_stay_finite_and_no_pairs_cost_nothing():
    far = torch.tensor([1e4, -1e4])
    assert torch.isfinite(bradley_terry_loss(far, -far, torch.zeros(2))).all()
    assert bradley_terry_loss(torch.zeros(0), torch.zeros(0), torch.zeros(0)).sum() == 0
