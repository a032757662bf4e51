"""The kernel between projection and attention equals its formula in float64, and writes to the slots it was given.

Interpreted: TRITON_INTERPRET=1 pytest tests/model/test_kernels_place.py, where Triton 3.9 or newer is installed.
"""

import os

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton, and a CUDA device or TRITON_INTERPRET=1 (and then Triton 3.9)")
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")]
INTERPRETED = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
EPS = 1e-3


@pytest.fixture(
    params=[
        pytest.param(("cpu", torch.float32), marks=INTERPRETED),
        pytest.param(("cuda", torch.float32), marks=ON_GPU),
        pytest.param(("cuda", torch.bfloat16), marks=ON_GPU),
    ],
    ids=["cpu", "cuda-fp32", "cuda-bf16"],
)
def there(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    """Device and dtype."""
    return request.param  # type: ignore[no-any-return]


def by_formula(x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None, kind: int, clip: float | None) -> Tensor:
    """Queries (kind 0) or keys (1) `[T, n, d]`, in float64; cos and signed sin are `[T, r]`."""
    if norm is not None and norm.ndim == 2:
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * norm[kind]
    elif norm is not None:
        width = x.shape[1] * x.shape[2]
        weight = norm[:width] if kind == 0 else norm[-width:]
        x = (x.flatten(1) / (x.flatten(1).square().mean(-1, keepdim=True) + EPS).sqrt() * weight).view_as(x)
    if clip is not None:
        x = x.clamp(-clip, clip)
    out, half = x.clone(), cos.shape[1] // 2
    for i in range(half):
        first, second = x[..., i], x[..., i + half]
        out[..., i] = first * cos[:, None, i] + second * sin[:, None, i]
        out[..., i + half] = second * cos[:, None, i + half] + first * sin[:, None, i + half]
    return out


@pytest.mark.parametrize("norm", ["none", "head", "projection"])
@pytest.mark.parametrize(
    ("heads", "groups", "dim", "turned", "block_tokens", "clip"),
    [(4, 4, 128, 128, 16, None), (6, 2, 24, 8, 3, 0.7), (8, 1, 64, 64, 16, None), (6, 3, 8, 8, 1, 0.2)],
)
def test_it_is_the_formula_and_touches_no_other_slot(
    there: tuple[str, torch.dtype], norm: str, heads: int, groups: int, dim: int, turned: int, block_tokens: int,
    clip: float | None,
) -> None:  # fmt: skip
    from contraflow.model import kernels_place as kernels

    device, dtype = there
    blocks = 7

    @settings(max_examples=3 if device == "cpu" else 20, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(tokens=st.integers(0, 5), seed=st.integers(0, 99))
    def law(tokens: int, seed: int) -> None:
        noise = torch.Generator().manual_seed(seed)
        qkv = torch.randn(tokens, heads + 2 * groups, dim, generator=noise).to(dtype)
        angles = torch.rand(tokens, turned, generator=noise) * 6
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        shape = {"none": None, "head": (2, dim), "projection": ((heads + groups) * dim,)}[norm]
        weight = None if shape is None else (torch.rand(shape, generator=noise) + 0.5).to(dtype)
        pool = torch.randn(blocks, 2, groups, block_tokens, dim, generator=noise).to(dtype)
        slots = torch.randperm(blocks * block_tokens, generator=noise)[:tokens]
        layer = pool.flatten(0, 2).flatten(1).to(device, copy=True)
        q = kernels.place(
            qkv.to(device), cos[:, None].to(device), sin[:, None].to(device),
            kernels.Placing(None if weight is None else weight.to(device), EPS, clip),
            kernels.Target(layer, slots.to(device), block_tokens), kv_heads=groups,
        )  # fmt: skip
        wide, wide_weight = qkv.double(), None if weight is None else weight.double()
        parts = wide.split([heads, groups, groups], 1)
        turn = (cos.double(), sin.double())
        wanted_q, wanted_k = (by_formula(parts[kind], *turn, wide_weight, kind, clip) for kind in (0, 1))
        wanted_v = parts[2] if clip is None else parts[2].clamp(-clip, clip)
        wanted = pool.double()
        for token, slot in enumerate(slots.tolist()):
            wanted[slot // block_tokens, 0, :, slot % block_tokens] = wanted_k[token]
            wanted[slot // block_tokens, 1, :, slot % block_tokens] = wanted_v[token]
        assert q.dtype == dtype
        torch.testing.assert_close(q.cpu().double(), wanted_q, rtol=0, atol=TOLERANCE[dtype])
        got = layer.cpu().double().view(pool.shape)
        torch.testing.assert_close(got, wanted, rtol=0, atol=TOLERANCE[dtype])

    law()
