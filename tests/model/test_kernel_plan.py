"""A whole decoder over pages read by kernels gives what it gives over whole sequences.

Interpreted: TRITON_INTERPRET=1 pytest tests/model/test_kernel_plan.py, where Triton 3.9 or newer is installed.
"""

import os
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from contraflow.errors import ModelError
from contraflow.model.cache import KVCache
from contraflow.model.decoder import Decoder
from contraflow.model.families import ModelConfig
from contraflow.model.kinds import FAMILIES
from contraflow.model.paged import KernelPlan, PagedPlan, paged_plan
from tests.model.pages import Pages, sequences

pytest.importorskip("triton", reason="needs Triton, and a CUDA device or TRITON_INTERPRET=1 (and then Triton 3.9)")
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")]
INTERPRETED = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


@pytest.fixture(params=[pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=ON_GPU)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def moved(decoder: Decoder, device: str, dtype: torch.dtype = torch.float32) -> Decoder:
    out = Decoder(decoder.config, dtype=dtype, device=device)
    out.load_state_dict(decoder.state_dict())
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_and_chunked_prefill_equal_the_packed_forward(
    family: str,
    device: str,
    make_decoder: Callable[..., Decoder],
    forward: Callable[[Decoder, Sequence[Tensor]], Tensor],
) -> None:
    decoder, lengths = make_decoder(family), [5, 1]
    tokens, there = sequences(lengths), moved(decoder, device)
    with torch.inference_mode():
        wanted = forward(decoder, tokens)
        decoded = Pages(there, lengths, 4, 1, KernelPlan).one_by_one(tokens)
        torch.testing.assert_close(decoded.cpu(), wanted, rtol=0, atol=2e-4)
        chunked = Pages(there, lengths, 4, 2, KernelPlan).in_chunks(tokens, 2)
        torch.testing.assert_close(chunked.cpu(), wanted, rtol=0, atol=2e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
def test_in_half_precision_kernels_are_as_near_to_fp32_as_the_plain_form(
    family: str, make_decoder: Callable[..., Decoder], forward: Callable[[Decoder, Sequence[Tensor]], Tensor]
) -> None:
    decoder, lengths = make_decoder(family), [40, 1, 23, 17]
    tokens, half = sequences(lengths), moved(decoder, "cuda", torch.bfloat16)
    with torch.inference_mode():
        wanted = forward(decoder, tokens)
        errors = [
            (Pages(half, lengths, 16, 1, plan).in_chunks(tokens, 5).float().cpu() - wanted).norm(dim=1).median()
            for plan in (KernelPlan, PagedPlan)
        ]
    assert errors[0] <= 1.5 * errors[1], errors


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")
def test_on_a_gpu_kernels_are_taken_without_gradients_only(make_config: Callable[..., ModelConfig]) -> None:
    cache = KVCache(make_config("llama"), blocks=2, block_tokens=4, dtype=torch.float32, device="cuda")
    tables, one = torch.zeros(1, 1, dtype=torch.int64, device="cuda"), torch.ones(1, dtype=torch.int64, device="cuda")
    assert isinstance(paged_plan(cache, tables, one, one), PagedPlan)
    with torch.inference_mode():
        assert isinstance(paged_plan(cache, tables, one, one), KernelPlan)


def test_paged_tensors_that_do_not_fit_are_refused(make_config: Callable[..., ModelConfig]) -> None:
    cache = KVCache(make_config("llama"), blocks=2, block_tokens=4, dtype=torch.float32, device="cpu")
    with pytest.raises(ModelError, match="must be"):
        KernelPlan(cache, torch.zeros(2, 1), torch.ones(3), torch.zeros(3))
