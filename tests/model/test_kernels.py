"""Our kernels between and around a layer's experts, against float64: on a GPU, or interpreted by Triton on a CPU.

Interpreted: TRITON_INTERPRET=1 pytest tests/model/test_kernels.py, where triton (3.8 or newer) is installed. Its
interpreter knows no bf16, so half precision is fp16 there.
"""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton", reason="needs triton, and a CUDA device or TRITON_INTERPRET=1")
from contraflow.model import kernels_experts, kernels_tokens
from contraflow.model.kernels_experts import Form, Tile

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    pytestmark = []
else:
    no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device or TRITON_INTERPRET=1")
    pytestmark = [pytest.mark.gpu, no_gpu]
DEVICE, HALF = ("cpu", torch.float16) if INTERPRETED else ("cuda", torch.bfloat16)
SMALL = Form(16, Tile(16, 32, 4, 2), Tile(32, 16, 4, 3))
OTHER = Form(16, Tile(16, 32, 4, 2, bulk=True, turned=True), Tile(32, 16, 4, 3, bulk=True, turned=True))


def drawn(seed: int, *shape: int, scale: float = 1.0, dtype: torch.dtype = HALF) -> Tensor:
    noise = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=noise) * scale).to(dtype).to(DEVICE)


def chosen(seed: int, tokens: int, choices: int, experts: int) -> Tensor:
    """Different experts for each token, a fifth of them -1."""
    noise = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand(tokens, experts, generator=noise).argsort(1)[:, :choices]
    return ids_TK.masked_fill(torch.rand(tokens, choices, generator=noise) < 0.2, -1).to(DEVICE)


def mixed(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The definition, expert by expert, in float64."""
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float64, device=x_TD.device)
    for expert in range(len(down)):
        share_T = (weights_TK.double() * (ids_TK == expert)).sum(1)
        gate, up = (x_TD.double() @ gate_up[expert].double().T).chunk(2, -1)
        out_TD += share_T[:, None] * ((F.silu(gate) * up) @ down[expert].double().T)
    return out_TD


@settings(max_examples=12)
@given(st.integers(1, 70), st.integers(1, 4), st.integers(1, 9), st.sampled_from([16, 32]), st.integers(0, 1 << 16))
def test_every_pair_is_in_one_block_of_its_expert(
    tokens: int, choices: int, experts: int, rows: int, seed: int
) -> None:
    noise = torch.Generator().manual_seed(seed)
    ids_TK = torch.randint(-1, experts, (tokens, choices), generator=noise)
    order_P, blocks_3B = kernels_experts.align(ids_TK.to(DEVICE), experts, rows)
    flat = ids_TK.reshape(-1)
    placed = flat.argsort(stable=True)[int((flat < 0).sum()) :]
    assert order_P.cpu()[: len(placed)].tolist() == placed.tolist()
    blocks = [(e, start, count) for e, start, count in blocks_3B.T.tolist() if count]
    assert [count for *_, count in blocks] == [c for *_, c in blocks_3B.T.tolist()][: len(blocks)]
    covered = [pair for e, start, count in blocks for pair in placed[start : start + count].tolist() if flat[pair] == e]
    assert covered == placed.tolist()
    assert all(0 < count <= rows for *_, count in blocks)


@pytest.mark.parametrize("cut", [SMALL, OTHER])
@pytest.mark.parametrize(
    ("tokens", "choices", "experts", "dim", "ffn"),
    [
        (0, 2, 4, 16, 16),
        (1, 1, 1, 32, 32),
        (1, 8, 64, 32, 16),
        (3, 2, 5, 24, 40),
        (17, 3, 6, 33, 21),
        (64, 2, 3, 64, 96),
    ],
)
def test_experts_equal_their_definition(cut: Form, tokens: int, choices: int, experts: int, dim: int, ffn: int) -> None:
    x_TD, weights_TK = drawn(1, tokens, dim), drawn(2, tokens, choices, dtype=torch.float32)
    ids_TK = chosen(3, tokens, choices, experts)
    gate_up, down = drawn(4, experts, 2 * ffn, dim, scale=dim**-0.5), drawn(5, experts, dim, ffn, scale=ffn**-0.5)
    wanted = mixed(x_TD, ids_TK, weights_TK, gate_up, down)
    out_TD = kernels_experts.experts(x_TD, ids_TK, weights_TK, gate_up, down, cut=cut)
    assert out_TD.dtype == HALF
    assert out_TD.shape == x_TD.shape
    error = (out_TD.double() - wanted).norm() / wanted.norm().clamp_min(1e-9)
    assert error < (2e-3 if HALF is torch.float16 else 1e-2)
    assert bool((out_TD[(ids_TK < 0).all(1)] == 0).all())


def test_a_token_s_answer_is_the_same_bits_whatever_stands_beside_it() -> None:
    x_TD, weights_TK, ids_TK = drawn(1, 40, 32), drawn(2, 40, 2, dtype=torch.float32), chosen(3, 40, 2, 4)
    gate_up, down = drawn(4, 4, 48, 32, scale=0.2), drawn(5, 4, 32, 24, scale=0.2)
    whole = kernels_experts.experts(x_TD, ids_TK, weights_TK, gate_up, down, cut=SMALL)
    some = torch.tensor([39, 0, 7, 21], device=DEVICE)
    part = kernels_experts.experts(x_TD[some], ids_TK[some], weights_TK[some], gate_up, down, cut=SMALL)
    assert torch.equal(part, whole[some])
    assert torch.equal(kernels_experts.experts(x_TD, ids_TK, weights_TK, gate_up, down, cut=SMALL), whole)


def test_blocks_grow_with_the_mean_expert() -> None:
    rows = [kernels_experts.form(pairs, 64).rows for pairs in range(1, 8193, 7)]
    assert rows == sorted(rows)
    assert rows[-1] == kernels_experts.MANY.rows


@pytest.mark.parametrize(
    ("tokens", "experts", "dim"), [(0, 8, 16), (1, 1, 1), (5, 60, 300), (17, 128, 512), (33, 3, 33)]
)
def test_logits_are_fp32_s(tokens: int, experts: int, dim: int) -> None:
    x_TD, weight_ED = drawn(6, tokens, dim), drawn(7, experts, dim, dtype=torch.float32)
    logits_TE = kernels_tokens.logit_parts(x_TD, weight_ED).sum(0)
    assert logits_TE.dtype == torch.float32
    error = (logits_TE - x_TD.double() @ weight_ED.double().T).abs()
    bound = x_TD.double().abs() @ weight_ED.double().abs().T  # what rounding errors are a share of
    assert bool((error <= 2e-6 * bound).all())


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(
    ("parts", "tokens", "experts", "top_k"), [(1, 0, 8, 2), (2, 1, 1, 1), (8, 5, 60, 8), (3, 9, 6, 6)]
)
def test_routes_are_the_top_of_a_softmax(parts: int, tokens: int, experts: int, top_k: int, renormalise: bool) -> None:
    parts_STE = drawn(6, parts, tokens, experts, dtype=torch.float32)
    ids_TK, weights_TK, logits_TE = kernels_tokens.choose(parts_STE, top_k, renormalise=renormalise)
    torch.testing.assert_close(logits_TE, parts_STE.sum(0))
    top_TK, wanted_TK = logits_TE.double().softmax(-1).topk(top_k)
    assert (ids_TK.dtype, weights_TK.dtype) == (torch.int64, torch.float32)
    assert torch.equal(ids_TK, wanted_TK)
    wanted = top_TK / top_TK.sum(-1, keepdim=True) if renormalise else top_TK
    torch.testing.assert_close(weights_TK.double(), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_equal_logits_go_to_the_lower_id_and_broken_ones_to_different_experts_that_exist() -> None:
    odd = torch.tensor([[0.0] * 5, [float("nan")] * 5, [float("-inf")] * 5, [1, 3, float("nan"), 2, 3]], device=DEVICE)
    assert kernels_tokens.choose(odd[None], 3, renormalise=True).ids_TK.tolist() == [[0, 1, 2]] * 3 + [[2, 1, 4]]


@pytest.mark.parametrize(("tokens", "dim"), [(0, 16), (1, 1), (3, 33), (9, 256)])
def test_a_sum_and_its_norm_are_those_of_two_steps(tokens: int, dim: int) -> None:
    x_TD, delta_TD, weight_D = drawn(7, tokens, dim), drawn(8, tokens, dim), drawn(9, dim)
    sum_TD, normed_TD = kernels_tokens.add_norm(x_TD, delta_TD, weight_D, 1e-5)
    assert torch.equal(sum_TD, x_TD + delta_TD)
    wide = sum_TD.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight_D.double()
    torch.testing.assert_close(normed_TD.double(), wanted, rtol=1e-2 if HALF is torch.bfloat16 else 2e-3, atol=1e-4)
