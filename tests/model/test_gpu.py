"""On a GPU: the same function as on the CPU, in flash attention and inside a CUDA graph."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from contraflow.dispatch.local import LocalDispatch
from contraflow.dispatch.reference import ReferenceDispatch
from contraflow.model.attention import PackedPlan, attend
from contraflow.model.cache import KVCache
from contraflow.model.decoder import Decoder
from contraflow.model.kinds import FAMILIES
from contraflow.model.paged import paged_plan
from contraflow.model.router import RouterTape
from contraflow.model.sinks import Sight

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")]
STARTS = [0, 3, 4, 90, 101, 230]
POSITIONS = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(STARTS)])
TOKENS = torch.arange(STARTS[-1]) * 7 % 40


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def on_gpu(decoder: Decoder, dtype: torch.dtype) -> Decoder:
    moved = Decoder(decoder.config, dtype=dtype, device="cuda")
    moved.load_state_dict(decoder.state_dict())
    return moved


def packed(decoder: Decoder, device: str, tape: RouterTape | None = None) -> Tensor:
    return decoder(TOKENS.to(device), POSITIONS.to(device), PackedPlan.of(STARTS, device), tape=tape)


def test_fp32_equals_the_cpu_in_value_and_gradient(family: str, make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder(family)
    moved = on_gpu(decoder, torch.float32)
    pull = torch.linspace(-1, 1, len(TOKENS) * 32).view(-1, 32)
    out, wanted = packed(moved, "cuda"), packed(decoder, "cpu")
    torch.testing.assert_close(out.cpu(), wanted, rtol=0, atol=2e-4)
    out.backward(pull.cuda())
    wanted.backward(pull)
    for (name, weight), right in zip(moved.named_parameters(), decoder.parameters(), strict=True):
        if right.grad is not None:
            assert weight.grad is not None, name
            scale = right.grad.abs().amax().item()
            torch.testing.assert_close(weight.grad.cpu(), right.grad, rtol=0, atol=2e-3 * scale, msg=name)


def test_flash_attention_in_half_precision_is_close_and_reaches_every_weight(
    family: str, make_decoder: Callable[..., Decoder]
) -> None:
    decoder = make_decoder(family)
    moved = on_gpu(decoder, torch.bfloat16)
    out = packed(moved, "cuda")
    likeness = torch.nn.functional.cosine_similarity(out.float().cpu(), packed(decoder, "cpu"))
    assert likeness.median() > 0.99  # a token whose second-best expert flips may differ more
    moved.logits(out).square().mean().backward()
    for name, weight in moved.named_parameters():
        if weight.requires_grad:
            assert weight.grad is not None, name
            assert weight.grad.isfinite().all(), name


@pytest.mark.parametrize("window", [None, 1, 5, 128])
def test_flash_attention_with_sinks_equals_the_plain_form_in_value_and_gradient(window: int | None) -> None:
    noise = torch.Generator().manual_seed(0)
    tokens, plan = STARTS[-1], PackedPlan.of(STARTS, "cuda")
    drawn = [torch.randn(tokens, heads, 64, generator=noise) for heads in (16, 2, 2)]
    halves = [x.bfloat16().cuda().requires_grad_() for x in (*drawn, torch.randn(16, generator=noise) * 2)]
    pull = torch.randn(tokens, 16, 64, generator=noise).bfloat16().cuda()
    wholes = [x.detach().float().requires_grad_() for x in halves]
    out, wanted = (attend(q, k, v, plan, Sight(sinks, window)) for q, k, v, sinks in (halves, wholes))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wanted, rtol=0, atol=0.03)
    grads = torch.autograd.grad(out, halves, pull)
    for name, grad, right in zip("qkvs", grads, torch.autograd.grad(wanted, wholes, pull.float()), strict=True):
        distance = (grad.float() - right).norm() / right.norm()
        assert distance < 0.01, (name, distance)


def test_forward_and_backward_are_bit_equal_from_run_to_run(make_decoder: Callable[..., Decoder]) -> None:
    moved = on_gpu(make_decoder("qwen3_moe", top_k=4), torch.bfloat16)
    experts = [layer.mlp for layer in moved.layers if hasattr(layer.mlp, "router")]
    x = torch.randn(500, 32, device="cuda").bfloat16()
    runs = []
    for _ in range(2):
        moved.zero_grad()
        x_leaf = x.clone().requires_grad_()
        experts[0](x_leaf, None).square().sum().backward()
        runs.append([x_leaf.grad, *(p.grad for p in experts[0].parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("capacity", [None, 40])
def test_dispatch_equals_the_reference_and_reads_nothing(capacity: int | None) -> None:
    noise = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(6, generator=noise)[:2] for _ in range(20)]).masked_fill_(
        torch.rand(20, 2, generator=noise) < 0.2, -1
    )
    x, weights = torch.randn(20, 8, generator=noise), torch.rand(20, 2, generator=noise)
    slow, fast = ReferenceDispatch(6), LocalDispatch(6, capacity)
    rows = slow.dispatch(x, ids, weights)
    wanted = slow.combine(rows.x_RD * rows.weights_R[:, None], rows.handle)
    cuda = [t.cuda() for t in (x, ids, weights)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        got_rows = fast.dispatch(*cuda)
        got = fast.combine(got_rows.x_RD * got_rows.weights_R[:, None], got_rows.handle)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(got.cpu(), wanted)
    assert got_rows.ends_E.tolist() == rows.ends_E.tolist()


def test_a_decode_step_replays_from_a_cuda_graph(family: str, make_decoder: Callable[..., Decoder]) -> None:
    decoder = on_gpu(make_decoder(family), torch.bfloat16)
    caches = [KVCache(decoder.config, blocks=9, block_tokens=16, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    tables = torch.arange(1, 9, device="cuda").view(4, 2)
    tokens, lengths, slots = (torch.ones(4, dtype=torch.int64, device="cuda") for _ in range(3))

    def step(cache: KVCache) -> tuple[Tensor, Tensor | None]:
        tape = RouterTape()
        plan = paged_plan(cache, tables, lengths, slots)
        logits = decoder.logits(decoder(tokens, lengths - 1, plan, tape=tape))
        return logits, tape.routes() if tape.used else None

    with torch.inference_mode():
        slots.copy_(tables[:, 0] * 16)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step(caches[0])
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step(caches[0])
        for position in range(20):
            tokens.copy_((torch.arange(4, device="cuda") + position) * 7 % 40)
            lengths.fill_(position + 1)
            slots.copy_(tables[:, position // 16] * 16 + position % 16)
            graph.replay()
            wanted = step(caches[1])
            torch.testing.assert_close(captured[0], wanted[0], rtol=0, atol=0)
            if wanted[1] is not None:
                assert captured[1] is not None
                assert torch.equal(captured[1], wanted[1])
