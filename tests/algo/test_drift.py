import math

import pytest
import torch

from contraflow.algo.drift import age_report, kl_k1, kl_k2, kl_k3, log_ratio, ratio_report
from contraflow.algo.loss import Bounds, Sequences, ppo


def logs(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def test_the_three_estimators_on_one_token_worked_by_hand():
    # q = 0.2, p = 0.6: p / q = 3
    q_N, p_N = logs(0.2), logs(0.6)
    assert float(kl_k1(q_N, p_N)) == pytest.approx(-math.log(3))
    assert float(kl_k2(q_N, p_N)) == pytest.approx(math.log(3) ** 2 / 2)
    assert float(kl_k3(q_N, p_N)) == pytest.approx(3 - 1 - math.log(3))


def test_k1_and_k3_are_unbiased_and_k3_is_never_negative():
    # Expectation over q is a finite sum on a three-letter alphabet.
    q, p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = float((q * (q / p).log()).sum())
    assert float((q * kl_k1(q.log(), p.log())).sum()) == pytest.approx(exact, abs=1e-12)
    assert float((q * kl_k3(q.log(), p.log())).sum()) == pytest.approx(exact, abs=1e-12)
    assert bool((kl_k3(q.log(), p.log()) >= 0).all())


def test_k3_keeps_its_precision_when_the_policies_nearly_agree():
    q_N = torch.tensor([-1.0], dtype=torch.float64)
    assert float(kl_k3(q_N, q_N + 1e-6)) == pytest.approx(5e-13, rel=1e-3)


def test_a_huge_log_ratio_is_held_and_has_no_gradient():
    new_N = torch.tensor([0.0, -100.0, 0.5], requires_grad=True)
    held_N = log_ratio(new_N, torch.tensor([-100.0, 0.0, 0.0]))
    assert held_N.tolist() == [20.0, -20.0, 0.5]
    held_N.exp().sum().backward()
    assert new_N.grad is not None
    assert new_N.grad.tolist() == pytest.approx([0.0, 0.0, math.exp(0.5)])


def test_ratio_report_counts_only_tokens_whose_gradient_the_clip_removed():
    ratios = logs(0.5, 0.5, 1.5, 1.5, 1.0)
    advantages_N = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    clipped = ppo(ratios, torch.zeros(5).double(), advantages_N, Sequences(torch.arange(5), 5), Bounds(0.2, 0.2))
    report = ratio_report(ratios, torch.zeros(5).double(), clipped.low_N, clipped.high_N)
    assert report.mean == pytest.approx(1.0)
    assert (report.low, report.high) == (pytest.approx(0.5), pytest.approx(1.5))
    assert (report.clipped_low, report.clipped_high) == (pytest.approx(0.2), pytest.approx(0.2))
    by_hand = (2 * (0.5 - 1 - math.log(0.5)) + 2 * (1.5 - 1 - math.log(1.5))) / 5
    assert report.kl == pytest.approx(by_hand)


def test_age_is_the_step_minus_the_version_that_sampled_the_token():
    report = age_report(torch.tensor([7, 9, 9, 10]), 10)
    assert (report.mean, report.high) == (pytest.approx(5 / 4), 3)


def test_reports_of_nothing_are_zero():
    nothing = torch.zeros(0)
    assert set(ratio_report(nothing, nothing, nothing, nothing)) == {0.0}
    assert age_report(torch.zeros(0, dtype=torch.int32), 3) == (0.0, 0)
