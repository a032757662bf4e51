import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from contraflow.algo.loss import SURROGATES, Bounds, Sequences, kl_loss, policy_loss, token_shares

BOUNDS = Bounds(0.2, 0.3, 2.0)


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def lone(count: int) -> Sequences:
    """Every token a sequence of its own."""
    return Sequences(torch.arange(count), count)


def surrogate(kind, new_N, old_N, advantages_N, sequences=None, bounds=BOUNDS):
    return SURROGATES[kind](new_N, old_N, advantages_N, sequences or lone(new_N.numel()), bounds)


# --- shares ----------------------------------------------------------------------------------------------------------


def test_token_mean_gives_every_token_the_same_share():
    assert token_shares(torch.tensor([2, 0, 6]), reduction="token").tolist() == [0.125] * 3


def test_sequence_mean_gives_every_sequence_the_same_share_and_skips_empty_ones():
    assert token_shares(torch.tensor([2, 0, 4]), reduction="sequence").tolist() == [0.25, 0.0, 0.125]


def test_a_constant_divides_every_sequence_alike_whatever_its_length():
    assert token_shares(torch.tensor([2, 0, 4]), reduction="constant", constant=8).tolist() == [1 / 16, 0.0, 1 / 16]


@pytest.mark.parametrize("reduction", ["token", "sequence", "constant"])
def test_shares_of_nothing_are_finite(reduction):
    assert token_shares(torch.tensor([], dtype=torch.int64), reduction=reduction).shape == (0,)
    assert bool(torch.isfinite(token_shares(torch.tensor([0, 0]), reduction=reduction)).all())


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.sampled_from(["token", "sequence"]))
def test_shares_sum_to_one_over_trained_tokens(lengths, reduction):
    lengths_S = torch.tensor(lengths)
    total = float((token_shares(lengths_S, reduction=reduction) * lengths_S).sum())
    assert total == pytest.approx(1.0 if sum(lengths) else 0.0)


# --- surrogates: ratios below, inside and above the clip, and far above; advantage +2, then -2 -----------------------

RATIOS = doubles(0.5, 1.1, 1.6, 4.0, 0.5, 1.1, 1.6, 4.0)
CREDIT = doubles(2, 2, 2, 2, -2, -2, -2, -2)

BY_HAND = {  # value, and its gradient in log(pi)
    "ppo": ([1.0, 2.2, 2.6, 2.6, -1.6, -2.2, -3.2, -8.0], [1.0, 2.2, 0, 0, 0, -2.2, -3.2, -8.0]),
    "ppo_dual_clip": ([1.0, 2.2, 2.6, 2.6, -1.6, -2.2, -3.2, -4.0], [1.0, 2.2, 0, 0, 0, -2.2, -3.2, 0]),
    "gspo": ([1.0, 2.2, 2.6, 2.6, -1.6, -2.2, -3.2, -8.0], [1.0, 2.2, 0, 0, 0, -2.2, -3.2, -8.0]),
    "cispo": (
        [
            w * a * math.log(r)
            for w, a, r in zip([0.8, 1.1, 1.3, 1.3] * 2, CREDIT.tolist(), RATIOS.tolist(), strict=True)
        ],
        [1.6, 2.2, 2.6, 2.6, -1.6, -2.2, -2.6, -2.6],
    ),
    "reinforce": ([a * math.log(r) for a, r in zip(CREDIT.tolist(), RATIOS.tolist(), strict=True)], CREDIT.tolist()),
}
REMOVED = {"ppo": (1, 2), "ppo_dual_clip": (1, 3), "gspo": (1, 2), "cispo": (0, 0), "reinforce": (0, 0)}


@pytest.mark.parametrize("kind", SURROGATES)
def test_every_surrogate_and_its_gradient_on_every_side_of_every_bound(kind):
    new_N = RATIOS.log().requires_grad_()
    found = surrogate(kind, new_N, torch.zeros(8).double(), CREDIT)
    values, gradients = BY_HAND[kind]
    assert found.values_N.tolist() == pytest.approx(values)
    assert (int(found.low_N.sum()), int(found.high_N.sum())) == REMOVED[kind]
    found.values_N.sum().backward()
    assert new_N.grad is not None
    assert new_N.grad.tolist() == pytest.approx(gradients)


def test_what_counts_as_clipped_has_lost_its_gradient_and_nothing_else_has():
    for kind in ("ppo", "ppo_dual_clip", "gspo"):
        new_N = RATIOS.log().requires_grad_()
        found = surrogate(kind, new_N, torch.zeros(8).double(), CREDIT)
        found.values_N.sum().backward()
        assert new_N.grad is not None
        assert ((new_N.grad == 0) == (found.low_N | found.high_N)).all(), kind


@pytest.mark.parametrize("kind", SURROGATES)
def test_on_policy_the_gradient_is_the_advantage_times_the_share(kind):
    new_N = doubles(-1.0, -2.0, -0.5).requires_grad_()
    one = surrogate(kind, new_N, new_N.detach(), doubles(1, -2, 3))
    policy_loss(one.values_N, doubles(0.5, 0.25, 0.25)).backward()
    assert new_N.grad is not None
    assert new_N.grad.tolist() == pytest.approx([-0.5, 0.5, -0.75])


@pytest.mark.parametrize("kind", SURROGATES)
def test_a_ratio_that_would_overflow_leaves_the_gradient_finite(kind):
    new_N = torch.tensor([0.0, 0.0], requires_grad=True)
    one = surrogate(kind, new_N, torch.tensor([-500.0, -500.0]), torch.tensor([1.0, -1.0]))
    policy_loss(one.values_N, torch.ones(2)).backward()
    assert new_N.grad is not None
    assert bool(torch.isfinite(new_N.grad).all())


@pytest.mark.parametrize("kind", SURROGATES)
def test_a_token_of_no_weight_has_no_say_even_if_its_surrogate_is_not_finite(kind):
    new_N = doubles(-1.0, -2.0).requires_grad_()
    one = surrogate(kind, new_N, doubles(-1.0, -2.0), doubles(1.0, math.nan))
    loss = policy_loss(one.values_N, doubles(1.0, 0.0))
    assert math.isfinite(float(loss.detach()))


def test_gspo_written_out_as_in_the_paper_has_the_same_value_and_gradient():
    # equation 5: the mean over sequences of min(s A, clip(s) A), s = exp(mean of log ratios)
    generator = torch.Generator().manual_seed(4)
    of_N = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3, 3])
    old_N = -2 * torch.rand(10, generator=generator, dtype=torch.float64)
    start_N = old_N + 0.6 * torch.randn(10, generator=generator, dtype=torch.float64)
    credit_S = doubles(1.5, -0.5, 2.0, -1.0)
    ours_N, plain_N = start_N.clone().requires_grad_(), start_N.clone().requires_grad_()
    shares_S = token_shares(torch.bincount(of_N), reduction="sequence")
    one = surrogate("gspo", ours_N, old_N, credit_S[of_N], Sequences(of_N, 4))
    ours = policy_loss(one.values_N, shares_S[of_N])
    ours.backward()
    terms = []
    for s in range(4):
        ratio = (plain_N[of_N == s] - old_N[of_N == s]).mean().exp()
        terms.append(torch.minimum(ratio * credit_S[s], ratio.clamp(0.8, 1.3) * credit_S[s]))
    plain = -torch.stack(terms).mean()
    plain.backward()
    assert one.low_N.any() or one.high_N.any()
    assert float(ours.detach()) == pytest.approx(float(plain.detach()), rel=1e-12)
    torch.testing.assert_close(ours_N.grad, plain_N.grad, rtol=1e-10, atol=1e-12)


def test_a_sequence_whose_tokens_are_on_two_ranks_has_one_ratio():
    new_N, old_N, credit_N = doubles(-1.0, -2.0, -0.5), doubles(-1.3, -1.0, -0.9), doubles(1, 1, 1)
    whole = surrogate("gspo", new_N, old_N, credit_N, Sequences(torch.zeros(3, dtype=torch.int64), 1))
    halves = [slice(0, 1), slice(1, 3)]
    tables = [iter([(new_N - old_N).sum()[None], doubles(3)]) for _ in halves]  # what the ranks' sums add up to
    for half, table in zip(halves, tables, strict=True):
        of_N = torch.zeros(new_N[half].numel(), dtype=torch.int64)
        part = surrogate(
            "gspo",
            new_N[half],
            old_N[half],
            credit_N[half],
            Sequences(of_N, 1, lambda _, table=table: next(table)),
        )
        torch.testing.assert_close(part.values_N, whole.values_N[half])


@pytest.mark.parametrize("kind", ["ppo", "ppo_dual_clip", "reinforce"])
@settings(deadline=None, max_examples=30)  # each is nine tokens of random numbers, and dear: two passes an element
@given(seed=st.integers(0, 2**31))
def test_gradients_equal_finite_differences(kind, seed):
    generator = torch.Generator().manual_seed(seed)
    new_N, old_N, reference_N = -2 * torch.rand(3, 9, generator=generator, dtype=torch.float64)
    advantages_N, weights_N = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    for bound in (math.log(0.8), math.log(1.3), math.log(2.0)):  # kinks: no derivative to compare with
        assume(not bool(((new_N - old_N - bound).abs() < 1e-3).any()))

    def loss(x_N: torch.Tensor) -> torch.Tensor:
        one = surrogate(kind, x_N, old_N, advantages_N)
        return policy_loss(one.values_N, weights_N) + 0.3 * kl_loss(x_N, reference_N, weights_N)

    assert torch.autograd.gradcheck(loss, (new_N.clone().requires_grad_(),), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", SURROGATES)
def test_micro_batches_of_whole_sequences_add_up_to_the_whole(kind):
    generator = torch.Generator().manual_seed(3)
    new_N, old_N, advantages_N, weights_N = torch.randn(4, 20, generator=generator, dtype=torch.float64)
    of_N = torch.repeat_interleave(torch.arange(4), torch.tensor([7, 1, 8, 4]))
    whole = policy_loss(surrogate(kind, new_N, old_N, advantages_N, Sequences(of_N, 4)).values_N, weights_N)
    parts = []
    for cut in (slice(0, 7), slice(7, 8), slice(8, 20)):
        mine = Sequences(of_N[cut], 4)
        parts.append(
            policy_loss(surrogate(kind, new_N[cut], old_N[cut], advantages_N[cut], mine).values_N, weights_N[cut])
        )
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-12)


# --- the KL to a reference -------------------------------------------------------------------------------------------


def test_kl_loss_is_zero_with_its_gradient_when_the_policies_agree():
    new_N = doubles(-1.0, -3.0).requires_grad_()
    loss = kl_loss(new_N, new_N.detach(), doubles(0.5, 0.5))
    loss.backward()
    assert new_N.grad is not None
    assert (float(loss.detach()), new_N.grad.tolist()) == (0.0, [0.0, 0.0])


def test_each_estimate_of_the_kl_in_the_loss_worked_by_hand():
    new_N, reference_N, weights_N = doubles(0.2).log(), doubles(0.6).log(), doubles(0.5)
    found = [float(kl_loss(new_N, reference_N, weights_N, kind=kind)) for kind in ("k1", "k2", "k3")]
    assert found == pytest.approx([-0.5 * math.log(3), 0.25 * math.log(3) ** 2, 0.5 * (2 - math.log(3))])


def test_only_k2_has_the_gradient_of_the_kl_itself():
    # On a three-letter alphabet the expectation over samples is a finite sum.
    logits = doubles(0.3, -0.2, 0.5)
    base = torch.log_softmax(doubles(-0.4, 0.6, 0.1), 0)

    def exact(x):
        log = torch.log_softmax(x, 0)
        return (log.exp() * (log - base)).sum()

    expected = torch.autograd.functional.jacobian(exact, logits)
    for kind, same in (("k1", False), ("k2", True), ("k3", False)):
        x = logits.clone().requires_grad_()
        log = torch.log_softmax(x, 0)
        kl_loss(log, base, log.detach().exp(), kind=kind).backward()
        assert x.grad is not None
        assert torch.allclose(x.grad, expected, atol=1e-9) == same, kind
