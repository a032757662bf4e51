"""The sigmoid router by its formula in float64: groups, bias and weights; its tape and its gradient."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.router import Given, RouterTape
from contraflow.model.sigmoid_router import SigmoidRouter


def config(experts: int, groups: int, top_groups: int, top_k: int, *, renormalise: bool) -> ModelConfig:
    return ModelConfig(
        family="glm4_moe", vocab=8, dim=16, layers=1, heads=1, kv_heads=1, head_dim=2, ffn=8, experts=experts,
        top_k=top_k, expert_ffn=8, groups=groups, top_groups=top_groups, shared_experts=1, routed_scale=2.5,
        renormalise=renormalise,
    )  # fmt: skip


def router_of(made: ModelConfig, seed: int) -> SigmoidRouter:
    router = SigmoidRouter(made, "cpu")
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        router.weight.normal_(0, 1, generator=noise)
        router.correction_bias.normal_(0, 0.3, generator=noise)
    return router


def by_formula(router: SigmoidRouter, made: ModelConfig, row: Tensor) -> dict[int, float]:
    """Weight of each chosen expert, in plain Python."""
    scores = [1 / (1 + 2.718281828459045 ** -float(w @ row)) for w in router.weight.detach().double()]
    sums = [score + float(bias) for score, bias in zip(scores, router.correction_bias, strict=True)]
    each = made.experts // made.groups
    groups = [range(g * each, (g + 1) * each) for g in range(made.groups)]
    best = sorted(groups, key=lambda g: -sum(sorted((sums[e] for e in g), reverse=True)[:2]))[: made.top_groups]
    chosen = sorted((e for g in best for e in g), key=lambda e: -sums[e])[: made.top_k]
    total = sum(scores[e] for e in chosen) if made.renormalise else 1.0
    return {e: made.routed_scale * scores[e] / total for e in chosen}


@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from([(8, 1, 1, 3), (8, 4, 2, 4), (12, 3, 1, 2), (6, 3, 3, 6), (300, 2, 1, 5)]),
    renormalise=st.booleans(),
    tokens=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_experts_and_weights_are_those_of_the_formula(
    shape: tuple[int, int, int, int], renormalise: bool, tokens: int, seed: int
) -> None:
    made = config(*shape, renormalise=renormalise)
    router = router_of(made, seed)
    x = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(seed))
    ids, weights = router(x, None)
    assert ids.shape == weights.shape == (tokens, made.top_k)
    assert weights.dtype == torch.float32
    for row, chosen, given_weights in zip(x.double(), ids.tolist(), weights.tolist(), strict=True):
        wanted = by_formula(router, made, row)
        assert set(chosen) == set(wanted)
        assert given_weights == pytest.approx([wanted[e] for e in chosen], rel=1e-4)


def test_the_bias_chooses_and_weighs_nothing() -> None:
    router = router_of(config(8, 1, 1, 3, renormalise=True), seed=0)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        router.correction_bias.fill_(0).add_(torch.tensor([0, 0, 0, 0, 0, 9.0, 8.0, 7.0]))
        ids, weights = router(x, None)
        scores = (x @ router.weight.T).sigmoid()[:, 5:]
    assert ids.tolist() == [[5, 6, 7]] * 5
    torch.testing.assert_close(weights, 2.5 * scores / scores.sum(-1, keepdim=True))


def test_its_balance_loss_is_of_scores_divided_by_their_sum() -> None:
    router = router_of(config(8, 4, 2, 3, renormalise=True), seed=1)
    x = torch.randn(11, 16, generator=torch.Generator().manual_seed(2))
    tape = RouterTape()
    ids, _ = router(x, tape)
    scores = (x.double() @ router.weight.double().T).sigmoid()
    chances = (scores / scores.sum(-1, keepdim=True)).mean(0)
    share = torch.bincount(ids.flatten(), minlength=8).double() / 11
    wanted = 8 * (share * chances).sum()
    torch.testing.assert_close(tape.balance_loss().double(), wanted, rtol=1e-5, atol=0)
    grad = torch.autograd.grad(tape.balance_loss(), router.weight)[0]
    torch.testing.assert_close(grad, torch.autograd.grad(wanted, router.weight)[0].float(), rtol=1e-3, atol=1e-6)
    assert tape.loads().tolist() == [torch.bincount(ids.flatten(), minlength=8).tolist()]
    assert torch.equal(tape.routes()[:, 0].long(), ids)


def test_choices_that_are_given_are_taken_with_the_scores_the_router_gives_them() -> None:
    routes = torch.tensor([[[3, 0, 1]]] * 4, dtype=torch.uint8)  # of three groups, where it may choose from two
    router = router_of(config(8, 4, 2, 3, renormalise=True), seed=1)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float32)
    ids, weights = router(x, RouterTape(Given(routes, torch.ones(4, dtype=torch.bool))))
    assert ids.tolist() == [[3, 0, 1]] * 4
    scores = (x.double() @ router.weight.double().T).sigmoid()[:, [3, 0, 1]]
    wanted = 2.5 * scores / scores.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-5, atol=0)
    grad = torch.autograd.grad(weights[:, 0].sum(), router.weight)[0]
    torch.testing.assert_close(grad, torch.autograd.grad(wanted[:, 0].sum(), router.weight)[0], rtol=1e-4, atol=1e-6)
    assert grad.abs().max() > 1e-2


def test_a_new_bias_is_zero_and_no_optimizer_sees_it(make_config: Callable[..., ModelConfig]) -> None:
    weights = dict(new_decoder(make_config("deepseek_v3"), seed=0).named_parameters())
    bias = weights["layers.1.mlp.router.correction_bias"]
    assert not bias.any()
    assert not bias.requires_grad
    assert bias.dtype == torch.float32


def test_recorded_loads_of_a_whole_model_are_of_its_mixtures_only(make_decoder: Callable[..., Decoder]) -> None:
    decoder, tape = make_decoder("deepseek_v3"), RouterTape()
    decoder(torch.arange(7), torch.arange(7), PackedPlan.of([0, 7]), tape=tape)
    assert tape.loads().shape == (2, 6)
    assert tape.loads().sum(1).tolist() == [14, 14]
