"""The critic in a step: what it is asked, its gradient, what it learns, and when it leaves the policy alone."""

import math

import msgspec
import numpy as np
import pytest
import torch

from contraflow import config
from contraflow.errors import ConfigError
from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.value import ValueHead
from contraflow.parallel.spread import Spread
from contraflow.telemetry import Account
from contraflow.train.batcher import pack
from contraflow.train.crediting import credited
from contraflow.train.crew import open_crew
from contraflow.train.critic import Critic, ValueObjective
from contraflow.train.optimizer import Optimizer
from contraflow.train.step import Beside, TrainStep
from contraflow.types import Sample
from tests.train.conftest import DENSE, MIXTURE

GAE = config.Loss(advantages="gae")
TRAIN = config.Train(learning_rate=3e-3, warmup_updates=0, tokens_per_batch=64)
TRUNKS = ["own", "shared"]


def decoder_of(tree=MIXTURE, seed=1):
    return new_decoder(ModelConfig.from_hf(tree), seed=seed, std=0.2)


def head_of(dim=16, seed=5):
    head, noise = ValueHead(dim), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head.weight.normal_(0, 0.5, generator=noise)
    return head


def parts(section, *, train=TRAIN, loss=GAE, tree=MIXTURE, head=None):
    """A policy, its critic, and the step of both."""
    account, policy, head = Account(lambda: 0.0), decoder_of(tree), head or head_of()
    trunk = Spread(decoder_of(tree, seed=2)) if section.trunk == "own" else None
    crew = open_crew(policy, None, account, temperature=1.0, value=head if trunk is None else None)
    critic = Critic(section, head, train=train, trunk=trunk, crew=crew, account=account)
    optimizer = Optimizer(policy, train)
    step = TrainStep(
        policy, optimizer, account, train=train, loss=loss, temperature=1.0, beside=Beside(critic=critic), crew=crew
    )
    return policy, critic, step


def episode(tokens, *, prompt=1, reward=0.0, truncated=False, mask=None):
    tokens_L = np.array(tokens, np.int32)
    mask_L = np.arange(len(tokens)) >= prompt if mask is None else np.array(mask)
    return Sample(
        tokens=tokens_L,
        mask=mask_L,
        behaviour=np.where(mask_L, -math.log(32), 0).astype(np.float32),
        advantages=np.where(mask_L, reward, 0).astype(np.float32),
        versions=np.where(mask_L, np.int32(0), np.int32(-1)),
        truncated=truncated,
    )


def drawn(count, seed=0):
    rng = np.random.default_rng(seed)
    return [
        episode(rng.integers(0, 32, rng.integers(2, 12)), reward=rng.normal(), truncated=bool(rng.random() < 0.4))
        for _ in range(count)
    ]


def by_hand(trunk, head, sample):
    """Values of the states before each token but the first, and after the last, one sequence at a time."""
    tokens_L = torch.from_numpy(sample.tokens.astype(np.int64))
    hidden_LD = trunk(tokens_L, torch.arange(len(tokens_L)), PackedPlan([0, len(tokens_L)]))
    return hidden_LD @ head.weight + head.bias


def bits(model):
    return [p.detach().clone() for p in model.parameters()]


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("trunk", TRUNKS)
def test_values_are_those_of_one_sequence_at_a_time_and_a_cut_off_one_has_one_more(trunk):
    policy, critic, _ = parts(config.Critic(trunk=trunk, truncated="bootstrap"))
    given = drawn(7)
    for one in critic.look(given, version=3):
        with torch.no_grad():
            wanted = by_hand(policy if critic.trunk is None else critic.trunk.decoder, critic.head, one).numpy()
        assert one.valued == 3
        assert one.values[one.mask] == pytest.approx(wanted[:-1][one.mask[1:]], abs=1e-5)
        assert not one.values[~one.mask].any()
        assert one.bootstrap == pytest.approx(wanted[-1] if one.truncated else 0.0, abs=1e-5)
    assert critic.look([], version=3) == []


@pytest.mark.parametrize("trunk", TRUNKS)
def test_where_the_budget_is_an_end_nothing_is_worth_more_behind_it(trunk):
    _, critic, _ = parts(config.Critic(trunk=trunk, truncated="end"))
    _, longer, _ = parts(config.Critic(trunk=trunk, truncated="bootstrap"))
    given = drawn(7)
    for one, other in zip(critic.look(given, version=3), longer.look(given, version=3), strict=True):
        assert one.bootstrap == 0.0
        assert one.values == pytest.approx(other.values, abs=1e-5)


@pytest.mark.parametrize("trunk", TRUNKS)
@pytest.mark.parametrize("tree", [MIXTURE, DENSE], ids=["mixture", "dense"])
def test_the_gradient_is_that_of_finite_differences(trunk, tree):
    section = config.Critic(trunk=trunk, clip=0.0, whiten=False, weight=1.0)
    policy, critic, step = parts(section, tree=tree)
    model = policy if critic.trunk is None else critic.trunk.decoder
    (ready,) = [credited(critic.look(drawn(5), version=0), GAE, section, version=0)]
    batches = pack(ready, tokens_per_batch=24, reduction="token")

    def loss():
        found = ValueObjective(0.0)
        if critic.trunk is None:
            critic.clear()
            step._updater.measure(batches, lambda batch, _, scored: found(batch, scored))
        else:
            critic.clear()
            critic.measure(batches, found)
        return float(torch.stack(found.losses).double().sum())

    loss()
    weights = [critic.head.weight, critic.head.bias, model.norm, model.layers[0].attention.qkv, model.embed]
    gradients = [weight.grad.clone() for weight in weights]
    for weight, gradient in zip(weights, gradients, strict=True):
        along = gradient / gradient.norm()
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                weight.add_(along, alpha=sign * 1e-3)
            ends.append(loss())
            with torch.no_grad():
                weight.sub_(along, alpha=sign * 1e-3)
        assert (ends[0] - ends[1]) / 2e-3 == pytest.approx(float(gradient.norm()), rel=2e-2)


@pytest.mark.parametrize("trunk", TRUNKS)
def test_while_it_warms_up_the_policys_bits_stay_and_its_own_move(trunk):
    policy, critic, step = parts(config.Critic(trunk=trunk, warmup_steps=2))
    for at, moves in ((0, False), (1, False), (2, True)):
        before, head = bits(policy), bits(critic.head)
        numbers = step.run([drawn(6)], step=at, seed=0).numbers
        assert (numbers.critic_updates, numbers.updates, numbers.values_version) == (1, int(moves), at)
        assert same(before, bits(policy)) is not moves
        assert not same(head, bits(critic.head))
        assert all(math.isfinite(number) for number in numbers if isinstance(number, float))


@pytest.mark.parametrize("trunk", TRUNKS)
def test_a_refused_update_moves_neither(trunk):
    train = config.Train(warmup_updates=0, updates=2)
    policy, critic, step = parts(config.Critic(trunk=trunk), train=train)
    models = [policy, critic.head, *([] if critic.trunk is None else [critic.trunk.decoder])]
    before = [bits(model) for model in models]
    whole, bad = drawn(4), drawn(1)[0]
    broken = [msgspec.structs.replace(bad, advantages=np.where(bad.mask, np.inf, 0).astype(np.float32))]
    outcome = step.run([whole, broken], step=0, seed=1)
    assert "not finite" in outcome.fault or "nan" in outcome.fault or "inf" in outcome.fault
    assert all(same(was, bits(model)) for was, model in zip(before, models, strict=True))


def test_values_that_are_infinite_are_refused_and_named():
    policy, critic, step = parts(config.Critic())
    with torch.no_grad():
        critic.head.bias.fill_(math.inf)
    before = bits(policy)
    outcome = step.run([drawn(3)], step=0, seed=0)
    assert outcome.fault.startswith("a value is inf, so the critic has diverged")
    assert same(before, bits(policy))


@pytest.mark.parametrize("trunk", TRUNKS)
def test_a_step_of_nothing_is_no_update(trunk):
    _, _, step = parts(config.Critic(trunk=trunk))
    for empty in ([], [[]]):
        numbers = step.run(empty, step=5, seed=0).numbers
        assert (numbers.updates, numbers.critic_updates, numbers.values_version) == (0, 0, 5)


def test_a_critic_and_gae_come_together():
    with pytest.raises(ConfigError, match="gae"):
        parts(config.Critic(), loss=config.Loss())


@pytest.mark.parametrize("trunk", TRUNKS)
def test_it_learns_what_each_context_of_a_bandit_is_worth(trunk):
    """One action a context, whose mean reward is known: 0, 0.5 and 1 for prompts 3, 4 and 5."""
    worth, rng = {3: 0.0, 4: 0.5, 5: 1.0}, np.random.default_rng(0)
    section = config.Critic(trunk=trunk, warmup_steps=999, clip=0.0, learning_rate=3e-2 if trunk == "shared" else 1e-2)
    _, critic, step = parts(section, head=ValueHead(16))
    for at in range(60):
        pulls = [
            episode([context, rng.integers(6, 32)], reward=float(rng.random() < mean))
            for context, mean in worth.items()
            for _ in range(24)
        ]
        numbers = step.run([pulls], step=at, seed=0).numbers
    for context, mean in worth.items():
        (one,) = critic.look([episode([context, 7])], version=60)
        assert one.values[1] == pytest.approx(mean, abs=0.15)
    assert numbers.explained_variance > 0.4


@pytest.mark.parametrize("unit", ["token", "turn"])
def test_it_learns_a_small_decision_process_of_two_turns(unit):
    """Prompt 1; a turn samples 2 or 3; the environment says 4, after 2, or 5; the last turn earns 1 after 4, else 0.

    With a discount of 0.5, by turn or by token (a turn is one), the value of the last state is 1 or 0, and of the
    first half of the chance of 2, which is 0.75: 0.375.
    """
    rng = np.random.default_rng(1)
    section = config.Critic(warmup_steps=999, clip=0.0, learning_rate=1e-2, discount=0.5, trace=0.9, unit=unit)
    _, critic, step = parts(section, head=ValueHead(16))
    mask = [False, True, False, True]

    def play(good):
        return episode([1, 2 if good else 3, 4 if good else 5, 9], reward=float(good), mask=mask)

    for at in range(80):
        step.run([[play(rng.random() < 0.75) for _ in range(32)]], step=at, seed=0)
    good, bad = critic.look([play(True), play(False)], version=80)
    assert good.values[[1, 3]] == pytest.approx([0.375, 1.0], abs=0.1)
    assert bad.values[[1, 3]] == pytest.approx([0.375, 0.0], abs=0.1)
