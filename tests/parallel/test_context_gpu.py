"""Attention over the tokens of several ranks by flash attention, one rank after the other on one GPU."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from contraflow.model.attention import PackedPlan
from contraflow.model.sinks import Sight
from contraflow.parallel.context import ContextPlan, held

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Scripted:
    """Has what the others would send in the forward pass; in the backward pass keeps what it is given to send."""

    def __init__(self, place: int, size: int, everybody: Tensor) -> None:
        self.place, self.size = place, size
        self.everybody: Tensor | None = everybody
        self.sent = everybody

    def begin(self, sent_SB: Tensor, send: Sequence[int], receive: Sequence[int]) -> Callable[[], Tensor]:
        self.sent = sent_SB
        answer, self.everybody = self.everybody, None
        return lambda: sent_SB.new_zeros(sum(receive), sent_SB.shape[1]) if answer is None else answer


@pytest.mark.parametrize("sight", [None, Sight(torch.linspace(-2, 2, 8), None), Sight(torch.linspace(-2, 2, 8), 40)])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("lengths", [[700, 3, 1, 64, 1, 129], [1], [33] * 5], ids=str)
def test_flash_attention_over_ranks_is_that_of_one(ranks: int, lengths: list[int], sight: Sight | None) -> None:
    sight = None if sight is None else sight._replace(sinks_H=sight.sinks_H.cuda())
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    noise = torch.Generator("cuda").manual_seed(1)
    q, k, v, pull = (torch.randn(starts[-1], h, 64, generator=noise, device="cuda").bfloat16() for h in (8, 2, 2, 8))
    whole = [x.float().requires_grad_() for x in (q, k, v)]  # fp32 goes another way than flash attention
    wanted = PackedPlan.of(starts, "cuda").attend(*whole, sight)
    wanted_q, *wanted_kv = torch.autograd.grad(wanted, whole, pull.float())
    order = torch.cat([torch.from_numpy(held(starts, ranks, rank)) for rank in range(ranks)]).cuda()
    both = torch.cat((k, v), 1)[order].flatten(1).contiguous()
    gathered = torch.zeros(len(both), 4 * 64, device="cuda")
    for rank in range(ranks):
        here = torch.from_numpy(held(starts, ranks, rank)).cuda()
        exchange = Scripted(rank, ranks, both.view(torch.uint8))
        mine = [x[here].requires_grad_() for x in (q, k, v)]
        out = ContextPlan(starts, exchange, "cuda").attend(*mine, sight)
        torch.testing.assert_close(out.float(), wanted[here], rtol=2e-2, atol=2e-2)
        (grad_q,) = torch.autograd.grad(out, mine[:1], pull[here], retain_graph=True)
        torch.testing.assert_close(grad_q.float(), wanted_q[here], rtol=4e-2, atol=4e-2)
        torch.autograd.grad(out, mine[1:], pull[here])
        gathered += exchange.sent.view(torch.bfloat16).float()
    grads_kv = torch.empty_like(gathered)
    grads_kv[order] = gathered
    for found, known in zip(grads_kv.view(-1, 4, 64).split(2, 1), wanted_kv, strict=True):
        torch.testing.assert_close(found, known, rtol=4e-2, atol=4e-2 * max(float(known.abs().max()), 1.0))
