import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from contraflow import config
from contraflow.errors import ConfigError
from contraflow.model.attention import PackedPlan
from contraflow.model.folder import save_folder
from contraflow.telemetry import Account
from contraflow.train.optimizer import Optimizer
from contraflow.train.step import Beside, Numbers, TrainStep
from contraflow.types import Sample

ZERO_RATE = {"learning_rate": 1e-30, "warmup_updates": 0, "clip_norm": 1e9}


def group(seed, count=4, *, rewards=None, drift=0.3, vocab=32):
    """Samples of one group with made-up credit, and behaviour logprobs around what a random model gives."""
    rng = np.random.default_rng(seed)
    made = []
    for place in range(count):
        length = int(rng.integers(4, 12))
        mask = np.arange(length) >= 3
        mask[-1] = True
        credit = rng.normal() if rewards is None else rewards[place]
        made.append(
            Sample(
                tokens=rng.integers(0, vocab, length, dtype=np.int32),
                mask=mask,
                behaviour=np.where(mask, -math.log(vocab) + drift * rng.normal(size=length), 0).astype(np.float32),
                advantages=np.where(mask, credit, 0).astype(np.float32),
                versions=np.where(mask, np.int32(0), np.int32(-1)),
            )
        )
    return made


def trainer(decoder, *, reference=None, temperature=1.0, train=None, **loss):
    train = config.Train(**(ZERO_RATE if train is None else train))
    optimizer = Optimizer(decoder, train)
    step = TrainStep(
        decoder,
        optimizer,
        Account(lambda: 0.0),
        train=train,
        loss=config.Loss(**loss),
        temperature=temperature,
        beside=Beside(reference),
    )
    return step, optimizer


def bits(decoder):
    return [p.detach().clone() for p in decoder.parameters()]


def equal(one, two):
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def own_logprobs(decoder, sample, temperature=1.0):
    tokens_L = torch.from_numpy(sample.tokens.astype(np.int64))
    hidden_LD = decoder(tokens_L, torch.arange(len(tokens_L)), PackedPlan([0, len(tokens_L)]))
    log_LV = torch.log_softmax(decoder.logits(hidden_LD) / temperature, -1)
    at = np.flatnonzero(sample.mask)
    return log_LV[at - 1, tokens_L[at]]


# --- the oracle: transformers in float64, one sequence at a time, every token a line of plain arithmetic -------------


def oracle(model, reference, samples, section, temperature):
    """GRPO written out: the loss of all samples, as a float64 scalar with a graph."""
    total = torch.zeros((), dtype=torch.float64)
    trained = sum(int(s.mask.sum()) for s in samples)
    for sample in samples:
        ids = torch.from_numpy(sample.tokens.astype(np.int64))[None]
        log_LV = torch.log_softmax(model(ids).logits[0].double() / temperature, -1)
        with torch.no_grad():
            reference_LV = torch.log_softmax(reference(ids).logits[0].double() / temperature, -1)
        for at in np.flatnonzero(sample.mask).tolist():
            token = int(sample.tokens[at])
            new, old, base = log_LV[at - 1, token], float(sample.behaviour[at]), reference_LV[at - 1, token]
            ratio, credit = torch.exp(new - old), float(sample.advantages[at])
            held = torch.clamp(ratio, 1 - section.clip_low, 1 + section.clip_high)
            kl = torch.exp(base - new) - (base - new) - 1
            share = 1 / trained if section.reduction == "token" else 1 / (len(samples) * int(sample.mask.sum()))
            total = total + share * (section.kl_weight * kl - torch.minimum(ratio * credit, held * credit))
    return total


def load_hf(folder: Path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    if hasattr(model.config, "num_experts"):
        model.set_experts_implementation("eager")
    return model


def hf_gradients(model, folder: Path) -> dict[str, torch.Tensor]:
    """Gradients under the names of a model folder: write them out as if they were weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.grad
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def our_gradients(decoder, folder: Path) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.data = parameter.grad
    save_folder(decoder, folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_the_gradient_of_a_step_equals_a_plain_float64_loop_over_transformers(any_decoder, tmp_path, reduction):
    import copy

    reference = copy.deepcopy(any_decoder)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    save_folder(any_decoder, tmp_path / "policy")
    save_folder(reference, tmp_path / "reference")
    groups = [group(1), group(2, count=3), group(3, count=5)]
    section = {"reduction": reduction, "kl_weight": 0.4, "clip_low": 0.15, "clip_high": 0.3}

    step, _ = trainer(
        any_decoder,
        reference=reference,
        temperature=0.8,
        train=ZERO_RATE | {"tokens_per_batch": 30},  # several micro-batches
        **section,
    )
    outcome = step.run(groups, step=0, seed=0)
    hf = load_hf(tmp_path / "policy")
    everyone = [s for g in groups for s in g]
    loss = oracle(hf, load_hf(tmp_path / "reference"), everyone, config.Loss(**section), 0.8)
    loss.backward()

    assert outcome.numbers.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert 0 < outcome.numbers.clipped_high < 1
    expected = hf_gradients(hf, tmp_path / "expected")
    found = our_gradients(any_decoder, tmp_path / "found")
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        scale = float(grad.norm()) + 1e-12
        assert float((found[name].double() - grad).norm()) / scale < 2e-5, name


# --- what a step does ------------------------------------------------------------------------------------------------


def test_rewarded_episodes_become_likelier_and_punished_ones_rarer(any_decoder):
    groups = [group(seed, count=2, rewards=[1.0, -1.0]) for seed in range(4)]
    with torch.no_grad():
        before = [[own_logprobs(any_decoder, s) for s in g] for g in groups]
    for g, old in zip(groups, before, strict=True):
        for i, s in enumerate(g):
            s.behaviour[s.mask] = old[i].numpy()
    step, _ = trainer(any_decoder, train={"learning_rate": 1e-3, "warmup_updates": 0})
    outcome = step.run(groups, step=0, seed=0)
    assert outcome.numbers.ratio_mean == pytest.approx(1, abs=1e-5)  # on policy, before the update
    assert outcome.numbers.behaviour_kl == pytest.approx(0, abs=1e-8)
    with torch.no_grad():
        gain = [
            [float((own_logprobs(any_decoder, s) - o).sum()) for s, o in zip(g, old, strict=True)]
            for g, old in zip(groups, before, strict=True)
        ]
    assert all(good > 0 > bad for good, bad in gain)


def test_the_same_seed_gives_the_same_bytes_and_another_order_does_not(mixture):
    import copy

    train = {"learning_rate": 1e-2, "epochs": 2, "updates": 3}
    finals = []
    for seed in (5, 5, 6):
        decoder = copy.deepcopy(mixture)
        step, _ = trainer(decoder, train=train, balance_weight=0.1)
        step.run([group(n) for n in range(7)], step=3, seed=seed)
        finals.append(bits(decoder))
    assert equal(finals[0], finals[1])
    assert not equal(finals[0], finals[2])


def test_epochs_times_updates_are_applied_with_the_behaviour_fixed(mixture):
    step, optimizer = trainer(mixture, train={"epochs": 2, "updates": 3})
    numbers = step.run([group(n) for n in range(7)], step=0, seed=0).numbers
    assert numbers.updates == optimizer.updates == 6
    assert numbers.learning_rate == pytest.approx(1e-3)
    few, optimizer = trainer(mixture, train={"updates": 3})
    assert few.run([group(0), group(1)], step=0, seed=0).numbers.updates == 2  # never an empty update


def test_no_credit_and_no_groups_leave_every_bit_alone(mixture):
    before = bits(mixture)
    step, optimizer = trainer(mixture, train={"weight_decay": 0.1})
    step.run([group(0)], step=0, seed=0)  # momentum, so that a stray update would show
    moved = bits(mixture)
    assert not equal(before, moved)
    for nothing in ([], [[]], [group(1, rewards=[0.0] * 4)]):
        outcome = step.run(nothing, step=1, seed=0)
        assert (outcome.fault, outcome.numbers) == ("", Numbers())
    assert equal(moved, bits(mixture))
    assert optimizer.updates == 1


def test_the_kl_term_pulls_to_the_reference_even_without_credit(mixture):
    import copy

    reference = copy.deepcopy(mixture)
    with torch.no_grad():
        reference.lm_head.add_(0.3 * torch.randn(reference.lm_head.shape, generator=torch.Generator().manual_seed(0)))
    step, _ = trainer(
        mixture,
        reference=reference,
        kl_weight=1.0,
        train={"learning_rate": 1e-2, "warmup_updates": 0, "clip_norm": 9.0},
    )
    still = [group(1, rewards=[0.0] * 4)]
    kls = [step.run(still, step=n, seed=0).numbers.kl for n in range(12)]
    assert kls[-1] < 0.5 * kls[0]


def test_a_kl_weight_without_a_reference_is_refused(mixture):
    with pytest.raises(ConfigError, match="kl_weight"):
        trainer(mixture, kl_weight=0.1)


@pytest.mark.parametrize("field", ["advantages", "behaviour"])
@pytest.mark.parametrize(("updates", "value"), [(1, math.nan), (3, math.nan), (1, math.inf), (3, -math.inf)])
def test_a_batch_that_is_not_finite_undoes_the_whole_step_and_is_handed_back(mixture, field, updates, value):
    step, optimizer = trainer(mixture, train={"learning_rate": 1e-2, "updates": updates, "epochs": 2})
    step.run([group(0), group(1), group(2)], step=0, seed=0)
    before, moments, count = bits(mixture), optimizer.snapshot().moments, optimizer.updates
    groups = [group(n) for n in range(3, 9)]
    getattr(groups[4][1], field)[-1] = value  # an infinite behaviour would be clipped to a loss that looks sound
    outcome = step.run(groups, step=1, seed=0)
    assert f"is {value}" in outcome.fault
    assert ("advantage" if field == "advantages" else "behaviour") in outcome.fault
    assert outcome.numbers == Numbers()
    assert not all(np.isfinite(getattr(batch, field)).all() for batch in outcome.bad)
    assert equal(before, bits(mixture))
    assert optimizer.updates == count
    assert all(torch.equal(v, moments[k]) for k, v in optimizer.moments().items())
    assert step.run([group(1)], step=2, seed=0).fault == ""


def test_a_gradient_that_overflows_undoes_the_step(mixture):
    before = bits(mixture)
    huge = [group(0, rewards=[3e38, -3e38, 3e38, -3e38])]
    step, _ = trainer(mixture, train={"epochs": 2})
    outcome = step.run(huge, step=0, seed=0)
    assert outcome.fault
    assert equal(before, bits(mixture))


def test_statistics_cover_every_trained_token_of_every_update(mixture):
    groups = [group(n) for n in range(4)]
    step, _ = trainer(mixture, train=ZERO_RATE | {"updates": 2})
    numbers = step.run(groups, step=0, seed=0).numbers
    with torch.no_grad():
        new = torch.cat([own_logprobs(mixture, s) for g in groups for s in g])
    old = torch.from_numpy(np.concatenate([s.behaviour[s.mask] for g in groups for s in g]))
    ratio = (new - old).exp()
    assert numbers.ratio_mean == pytest.approx(float(ratio.mean()), rel=1e-4)
    assert (numbers.ratio_low, numbers.ratio_high) == pytest.approx((float(ratio.min()), float(ratio.max())), rel=1e-4)
    fed = sum(s.tokens.size - 1 for g in groups for s in g)
    assert [sum(row) for row in numbers.expert_loads] == [2 * fed, 2 * fed]


# --- other objectives ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("surrogate", ["ppo", "ppo_dual_clip", "gspo", "cispo", "reinforce"])
def test_every_surrogate_makes_rewarded_episodes_likelier(mixture, surrogate):
    groups = [group(seed, count=2, rewards=[1.0, -1.0], drift=0.05) for seed in range(4)]
    with torch.no_grad():
        before = [[own_logprobs(mixture, s) for s in g] for g in groups]
    step, _ = trainer(mixture, surrogate=surrogate, train={"learning_rate": 1e-3, "warmup_updates": 0})
    assert step.run(groups, step=0, seed=0).fault == ""
    with torch.no_grad():
        gains = [
            [float((own_logprobs(mixture, s) - o).sum()) for s, o in zip(g, old, strict=True)]
            for g, old in zip(groups, before, strict=True)
        ]
    assert sum(good - bad for good, bad in gains) > 0


def test_of_one_update_the_proximal_policy_is_the_policy_itself_whatever_sampled(mixture):
    step, _ = trainer(mixture, old="proximal", corrections={"tis": (0.0, 1.1)})
    numbers = step.run([group(1), group(2)], step=0, seed=0).numbers
    assert (numbers.clipped_low, numbers.clipped_high) == (0.0, 0.0)
    assert 0 < numbers.corrected["tis"] < 1
    assert 0 < numbers.effective < 1


def test_over_several_updates_the_proximal_policy_is_that_of_the_steps_start(mixture):
    from contraflow.train.look import look

    groups = [group(n) for n in range(4)]
    with torch.no_grad():
        start = [own_logprobs(mixture, s) for g in groups for s in g]
    step, _ = trainer(mixture, old="proximal", train={"learning_rate": 1e-2, "updates": 4, "warmup_updates": 0})
    flat = [s for g in groups for s in g]
    found = look(flat, step._frozen, step._crew, device=torch.device("cpu"), tokens_per_batch=20)
    for one, sample, logprobs in zip(found, flat, start, strict=True):
        assert one.proximal is not None
        assert one.proximal[one.mask] == pytest.approx(logprobs.numpy(), abs=1e-5)
        assert not one.proximal[~one.mask].any()
        assert one.tokens.tolist() == sample.tokens.tolist()
    numbers = step.run(groups, step=0, seed=0).numbers
    assert numbers.clipped_low + numbers.clipped_high > 0  # later updates have moved away from it


def test_a_token_masked_by_a_correction_has_no_say(mixture):
    import copy

    groups, twin = [group(1)], copy.deepcopy(mixture)
    for sample in groups[0]:
        sample.behaviour[sample.mask] -= np.float32(9.0)  # far outside any band
    step, _ = trainer(mixture, corrections={"icepop": (0.5, 5.0)}, train={"learning_rate": 1e-2})
    numbers = step.run(groups, step=0, seed=0).numbers
    assert numbers.corrected == {"icepop": 1.0}
    assert numbers.grad_norm == 0.0
    assert equal(bits(mixture), bits(twin))


def test_the_entropy_bonus_raises_entropy_even_without_credit(mixture):
    step, _ = trainer(mixture, entropy_weight=1.0, train={"learning_rate": 1e-2, "warmup_updates": 0, "clip_norm": 9.0})
    entropies = [step.run([group(1, rewards=[0.0] * 4)], step=n, seed=0).numbers.entropy for n in range(10)]
    assert entropies[-1] > entropies[0] + 0.01
