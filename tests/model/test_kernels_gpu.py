"""On a GPU: our kernels at real sizes, in a CUDA graph, and in whole decoders beside the plain form."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from contraflow.dispatch.local import LocalDispatch
from contraflow.model import moe
from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import Decoder
from contraflow.model.families import ModelConfig
from contraflow.model.moe import MoE
from contraflow.model.router import RouterTape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")]
OLMOE, QWEN3 = (64, 8, 2048, 1024), (128, 8, 2048, 768)  # experts, top k, width, hidden width


def mixture(sizes: tuple[int, int, int, int], *, family: str = "olmoe") -> MoE:
    experts, top_k, dim, ffn = sizes
    config = ModelConfig(
        family=family, vocab=8, dim=dim, layers=1, heads=2, kv_heads=2, head_dim=16,
        experts=experts, top_k=top_k, expert_ffn=ffn, renormalise=family == "qwen3_moe",
    )  # fmt: skip
    made = MoE(config, LocalDispatch(experts), torch.bfloat16, "cuda")
    noise = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for weight in made.parameters():
            weight.normal_(0.0, 0.02, generator=noise)
    return made


def fed(tokens: int, dim: int, seed: int = 1) -> Tensor:
    return torch.randn(tokens, dim, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 33, 64, 200, 512, 1024])
@pytest.mark.parametrize(("family", "sizes"), [("olmoe", OLMOE), ("qwen3_moe", QWEN3), ("olmoe", (60, 4, 264, 104))])
def test_a_mixture_equals_the_plain_one(family: str, sizes: tuple[int, int, int, int], tokens: int) -> None:
    made, x_TD = mixture(sizes, family=family), fed(tokens, sizes[2])
    with torch.no_grad():
        wanted = made(x_TD, None)
    with torch.inference_mode():
        assert made.whole(x_TD, tokens * sizes[1])
        out, tape = made(x_TD, None), RouterTape()
        assert torch.equal(made(x_TD, tape), out)
    assert tape.routes().shape == (tokens, 1, sizes[1])
    error_T = (out - wanted).float().norm(dim=1) / wanted.float().norm(dim=1)
    assert int((error_T > 0.02).sum()) <= 1  # two experts may be as good as each other, and either taken


def test_a_bias_a_wide_dtype_another_dispatch_or_too_many_pairs_keep_the_plain_form() -> None:
    made, x_TD = mixture((4, 2, 64, 32)), fed(3, 64)
    with torch.inference_mode():
        assert made.whole(x_TD, 6)
        assert not made.whole(x_TD.float(), 6)
        assert not made.whole(x_TD, moe.MOST_PAIRS + 1)
        made.dispatch = LocalDispatch(4, capacity=5)
        assert not made.whole(x_TD, 6)
    made.dispatch = LocalDispatch(4)
    assert not made.whole(x_TD, 6)


def test_a_graph_of_a_mixture_follows_new_tokens_to_new_experts() -> None:
    made, place = mixture(OLMOE), fed(48, 2048)
    with torch.inference_mode():
        made(place, None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = made(place, None)
        for seed in range(3):
            place.copy_(fed(48, 2048, seed))
            graph.replay()
            assert torch.equal(out, made(place, None))


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_decoder_is_as_near_to_the_plain_one_as_bf16_is(family: str, make_decoder: Callable[..., Decoder]) -> None:
    made = make_decoder(family, dtype=torch.bfloat16, top_k=6, **({"top_groups": 3} if family == "deepseek_v3" else {}))
    decoder = made.to("cuda")  # every expert of every token: no routing to flip by rounding
    tokens, plan = torch.arange(90, device="cuda") * 7 % 40, PackedPlan([0, 1, 30, 90], "cuda")
    places = torch.cat([torch.arange(n, device="cuda") for n in (1, 29, 60)])
    with torch.no_grad():
        plain = decoder(tokens, places, plan)
    with torch.inference_mode():
        fused = decoder(tokens, places, plan)
    assert float(F.cosine_similarity(plain.float(), fused.float()).min()) > 0.995
