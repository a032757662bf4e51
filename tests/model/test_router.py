"""Routing against its formula, and the tape against transformers and a dense loop in float64."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from contraflow.errors import ModelError
from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import Decoder
from contraflow.model.families import ModelConfig
from contraflow.model.moe import MoE
from contraflow.model.router import Given, Router, RouterTape

TOKENS, POSITIONS = torch.arange(23) * 7 % 40, torch.arange(23)
PLAN = PackedPlan.of([0, 23])


def taped(decoder: Decoder) -> tuple[RouterTape, list[Tensor]]:
    """A forward with a tape, and the router logits of each layer got by a hook, apart from the tape."""
    seen: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda m, x, _: seen.append(x[0].float() @ m.weight.T))
        for module in decoder.modules()
        if isinstance(module, Router)
    ]
    tape = RouterTape()
    decoder(TOKENS, POSITIONS, PLAN, tape=tape)
    for hook in hooks:
        hook.remove()
    return tape, seen


@pytest.mark.parametrize("renormalise", [True, False])
def test_weights_are_the_top_of_a_softmax_over_all_experts(
    renormalise: bool, make_config: Callable[..., ModelConfig]
) -> None:
    router = Router(make_config("qwen3_moe", renormalise=renormalise, top_k=3), "cpu")
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    x = torch.randn(50, 32, generator=torch.Generator().manual_seed(1))
    ids, weights = router(x, None)
    chances = (x.double() @ router.weight.double().T).softmax(-1)
    top, wanted_ids = chances.topk(3)
    assert torch.equal(ids, wanted_ids)
    wanted = top / top.sum(-1, keepdim=True) if renormalise else top
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-5, atol=1e-6)


def test_gradients_of_a_mixture_equal_a_dense_loop_in_float64(make_decoder: Callable[..., Decoder]) -> None:
    for renormalise in (True, False):
        decoder = make_decoder("qwen3_moe", renormalise=renormalise)
        moe = decoder.layers[0].mlp
        assert isinstance(moe, MoE)
        x = torch.randn(29, 32, generator=torch.Generator().manual_seed(3), requires_grad=True)
        leaves = [x, moe.router.weight, moe.gate_up, moe.down]
        pull = torch.randn(29, 32, generator=torch.Generator().manual_seed(4))
        got = moe(x, None)
        doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
        wanted = dense_mixture(*doubles, renormalise=renormalise)
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
        grads, wanted_grads = torch.autograd.grad(got, leaves, pull), torch.autograd.grad(wanted, doubles, pull)
        assert grads[1].abs().amax() > 1e-2
        for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
            torch.testing.assert_close(grad.double(), wanted_grad, rtol=1e-4, atol=1e-5)


def dense_mixture(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    renormalise: bool,
    routes: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    out = []
    for place, row in enumerate(x):
        chances = (router @ row).softmax(0)
        best = chances.argsort(descending=True)[:2].tolist() if routes is None else routes[place]
        total = sum(chances[e] for e in best) if renormalise else 1.0
        answers = []
        for e in best:
            gate, up = (gate_up[e] @ row).chunk(2)
            answers.append(chances[e] / total * (down[e] @ (gate * gate.sigmoid() * up)))
        out.append(sum(answers))
    return torch.stack(out)


def test_an_expert_nobody_chose_gets_a_gradient_of_exactly_zero(make_decoder: Callable[..., Decoder]) -> None:
    moe = make_decoder("qwen3_moe").layers[0].mlp
    assert isinstance(moe, MoE)
    x = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    ids, _ = moe.router(x, None)
    moe(x, None).square().sum().backward()
    idle = [e for e in range(6) if e not in ids.tolist()[0]]
    assert moe.gate_up.grad is not None
    assert not moe.gate_up.grad[idle].any()
    assert moe.gate_up.grad[ids[0]].abs().amax() > 0


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
def test_the_balance_loss_is_that_of_transformers(family: str, make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder(family)
    tape, logits = taped(decoder)
    wanted = load_balancing_loss_func(tuple(logits), 6, 2)
    torch.testing.assert_close(tape.balance_loss(), wanted)
    routers = [m.weight for m in decoder.modules() if isinstance(m, Router)]
    got_grads = torch.autograd.grad(tape.balance_loss(), routers, retain_graph=True)
    torch.testing.assert_close(got_grads, torch.autograd.grad(wanted, routers))
    assert all(grad.abs().amax() > 0 for grad in got_grads)


def test_a_perfectly_balanced_router_has_a_balance_loss_of_k() -> None:
    tape = RouterTape()
    tape.record(torch.tensor([[0, 1], [2, 3]]), torch.zeros(2, 4))
    assert tape.balance_loss().item() == pytest.approx(2.0)


def test_micro_batches_given_the_union_s_loads_add_up_to_the_union() -> None:
    noise = torch.Generator().manual_seed(0)
    logits = [torch.randn(9, 4, generator=noise) for _ in range(2)]

    def tape_of(rows: slice) -> RouterTape:
        tape = RouterTape()
        for layer in logits:
            tape.record(layer[rows].topk(2).indices, layer[rows])
        return tape

    whole = tape_of(slice(None))
    pieces = [tape_of(slice(0, 2)), tape_of(slice(2, 9))]
    summed = sum(piece.balance_loss(loads_ME=whole.loads(), tokens=9) for piece in pieces)
    torch.testing.assert_close(summed, whole.balance_loss())


def test_routes_and_loads_tell_who_went_where(make_decoder: Callable[..., Decoder]) -> None:
    tape, logits = taped(make_decoder("qwen3_moe"))
    routes = tape.routes()
    assert routes.shape == (23, 2, 2)
    assert routes.dtype == torch.uint8
    for layer, rows in enumerate(logits):
        assert torch.equal(routes[:, layer].long(), rows.topk(2).indices)
    counts = [[int((routes[:, m] == e).sum()) for e in range(6)] for m in range(2)]
    assert tape.loads().tolist() == counts


def test_routes_of_more_than_256_experts_take_two_bytes() -> None:
    tape = RouterTape()
    tape.record(torch.tensor([[299]]), torch.zeros(1, 300))
    assert tape.routes().dtype == torch.uint16
    assert tape.routes().tolist() == [[[299]]]


def test_a_tape_changes_nothing(make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder("olmoe")
    with torch.no_grad():
        plain = decoder(TOKENS, POSITIONS, PLAN)
        assert torch.equal(decoder(TOKENS, POSITIONS, PLAN, tape=RouterTape()), plain)


def test_a_tape_holds_one_forward(make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder("olmoe")
    tape, _ = taped(decoder)
    with pytest.raises(ModelError, match="already holds"):
        decoder(TOKENS, POSITIONS, PLAN, tape=tape)


def test_an_empty_tape_has_nothing_to_tell(make_decoder: Callable[..., Decoder]) -> None:
    tape = RouterTape()
    make_decoder("llama")(TOKENS, POSITIONS, PLAN, tape=tape)
    questions: Sequence[Callable[[], Any]] = (tape.routes, tape.loads, tape.balance_loss)
    for ask in questions:
        with pytest.raises(ModelError, match="empty"):
            ask()


MIXTURES = ["qwen3_moe", "olmoe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss"]


def random_routes(decoder: Decoder, tokens: int, *, seed: int = 0) -> Tensor:
    """Any K different experts for every token and layer, uint8 `[T, M, K]`."""
    config, noise = decoder.config, torch.Generator().manual_seed(seed)
    chance = torch.rand(tokens, len(config.moe_layers), config.experts, generator=noise)
    return chance.argsort(-1)[..., : config.top_k].to(torch.uint8)


def run(decoder: Decoder, given: Given | None) -> tuple[Tensor, RouterTape]:
    tape = RouterTape(given)
    return decoder(TOKENS, POSITIONS, PLAN, tape=tape), tape


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_that_the_router_chose_itself_change_nothing_when_they_are_given(
    family: str, make_decoder: Callable[..., Decoder]
) -> None:
    decoder = make_decoder(family)
    hidden, tape = run(decoder, None)
    again, replay = run(decoder, Given(tape.routes(), torch.ones(23, dtype=torch.bool)))
    assert torch.equal(hidden, again)
    assert replay.differing().tolist() == [[23, 0, 0]] * len(decoder.config.moe_layers)
    assert not tape.differing().any()


@pytest.mark.parametrize("family", MIXTURES)
def test_given_experts_are_taken_by_the_tokens_that_have_them_and_by_no_other(
    family: str, make_decoder: Callable[..., Decoder]
) -> None:
    decoder = make_decoder(family)
    routes, known = random_routes(decoder, 23), torch.arange(23) % 3 != 0
    hidden, tape = run(decoder, Given(routes, known))
    assert torch.equal(tape.routes()[known], routes[known])
    # The first token is nobody's future, so the router's choice for it is that of a pass without replay.
    assert torch.equal(tape.routes()[0], run(decoder, None)[1].routes()[0])
    assert not torch.equal(hidden, run(decoder, None)[0])


def test_tokens_that_would_have_gone_elsewhere_are_counted_by_set_and_by_first_choice(
    make_config: Callable[..., ModelConfig],
) -> None:
    router = Router(make_config("qwen3_moe", dim=8), "cpu")
    with torch.no_grad():
        router.weight.copy_(torch.eye(6, 8))
    x = torch.tensor([[6.0, 5, 4, 3, 2, 1, 0, 0]] * 5)  # everybody's choice is 0, then 1
    given = torch.tensor([[[0, 1]], [[1, 0]], [[0, 5]], [[5, 0]], [[2, 3]]], dtype=torch.uint8)
    tape = RouterTape(Given(given, torch.tensor([True, True, True, True, False])))
    ids, weights = router(x, tape)
    assert tape.differing().tolist() == [[4, 2, 2]]
    assert ids.tolist() == [[0, 1], [1, 0], [0, 5], [5, 0], [0, 1]]
    torch.testing.assert_close(weights[2], torch.tensor([6.0, 1.0]).softmax(0))
    assert tape.loads().tolist() == [[5, 3, 0, 0, 0, 2]]


def test_gradients_reach_the_router_through_given_experts_as_in_float64(make_decoder: Callable[..., Decoder]) -> None:
    for renormalise in (True, False):
        decoder = make_decoder("qwen3_moe", renormalise=renormalise)
        moe = decoder.layers[0].mlp
        assert isinstance(moe, MoE)
        x = torch.randn(29, 32, generator=torch.Generator().manual_seed(3), requires_grad=True)
        routes = random_routes(decoder, 29, seed=5)[:, :1]
        leaves = [x, moe.router.weight, moe.gate_up, moe.down]
        pull = torch.randn(29, 32, generator=torch.Generator().manual_seed(4))
        got = moe(x, RouterTape(Given(routes, torch.ones(29, dtype=torch.bool))))
        doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
        wanted = dense_mixture(*doubles, renormalise=renormalise, routes=routes[:, 0].tolist())
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
        grads, wanted_grads = torch.autograd.grad(got, leaves, pull), torch.autograd.grad(wanted, doubles, pull)
        assert grads[1].abs().amax() > 1e-2
        for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
            torch.testing.assert_close(grad.double(), wanted_grad, rtol=1e-4, atol=1e-5)


def test_the_balance_loss_of_given_experts_is_of_their_loads_and_the_routers_own_probabilities(
    make_decoder: Callable[..., Decoder],
) -> None:
    decoder = make_decoder("olmoe", layers=1)
    routes = random_routes(decoder, 23)
    seen: list[Tensor] = []
    decoder.layers[0].mlp.router.register_forward_hook(lambda m, x, _: seen.append(x[0].double() @ m.weight.double().T))
    _, tape = run(decoder, Given(routes, torch.ones(23, dtype=torch.bool)))
    share = torch.bincount(routes.flatten().long(), minlength=6) / 23
    wanted = 6 * (share * seen[0].softmax(-1).mean(0)).sum()
    torch.testing.assert_close(tape.balance_loss().double(), wanted, rtol=1e-5, atol=0)


def test_more_than_256_experts_are_given_by_the_bits_of_uint16(make_config: Callable[..., ModelConfig]) -> None:
    router = Router(make_config("qwen3_moe", experts=40000), "cpu")
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    routes = torch.tensor([[[39999, 3]], [[300, 32768]]]).to(torch.uint16)
    given = Given(routes.view(torch.int16), torch.ones(2, dtype=torch.bool))
    tape = RouterTape(given)
    ids, _ = router(torch.randn(2, 32, generator=torch.Generator().manual_seed(1)), tape)
    assert ids.tolist() == [[39999, 3], [300, 32768]]
    assert tape.routes().tolist() == routes.tolist()


def test_part_of_the_layers_is_given_its_own_rows(make_decoder: Callable[..., Decoder]) -> None:
    given = Given(random_routes(make_decoder("qwen3_moe"), 7), torch.arange(7) > 2)
    part = given.rows(1, 2)
    assert torch.equal(part.layer(0), given.layer(1))
    assert part.ids_TMK.shape == (7, 1, 2)
    assert torch.equal(part.known_T, given.known_T)
