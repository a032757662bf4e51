"""Attention over pages by Triton kernels equals the formula in float64: compiled on a GPU, interpreted on a CPU.

Interpreted: TRITON_INTERPRET=1 pytest tests/model/test_kernels_attention.py, where Triton 3.9 or newer is installed.
Examples are not shrunk: interpreted, one takes long enough.
"""

import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton, and a CUDA device or TRITON_INTERPRET=1 (and then Triton 3.9)")
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")]
INTERPRETED = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
LENGTHS = st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 31, 32, 33, 47, 50]), min_size=1, max_size=4)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Shape(NamedTuple):
    """A layer's heads, pages and sight, and how many splits a decoding token's keys are read in."""

    groups: int
    share: int
    dim: int
    block_tokens: int = 16
    window: int | None = None
    sinks: bool = False
    splits: int = 1
    products: bool = True

    @property
    def heads(self) -> int:
        return self.groups * self.share


SHAPES = [
    Shape(2, 1, 128, products=False),
    Shape(3, 1, 24, block_tokens=3, window=5, sinks=True, splits=4, products=False),
    Shape(1, 1, 64, splits=2),
    Shape(1, 8, 128, splits=4),
    Shape(2, 3, 32, block_tokens=5, window=17),
    Shape(1, 4, 64, window=1, sinks=True, splits=2),
    Shape(2, 2, 8, block_tokens=1, sinks=True),
]


@pytest.fixture(params=[pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=ON_GPU)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def dtype(request: pytest.FixtureRequest, device: str) -> torch.dtype:
    if device == "cpu" and request.param != torch.float32:
        pytest.skip("numpy, which interprets, has no such type of its own")
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def kernels(device: str) -> ModuleType:
    from contraflow.model import kernels_attention

    return kernels_attention


class Case:
    """Random pages in scattered blocks with unreadable rubbish behind each sequence's end, queries, sinks."""

    def __init__(self, shape: Shape, lengths: Sequence[int], fed: Sequence[int], dtype: torch.dtype, seed: int) -> None:
        noise = torch.Generator().manual_seed(seed)
        size = shape.block_tokens
        each = [-(-length // size) for length in lengths]
        free = torch.randperm(sum(each) + 1, generator=noise).tolist()
        width = max(each) + 1
        self.tables = torch.full((len(lengths), width + 2), free.pop())  # wider than needed, as an engine's is
        pool = torch.randn(sum(each) + 1, 2, shape.groups, size, shape.dim, generator=noise)
        held = torch.zeros(sum(each) + 1, size, dtype=torch.bool)
        for row, (count, length) in enumerate(zip(each, lengths, strict=True)):
            for block in range(count):
                self.tables[row, block] = free.pop()
                held[self.tables[row, block], : length - block * size] = True
        self.pool = pool.masked_fill_(~held[:, None, None, :, None], float("nan")).to(dtype)
        self.q = torch.randn(sum(fed), shape.heads, shape.dim, generator=noise).to(dtype)
        self.sinks = torch.randn(shape.heads, generator=noise) * 2 if shape.sinks else None
        self.shape, self.lengths, self.fed, self.width = shape, lengths, fed, width

    def queries(self) -> Tensor:
        out = torch.full((len(self.fed), max(self.fed) + 1), -1)
        order = iter(range(sum(self.fed)))
        for row, count in enumerate(self.fed):
            out[row, :count] = torch.tensor([next(order) for _ in range(count)], dtype=torch.int64)
        return out

    def given(self, kernels: ModuleType, device: str) -> tuple[Any, ...]:
        """Queries, pages and sight as a kernel takes them."""
        layer = self.pool.flatten(0, 2).flatten(1).to(device)
        tables = self.tables.to(device)[:, : self.width]
        pages = kernels.Pages(
            layer, tables, torch.tensor(self.lengths, device=device), self.shape.groups, self.shape.block_tokens
        )
        sinks = None if self.sinks is None else self.sinks.to(device)
        return self.q.to(device), pages, kernels.Seen(sinks, self.shape.window)

    def wanted(self) -> Tensor:
        """By the formula, in float64, token by token and head by head."""
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        place = 0
        for row, (length, count) in enumerate(zip(self.lengths, self.fed, strict=True)):
            k, v = self.pool[self.tables[row]].transpose(2, 3).flatten(0, 0).double().unbind(1)
            k, v = (x.flatten(0, 1)[:length] for x in (k, v))
            for end in range(length - count + 1, length + 1):
                if length:
                    out[place] = self._token(self.q[place].double(), k[:end], v[:end])
                place += 1
        return out

    def _token(self, q_Hd: Tensor, k_LGd: Tensor, v_LGd: Tensor) -> Tensor:
        first = 0 if self.shape.window is None else max(0, len(k_LGd) - self.shape.window)
        out = []
        for head, q in enumerate(q_Hd):
            scores = k_LGd[first:, head // self.shape.share] @ q / self.shape.dim**0.5
            if self.sinks is not None:
                scores = torch.cat((scores, self.sinks[head : head + 1].double()))
            out.append(scores.softmax(0)[: len(k_LGd) - first] @ v_LGd[first:, head // self.shape.share])
        return torch.stack(out)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_token_a_sequence_sees_all_its_keys(
    shape: Shape, device: str, dtype: torch.dtype, kernels: ModuleType
) -> None:
    @settings(max_examples=3 if device == "cpu" else 20, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(lengths=LENGTHS, seed=st.integers(0, 99))
    def law(lengths: list[int], seed: int) -> None:
        case = Case(shape, lengths, [1] * len(lengths), dtype, seed)
        got = kernels.decode(*case.given(kernels, device), kernels.Tiling(16, 4, 2, shape.splits, shape.products))
        torch.testing.assert_close(got.cpu().double(), case.wanted(), rtol=0, atol=TOLERANCE[dtype])
        assert not got[torch.tensor(lengths) == 0].any()

    law()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_see_their_past_and_causally_themselves(
    shape: Shape, device: str, dtype: torch.dtype, kernels: ModuleType
) -> None:
    @settings(max_examples=3 if device == "cpu" else 20, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(lengths=LENGTHS, data=st.data(), seed=st.integers(0, 99))
    def law(lengths: list[int], data: st.DataObject, seed: int) -> None:
        fed = [data.draw(st.sampled_from([0, 1, length // 2, length])) if length else 0 for length in lengths]
        case = Case(shape, lengths, fed, dtype, seed)
        queries = case.queries().to(device)
        q, pages, seen = case.given(kernels, device)
        got = kernels.prefill(q, pages, kernels.Fed(queries, (queries >= 0).sum(1)), seen, kernels.Tiling(16, 4, 2))
        torch.testing.assert_close(got.cpu().double(), case.wanted(), rtol=0, atol=TOLERANCE[dtype])

    law()


def test_the_shipped_cuts_compute_the_same(device: str, dtype: torch.dtype, kernels: ModuleType) -> None:
    for share, dim in ((1, 128), (8, 128), (1, 192), (4, 64)):
        case = Case(Shape(1, share, dim), [0, 77, 130], [1, 1, 1], dtype, 0)
        got = kernels.decode(*case.given(kernels, device))
        torch.testing.assert_close(got.cpu().double(), case.wanted(), rtol=0, atol=TOLERANCE[dtype])
        case = Case(Shape(1, share, dim), [77, 130], [77, 1], dtype, 0)
        queries = case.queries().to(device)
        q, pages, seen = case.given(kernels, device)
        got = kernels.prefill(q, pages, kernels.Fed(queries, (queries >= 0).sum(1)), seen)
        torch.testing.assert_close(got.cpu().double(), case.wanted(), rtol=0, atol=TOLERANCE[dtype])


def test_no_sequences_are_no_fault(device: str, kernels: ModuleType) -> None:
    case = Case(Shape(1, 2, 32), [3], [1], torch.float32, 0)
    q, pages, seen = case.given(kernels, device)
    nobody = pages._replace(tables_BN=pages.tables_BN[:0], lengths_B=pages.lengths_B[:0])
    assert kernels.decode(q[:0], nobody, seen).shape == (0, 2, 32)
    none = torch.zeros(0, 1, dtype=torch.int64, device=device)
    assert kernels.prefill(q[:0], nobody, kernels.Fed(none, none.sum(1)), seen).shape == (0, 2, 32)


@given(programs=st.integers(1, 20000), longest=st.integers(0, 500), processors=st.integers(1, 200))
def test_splits_are_a_power_of_two_that_leaves_each_a_tile(programs: int, longest: int, processors: int) -> None:
    from contraflow.model.kernels_attention import splits_for

    splits = splits_for(programs, longest, processors)
    assert splits & (splits - 1) == 0
    assert 1 <= splits <= max(min(longest, 64), 1)
    assert splits == 1 or programs * splits <= 16 * processors
