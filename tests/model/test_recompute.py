"""Computing a layer's activations again changes nothing, and sends every token where the first pass sent it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from contraflow.dispatch.base import Rows
from contraflow.dispatch.local import LocalDispatch, Places
from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import Decoder
from contraflow.model.router import Given, Router, RouterTape, Tape

MakeDecoder = Callable[..., Decoder]


class Counting(LocalDispatch):
    """Remembers how many rows each expert was given, call by call."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.calls: list[list[int]] = []

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Rows[Places]:
        rows = super().dispatch(x_TD, expert_ids_TK, weights_TK)
        self.calls.append(rows.counts_E.tolist())
        return rows


class Noisy(Router):
    """Adds noise from torch's global generator to what it looks at: another choice every time."""

    def forward(self, x_TD: Tensor, tape: Tape | None) -> tuple[Tensor, Tensor]:
        return super().forward(x_TD + torch.randn_like(x_TD), tape)


def backward(decoder: Decoder, tape: RouterTape | None = None) -> tuple[Tensor, list[Tensor]]:
    """Loss, balance loss included where there is a tape, and all gradients, of three sequences."""
    tokens = torch.arange(23) % 40
    positions = torch.cat([torch.arange(n) for n in (12, 10, 1)])
    hidden = decoder(tokens, positions, PackedPlan([0, 12, 22, 23]), tape=tape)
    loss = decoder.logits(hidden).logsumexp(-1).square().mean()
    if tape is not None:
        loss = loss + 0.3 * tape.balance_loss()
    return loss.detach(), list(torch.autograd.grad(loss, [p for p in decoder.parameters() if p.requires_grad]))


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "llama", "deepseek_v3", "gpt_oss"])
def test_loss_and_gradients_are_the_same_bit_for_bit(make_decoder: MakeDecoder, family: str) -> None:
    decoder = make_decoder(family)
    taped = bool(decoder.config.moe_layers)
    loss, grads = backward(decoder, RouterTape() if taped else None)
    decoder.recompute = True
    again, grads_again = backward(decoder, RouterTape() if taped else None)
    assert torch.equal(loss, again)
    assert all(torch.equal(a, b) for a, b in zip(grads, grads_again, strict=True))


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss"])
def test_given_experts_are_taken_in_both_passes(make_decoder: MakeDecoder, family: str) -> None:
    decoder = make_decoder(family)
    config, noise = decoder.config, torch.Generator().manual_seed(0)
    chance = torch.rand(23, len(config.moe_layers), config.experts, generator=noise)
    routes = chance.argsort(-1)[..., : config.top_k].to(torch.uint8)
    given = Given(routes, torch.arange(23) % 4 != 0)
    loss, grads = backward(decoder, tape := RouterTape(given))
    decoder.recompute = True
    again, grads_again = backward(decoder, tape_again := RouterTape(given))
    assert torch.equal(loss, again)
    assert all(torch.equal(a, b) for a, b in zip(grads, grads_again, strict=True))
    assert torch.equal(tape.differing(), tape_again.differing())
    assert tape.differing()[:, 1].min() > 0
    assert not torch.equal(loss, backward(decoder, RouterTape())[0])


def noisy(make_decoder: MakeDecoder) -> tuple[Decoder, Counting]:
    decoder = make_decoder("olmoe")
    dispatch = Counting(decoder.config.experts)
    decoder.use_dispatch(dispatch)
    for layer in decoder.layers:
        router = Noisy(decoder.config, "cpu")
        router.load_state_dict(layer.mlp.router.state_dict())
        layer.mlp.router = router
    return decoder, dispatch


def test_a_noisy_router_sends_the_second_pass_where_it_sent_the_first(make_decoder: MakeDecoder) -> None:
    decoder, dispatch = noisy(make_decoder)
    decoder.recompute = True
    tape = RouterTape()
    backward(decoder, tape)
    first, second = dispatch.calls[:2], dispatch.calls[2:]
    assert first == second[::-1]
    assert tape.loads().tolist() == first
    backward(decoder)  # no tape: nothing to record, the same to repeat
    assert dispatch.calls[4:6] == dispatch.calls[6:][::-1]


def test_without_the_replay_a_noisy_router_would_choose_otherwise(make_decoder: MakeDecoder) -> None:
    """What the test above would miss if the noise were too weak."""
    decoder, dispatch = noisy(make_decoder)
    plain: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}
    mlp, x = decoder.layers[0].mlp, torch.randn(64, decoder.config.dim, requires_grad=True)
    checkpoint(mlp, x, None, **plain).square().sum().backward()
    assert dispatch.calls[0] != dispatch.calls[1]


def test_nothing_is_kept_for_a_pass_without_gradients(make_decoder: MakeDecoder) -> None:
    decoder, dispatch = noisy(make_decoder)
    decoder.recompute = True
    with torch.no_grad():
        decoder(torch.arange(5), torch.arange(5), PackedPlan([0, 5]))
    assert len(dispatch.calls) == 2


def kept_bytes(decoder: Decoder) -> int:
    """What a forward pass keeps for its backward pass, weights left out."""
    weights = {weight.untyped_storage().data_ptr() for weight in decoder.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = decoder(torch.arange(64) % 40, torch.arange(64), PackedPlan([0, 64]))
    assert hidden.requires_grad
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in weights)


def test_a_layer_keeps_no_more_than_its_input(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder("olmoe", layers=8)
    whole = kept_bytes(decoder)
    decoder.recompute = True
    inputs = 8 * 64 * decoder.config.dim * 4  # held by the layers' second passes, not by the graph
    assert kept_bytes(decoder) + inputs < whole / 8
