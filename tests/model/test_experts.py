"""Experts with biases, clamps and shared ones beside them, against a dense loop in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from contraflow.dispatch.local import LocalDispatch
from contraflow.model.clamped import add_bias, clamped_swiglu
from contraflow.model.decoder import Decoder
from contraflow.model.moe import MoE


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_experts_equal_a_dense_loop_in_float64(family: str, make_decoder: Callable[..., Decoder]) -> None:
    """In value and gradient; also with rows that nobody owns."""
    moe = make_decoder(family).layers[1].mlp
    assert isinstance(moe, MoE)
    x = torch.randn(29, 32, generator=torch.Generator().manual_seed(3), requires_grad=True)
    pull = torch.randn(29, 32, generator=torch.Generator().manual_seed(4))
    named = {name: weight for name, weight in moe.named_parameters() if weight.requires_grad}
    double = {name: weight.detach().double().requires_grad_() for name, weight in moe.named_parameters()}
    x_double = x.detach().double().requires_grad_()
    ids, _ = moe.router(x, None)
    wanted = dense(moe, double, x_double, ids)
    wanted_grads = torch.autograd.grad(wanted, [x_double, *(double[name] for name in named)], pull)
    for dispatch in (LocalDispatch(6), LocalDispatch(6, capacity=70)):
        moe.dispatch = dispatch
        got = moe(x, None)
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)
        grads = torch.autograd.grad(got, [x, *named.values()], pull)
        for name, grad, wanted_grad in zip(["x", *named], grads, wanted_grads, strict=True):
            torch.testing.assert_close(grad.double(), wanted_grad, rtol=1e-3, atol=1e-4, msg=name)


def dense(moe: MoE, weights: dict[str, Tensor], x: Tensor, ids: Tensor) -> Tensor:
    out = []
    for row, chosen in zip(x, ids.tolist(), strict=True):
        if "router.bias" in weights:
            logits = weights["router.weight"] @ row + weights["router.bias"]
            shares = logits[chosen].softmax(0)
        else:
            scores = (weights["router.weight"] @ row).sigmoid()[chosen]
            shares = 2.5 * scores / scores.sum()
        answers = []
        for share, e in zip(shares, chosen, strict=True):
            gate_up = weights["gate_up"][e] @ row
            if "gate_up_bias" in weights:
                gate_up = gate_up + weights["gate_up_bias"][e]
                gate, up = gate_up[0::2].clamp(max=moe.limit), gate_up[1::2].clamp(-moe.limit, moe.limit)
                answer = weights["down"][e] @ ((up + 1) * gate * (gate * moe.alpha).sigmoid()) + weights["down_bias"][e]
            else:
                gate, up = gate_up.chunk(2)
                answer = weights["down"][e] @ (gate * gate.sigmoid() * up)
            answers.append(share * answer)
        if "shared.gate_up" in weights:
            gate, up = (weights["shared.gate_up"] @ row).chunk(2)
            answers.append(weights["shared.down"] @ (gate * gate.sigmoid() * up))
        out.append(torch.stack(answers).sum(0))
    return torch.stack(out)


def test_the_clamp_limits_gates_above_and_ups_on_both_sides() -> None:
    gate_up = torch.tensor([[9.0, 9.0, -9.0, -9.0, 1.0, 0.5]])
    got = clamped_swiglu(gate_up, alpha=2.0, limit=3.0)
    sigmoid = torch.tensor([6.0, -18.0, 2.0]).sigmoid()
    torch.testing.assert_close(got, torch.tensor([[4.0 * 3, -2.0 * -9, 1.5 * 1]]) * sigmoid)


def test_rows_behind_the_last_expert_s_neither_get_nor_move_a_bias() -> None:
    bias = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    rows = torch.tensor([[0.0], [0.0], [0.0], [torch.nan]])
    out = add_bias(rows, bias, torch.tensor([2, 2, 3], dtype=torch.int32))
    assert out[:3].tolist() == [[1.0], [1.0], [3.0]]
    pull = torch.tensor([[1.0], [1.0], [1.0], [torch.nan]])
    assert torch.autograd.grad(out, bias, pull)[0].tolist() == [[2.0], [0.0], [1.0]]
