"""Experts' matrices in float8: near the weights by a stated bound, alike on both sides, refused where unfit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from contraflow.errors import CarrierError
from contraflow.weights.fp8 import lowered, raised
from contraflow.weights.manifest import SCALES


def by_hand(weight: Tensor) -> np.ndarray:
    """The weights an engine holds, one block of 128 after the other, in float64 but for what is rounded."""
    rows = weight.float().numpy().reshape(-1, weight.shape[-1])
    held = np.zeros(rows.shape)
    for row, start in np.ndindex(rows.shape[0], -(-rows.shape[1] // 128)):
        block = rows[row, 128 * start : 128 * start + 128]
        scale = np.float32(np.abs(block).max() / np.float32(448)) or np.float32(1)
        values = torch.from_numpy(block / scale).to(torch.float8_e4m3fn).double().numpy()
        held[row, 128 * start : 128 * start + 128] = values * np.float64(scale)
    return held.reshape(weight.shape)


@given(
    shape=st.tuples(st.integers(0, 3), st.integers(0, 4), st.sampled_from([1, 7, 127, 128, 129, 300])),
    spread=st.sampled_from([1e-12, 0.02, 1e4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 999),
)
def test_what_is_lowered_comes_back_as_computed_by_hand_in_bf16(
    shape: tuple[int, int, int], spread: float, dtype: torch.dtype, seed: int
) -> None:
    weight = (spread * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)
    sent = lowered("w", weight)
    blocks = -(-shape[2] // 128)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in sent.items()} == {
        "w": (torch.float8_e4m3fn, shape),
        "w" + SCALES: (torch.float32, (*shape[:2], blocks)),
    }
    found = raised(sent)["w"]
    assert (found.dtype, tuple(found.shape)) == (torch.bfloat16, shape)
    np.testing.assert_allclose(found.double().numpy(), by_hand(weight), rtol=2**-8, atol=0)


def test_an_element_moves_by_a_sixteenth_of_itself_or_a_little_of_its_blocks_largest() -> None:
    weight = torch.randn(4, 64, 512, generator=torch.Generator().manual_seed(0))
    error = (raised(lowered("w", weight))["w"].float() - weight).abs()
    largest = weight.abs().unflatten(-1, (-1, 128)).amax(-1, keepdim=True).expand(-1, -1, -1, 128).flatten(-2)
    # e4m3: half of 1/8 of itself, below 2^-6 half of 2^-9; then bf16's own rounding.
    assert (error <= torch.maximum(weight.abs() / 16, largest * 2**-10 / 448) * 1.01 + weight.abs() * 2**-8).all()


def test_all_other_tensors_pass_as_they_are() -> None:
    plain = {"router": torch.randn(3, 4), "norm": torch.ones(4, dtype=torch.bfloat16)}
    found = raised({**plain, **lowered("w", torch.zeros(2, 3, 4))})
    assert found.keys() == {"router", "norm", "w"}
    assert all(found[name] is tensor for name, tensor in plain.items())
    assert not found["w"].any()


@pytest.mark.parametrize(
    "tensors",
    [
        {"w:scales": torch.ones(2, 3, 1)},
        {"w": torch.ones(2, 3, 4), "w:scales": torch.ones(2, 3, 1)},
        {"w": torch.ones(2, 3, 4).to(torch.float8_e4m3fn), "w:scales": torch.ones(2, 3, 2)},
    ],
)
def test_scales_that_fit_no_float8_tensor_are_refused(tensors: dict[str, Tensor]) -> None:
    with pytest.raises(CarrierError, match=r"'w:scales'.* holds the scales of no float8 tensor 'w'"):
        raised(tensors)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")
def test_what_a_gpu_lowers_is_raised_to_the_same_bits_there_and_on_a_cpu() -> None:
    weight = torch.randn(8, 96, 200, generator=torch.Generator().manual_seed(1))
    there = lowered("w", weight.cuda())
    here = raised({name: tensor.cpu() for name, tensor in there.items()})["w"]
    assert torch.equal(raised(there)["w"].cpu(), here)
    assert torch.equal(here, raised(lowered("w", weight))["w"])
