import math

import pytest
import torch
from torch import nn

from contraflow.config import Train
from contraflow.errors import CheckpointError, ModelError, TrainingError
from contraflow.train.optimizer import Optimizer, warmup

SETTINGS = Train(learning_rate=0.1, warmup_updates=2, weight_decay=0.0, clip_norm=1e9)


def small(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def push(model: nn.Module, optimizer: Optimizer, seed: int) -> None:
    optimizer.clear()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.apply()


def weights(model: nn.Module) -> list[list[float]]:
    return [p.flatten().tolist() for p in model.parameters()]


def test_the_rate_rises_linearly_and_stays():
    rates = [warmup(done, learning_rate=0.3, warmup_updates=3) for done in range(5)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.3, 0.3])
    assert warmup(0, learning_rate=0.3, warmup_updates=0) == 0.3


def test_two_updates_equal_adamw_written_out_in_float64():
    model = small()
    optimizer = Optimizer(model, SETTINGS)
    expected = model.weight.detach().double().clone()
    first, second = torch.zeros(2, 3).double(), torch.zeros(2, 3).double()
    for update in (1, 2):
        grad = torch.randn(2, 3, generator=torch.Generator().manual_seed(update))
        model.weight.grad, model.bias.grad = grad.clone(), torch.zeros(2)
        applied = optimizer.apply()
        assert applied.grad_norm == pytest.approx(float(grad.norm()), rel=1e-6)
        first = 0.9 * first + 0.1 * grad.double()
        second = 0.95 * second + 0.05 * grad.double() ** 2
        step = (first / (1 - 0.9**update)) / ((second / (1 - 0.95**update)).sqrt() + 1e-8)
        expected -= 0.1 * update / 2 * step
        assert applied.learning_rate == pytest.approx(0.1 * update / 2)
    torch.testing.assert_close(model.weight.detach().double(), expected, rtol=1e-6, atol=1e-6)


def test_weight_decay_moves_matrices_and_leaves_vectors():
    model = small()
    optimizer = Optimizer(model, Train(learning_rate=0.1, warmup_updates=0, weight_decay=0.5))
    before, bias = model.weight.detach().clone(), model.bias.detach().clone()
    model.weight.grad, model.bias.grad = torch.zeros(2, 3), torch.zeros(2)
    optimizer.apply()
    torch.testing.assert_close(model.weight.detach(), before * (1 - 0.1 * 0.5))
    assert torch.equal(model.bias.detach(), bias)


def test_the_whole_gradient_is_clipped_to_the_norm():
    model = small()
    optimizer = Optimizer(model, Train(clip_norm=0.5))
    model.weight.grad, model.bias.grad = torch.full((2, 3), 3.0), torch.full((2,), 4.0)
    assert optimizer.apply().grad_norm == pytest.approx(math.sqrt(6 * 9 + 2 * 16))
    clipped = torch.cat([model.weight.grad.flatten(), model.bias.grad])
    assert float(clipped.norm()) == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_named(bad):
    model = small()
    optimizer = Optimizer(model, SETTINGS)
    push(model, optimizer, 1)
    before, moments = weights(model), {k: v.clone() for k, v in optimizer.moments().items()}
    model.weight.grad, model.bias.grad = torch.zeros(2, 3), torch.tensor([0.0, bad])
    with pytest.raises(TrainingError, match="'bias'"):
        optimizer.apply()
    assert weights(model) == before
    assert optimizer.updates == 1
    assert all(torch.equal(v, moments[k]) for k, v in optimizer.moments().items())


def test_going_back_to_a_snapshot_is_bit_equal_even_to_before_the_first_update():
    model = small()
    optimizer = Optimizer(model, SETTINGS)
    start, before = optimizer.snapshot(), weights(model)
    push(model, optimizer, 1)
    once = weights(model)
    assert once != before
    optimizer.restore(start)
    assert weights(model) == before
    assert (optimizer.updates, optimizer.moments()) == (0, {})
    push(model, optimizer, 1)
    assert weights(model) == once


def test_saved_moments_go_on_bit_equal():
    model, twin = small(), small(seed=9)
    optimizer = Optimizer(model, SETTINGS)
    push(model, optimizer, 1)
    push(model, optimizer, 2)
    twin.load_state_dict(model.state_dict())
    resumed = Optimizer(twin, SETTINGS)
    resumed.load(optimizer.moments(), optimizer.updates)
    push(model, optimizer, 3)
    push(twin, resumed, 3)
    assert weights(model) == weights(twin)


def test_moments_of_another_model_are_refused():
    model, other = small(), nn.Linear(4, 2)
    optimizer = Optimizer(other, SETTINGS)
    push(other, optimizer, 1)
    with pytest.raises(CheckpointError, match="weight"):
        Optimizer(model, SETTINGS).load(optimizer.moments(), 1)


def test_weights_that_are_not_full_precision_are_refused():
    with pytest.raises(ModelError, match="fp32"):
        Optimizer(small().to(torch.bfloat16), SETTINGS)
