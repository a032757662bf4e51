import itertools
import math

import numpy as np
import pytest
import torch

from contraflow.config import Train
from contraflow.errors import TrainingError
from contraflow.telemetry import Account
from contraflow.train.batcher import pack
from contraflow.train.optimizer import Optimizer
from contraflow.train.update import Updater
from contraflow.types import Sample

STILL = Train(learning_rate=1e-30, warmup_updates=0, clip_norm=1e9)  # the gradient is what is looked at


def samples(count, *, seed=0):
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        length = int(rng.integers(2, 16))
        mask = np.arange(length) >= int(rng.integers(1, length))
        made.append(
            Sample(
                tokens=rng.integers(0, 32, length, dtype=np.int32),
                mask=mask,
                behaviour=np.where(mask, -rng.random(length), 0).astype(np.float32),
                advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
                versions=np.where(mask, np.int32(0), np.int32(-1)),
            )
        )
    return made


def weighted(batch, fed, scored):
    def tensor(values_T):
        return torch.from_numpy(values_T[batch.mask])

    return -(
        tensor(batch.weights) * tensor(batch.advantages) * (scored.logprobs_N - tensor(batch.behaviour)).exp()
    ).sum()


def gradient(decoder, made, *, budget, reduction, balance_weight):
    account = Account(lambda: 0.0)
    updater = Updater(decoder, Optimizer(decoder, STILL), account, balance_weight=balance_weight)
    batches = pack(made, tokens_per_batch=budget, reduction=reduction)
    done = updater.update(batches, weighted)
    grads = torch.cat([p.grad.flatten().double() for p in decoder.parameters()])
    return grads, done, len(batches)


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize("balance_weight", [0.0, 0.5])
def test_micro_batches_give_the_gradient_of_one_large_batch_for_any_split(any_decoder, reduction, balance_weight):
    made = samples(24)
    how = {"reduction": reduction, "balance_weight": balance_weight}
    whole, one, count = gradient(any_decoder, made, budget=10_000, **how)
    assert count == 1
    for budget in (1, 17, 40, 100):
        split, many, count = gradient(any_decoder, made, budget=budget, **how)
        assert count > 1
        assert float((split - whole).norm() / whole.norm()) < 1e-6
        assert many.loss == pytest.approx(one.loss, rel=1e-5)
        assert many.balance == pytest.approx(one.balance, rel=1e-6)
        if one.loads_ME is not None:
            assert torch.equal(many.loads_ME, one.loads_ME)


def test_expert_loads_count_every_fed_token_k_times_in_every_layer(mixture):
    made = samples(8)
    _, done, _ = gradient(mixture, made, budget=30, reduction="token", balance_weight=0.0)
    fed = sum(s.tokens.size - 1 for s in made)
    assert done.loads_ME.sum(1).tolist() == [fed * 2, fed * 2]


def test_a_loss_that_is_not_finite_leaves_the_weights_alone(mixture):
    before = [p.detach().clone() for p in mixture.parameters()]
    optimizer = Optimizer(mixture, Train())
    batches = pack(samples(6), tokens_per_batch=20, reduction="token")
    losses = itertools.chain([1.0, math.nan], itertools.repeat(1.0))
    with pytest.raises(TrainingError, match="micro-batch 2 of"):
        Updater(mixture, optimizer, Account(lambda: 0.0)).update(
            batches, lambda batch, fed, scored: scored.logprobs_N.sum() * next(losses)
        )
    assert optimizer.updates == 0
    assert all(torch.equal(p, b) for p, b in zip(mixture.parameters(), before, strict=True))


def test_every_second_of_an_update_is_charged_to_a_cause(mixture):
    ticks = iter(range(10_000))
    account = Account(lambda: float(next(ticks)), "wait")
    Updater(mixture, Optimizer(mixture, Train()), account).update(
        pack(samples(6), tokens_per_batch=20, reduction="token"), weighted
    )
    assert {"batch", "forward", "backward", "optimizer"} <= account.seconds().keys()
