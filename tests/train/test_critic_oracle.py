"""A whole update of PPO against its formula in float64: the model, the credit, both losses, by plain autograd.

The model is Qwen3's, written out for one sequence at a time. Shape letters: L tokens, D width, H query heads, G key and
value heads, d head dimension, E experts, K experts per token, N trained tokens of an episode, U its actions.
"""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from contraflow import config
from tests.train.conftest import DENSE, MIXTURE
from tests.train.test_critic import GAE, episode, parts

DISCOUNT, TRACE, BOUND, WEIGHT = 0.9, 0.8, 0.05, 0.3
HEADS, KV_HEADS, WIDTH, TOP = 2, 1, 8, 2


def normed(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x_LHd):
    """Rotary positions: the pair (i, i + d/2) by `position * 10000^(-2i/d)`."""
    rates = 10000.0 ** -(torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    angles = torch.arange(len(x_LHd), dtype=torch.float64)[:, None, None] * rates
    one, two = x_LHd.chunk(2, -1)
    return torch.cat([one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], -1)


def attention(x_LD, w):
    length, sizes = len(x_LD), (HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (x_LD @ w["attention.qkv"].T).view(length, sum(sizes), WIDTH).split(sizes, 1)
    q, k = turned(normed(q, w["attention.qk_norm"][0])), turned(normed(k, w["attention.qk_norm"][1]))
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores_HLL = torch.einsum("lhd,mhd->hlm", q, k) / WIDTH**0.5
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    seen_HLL = scores_HLL.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hlm,mhd->lhd", seen_HLL, v).flatten(1) @ w["attention.out"].T


def swiglu(x, gate_up, down):
    gate, up = (x @ gate_up.T).chunk(2, -1)
    return (F.silu(gate) * up) @ down.T


def mixed(x_LD, w):
    """The dense MLP, or the mixture: softmax over all experts, the best K renormalised."""
    if "mlp.router.weight" not in w:
        return swiglu(x_LD, w["mlp.gate_up"], w["mlp.down"])
    shares_LK, ids_LK = (x_LD @ w["mlp.router.weight"].T).softmax(-1).topk(TOP)
    shares_LE = torch.zeros(len(x_LD), 4, dtype=torch.float64).scatter(1, ids_LK, shares_LK)
    shares_LE = shares_LE / shares_LE.sum(-1, keepdim=True)
    each = [swiglu(x_LD, w["mlp.gate_up"][expert], w["mlp.down"][expert]) for expert in range(4)]
    return sum(shares_LE[:, expert, None] * of_LD for expert, of_LD in enumerate(each))


def hidden(weights, tokens):
    """`[L, D]` after the final norm."""
    x_LD = weights["embed"][torch.from_numpy(tokens.astype(np.int64))]
    for layer in range(2):
        prefix = f"layers.{layer}."
        w = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
        x_LD = x_LD + attention(normed(x_LD, w["attention_norm"]), w)
        x_LD = x_LD + mixed(normed(x_LD, w["mlp_norm"]), w)
    return normed(x_LD, weights["norm"])


def values(trunk, head, sample):
    """Of the state before each trained token, `[N]`, and of that after the last."""
    states_L = hidden(trunk, sample.tokens) @ head["weight"] + head["bias"]
    before_N = torch.from_numpy(np.flatnonzero(sample.mask)) - 1
    return states_L[before_N], states_L[-1]


def credit(values_N, last, sample, unit):
    """Advantages and returns, `[N]`: the sums of equation 16 of arXiv 1506.02438, term by term."""
    places = np.flatnonzero(sample.mask).tolist()
    apart = [place - 1 not in places for place in places] if unit == "turn" else [True] * len(places)
    action_N = np.cumsum(apart) - 1
    firsts = [n for n, begins in enumerate(apart) if begins]
    worth_U = [values_N[n] for n in firsts] + [last if sample.truncated else values_N.new_zeros(())]
    reward_U = [0.0] * (len(firsts) - 1) + [float(sample.advantages[places[-1]])]
    errors_U = [reward_U[u] + DISCOUNT * worth_U[u + 1] - worth_U[u] for u in range(len(firsts))]
    advantage_U = torch.stack(
        [sum((DISCOUNT * TRACE) ** (i - u) * errors_U[i] for i in range(u, len(firsts))) for u in range(len(firsts))]
    )
    return advantage_U[action_N], (advantage_U + torch.stack(worth_U[:-1]))[action_N]


def losses(policy, trunk, head, samples, before):
    """The clipped losses of policy and values over all trained tokens alike; `before`: old values and credit."""
    old_N, advantages_N, returns_N = before
    found = [values(trunk, head, sample)[0] for sample in samples]
    new_N = torch.cat(found)
    held_N = old_N + (new_N - old_N).clamp(-BOUND, BOUND)
    value = 0.5 * torch.maximum((new_N - returns_N) ** 2, (held_N - returns_N) ** 2).mean()
    logprobs = []
    for sample in samples:
        logits_LV = hidden(policy, sample.tokens) @ policy["lm_head"].T
        places = torch.from_numpy(np.flatnonzero(sample.mask))
        sampled_N = torch.from_numpy(sample.tokens.astype(np.int64))[places]
        logprobs.append(logits_LV.log_softmax(-1)[places - 1, sampled_N])
    behaviour_N = torch.cat([torch.from_numpy(sample.behaviour[sample.mask]).double() for sample in samples])
    ratio_N = (torch.cat(logprobs) - behaviour_N).exp()
    gain_N = torch.minimum(ratio_N * advantages_N, ratio_N.clamp(0.8, 1.2) * advantages_N)
    return -gain_N.mean(), value


def looked(trunk, head, samples, unit):
    """What a step knows before its first update: old values, whitened advantages, returns; `[N]` of all samples."""
    both = [values(trunk, head, sample) for sample in samples]
    credits = [credit(*one, sample, unit) for one, sample in zip(both, samples, strict=True)]
    advantages_N, returns_N = (torch.cat(column) for column in zip(*credits, strict=True))
    whitened_N = (advantages_N - advantages_N.mean()) / advantages_N.std(correction=0)
    return torch.cat([one[0] for one in both]).detach(), whitened_N.detach(), returns_N.detach()


def made(count=9):
    """Episodes of several turns, some cut off, sampled by a policy near the one that trains."""
    rng, found = np.random.default_rng(8), []
    for place in range(count):
        mask = np.append(rng.random(rng.integers(4, 12)) < 0.6, True)
        mask[0] = False
        tokens = rng.integers(0, 32, mask.size)
        found.append(episode(tokens, reward=rng.normal(), truncated=place % 3 == 0, mask=mask))
    return found


def wide(model):
    return {name: weight.detach().double().requires_grad_() for name, weight in model.named_parameters()}


def stepped(section, tree, groups, epochs):
    """Policy, head and trunk after a step of so many updates, each on all groups, with the last one's gradients."""
    train = config.Train(learning_rate=1e-3, warmup_updates=0, clip_norm=1e9, epochs=epochs, tokens_per_batch=24)
    policy, critic, step = parts(section, train=train, loss=GAE, tree=tree)
    start = [wide(model) for model in models(policy, critic)]
    numbers = step.run(groups, step=0, seed=0).numbers
    return start, models(policy, critic), numbers


def models(policy, critic):
    return policy, critic.head, policy if critic.trunk is None else critic.trunk.decoder


@pytest.mark.parametrize("unit", ["token", "turn"])
@pytest.mark.parametrize("trunk", ["own", "shared"])
@pytest.mark.parametrize("tree", [MIXTURE, DENSE], ids=["mixture", "dense"])
def test_the_second_update_of_a_step_is_that_of_the_formula(tree, trunk, unit):
    section = config.Critic(
        trunk=trunk,
        learning_rate=1e-2,
        discount=DISCOUNT,
        trace=TRACE,
        clip=BOUND,
        weight=WEIGHT,
        unit=unit,
        truncated="bootstrap",
    )
    samples = made()
    groups = [samples[place : place + 3] for place in range(0, len(samples), 3)]
    (_, head, below), (*between,), _ = stepped(section, tree, groups, 1)
    _, ends, numbers = stepped(section, tree, groups, 2)
    before = looked(below, head, samples, unit)
    policy, head, below = (wide(model) for model in between)
    if trunk == "shared":
        below = policy
    of_policy, of_values = losses(policy, below, head, samples, before)
    assert 0 < numbers.value_clipped < 0.5
    wanted = [
        gradients(of_policy + WEIGHT * of_values if trunk == "shared" else of_policy, policy),
        gradients(of_values, head),
        gradients(of_values, below) if trunk == "own" else {},
    ]
    for model, expected in zip(ends, wanted, strict=True):
        found = dict(model.named_parameters())
        for name, gradient in expected.items():
            assert difference(found[name].grad, gradient) <= 1e-5, name


def gradients(loss, weights):
    found = torch.autograd.grad(loss, list(weights.values()), retain_graph=True, materialize_grads=True)
    return dict(zip(weights, found, strict=True))


def difference(found, wanted):
    """Relative, of the whole tensor; of nothing, nothing."""
    if not wanted.any():
        return 0.0 if found is None else float(found.norm())
    return float((found.double() - wanted).norm() / wanted.norm())
