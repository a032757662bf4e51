"""C kernels for a CPU equal their formulas in float64, read and write nothing else, and lose no NaN."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from contraflow.errors import ModelError
from contraflow.model.cache import KVCache
from contraflow.model.decoder import Decoder
from contraflow.model.families import ModelConfig
from contraflow.model.kernels_cpu import build, built
from contraflow.model.kinds import FAMILIES
from contraflow.model.paged import KernelPlan, Kernels, Pages, Placing, Seen, Target
from tests.model import pages

EPS, ATOL = 1e-3, 1e-5
LENGTHS = st.lists(st.sampled_from([0, 1, 2, 7, 8, 9, 15, 16, 17, 33, 50]), max_size=4)
SHAPES = [(2, 2, 32, 16), (1, 8, 128, 16), (3, 1, 24, 3), (2, 3, 5, 8), (4, 1, 36, 1), (1, 4, 64, 9)]  # G, s, d, BS
DRAWN = settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate])


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    made = built()
    if isinstance(made, str):
        pytest.skip(made)
    return made


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("window", "sunk"), [(None, False), (5, False), (None, True), (1, True)])
def test_decoding_is_the_formula_whatever_lies_behind_a_sequence(
    kernels: Kernels, shape: tuple[int, int, int, int], window: int | None, sunk: bool
) -> None:
    groups, share, dim, size = shape

    @DRAWN
    @given(lengths=LENGTHS, seed=st.integers(0, 99), scale=st.sampled_from([0.0, 1.0, 30.0]))
    def law(lengths: list[int], seed: int, scale: float) -> None:
        noise = torch.Generator().manual_seed(seed)
        width = max((-(-length // size) for length in lengths), default=0) + 1
        blocks = len(lengths) * width + 1
        pool = torch.randn(blocks, 2, groups, size, dim, generator=noise)
        wide = (
            torch.randperm(blocks - 1, generator=noise).view(len(lengths), width) if lengths else torch.empty(0, width)
        )
        tables = torch.cat((wide.long(), torch.full((len(lengths), 3), blocks - 1)), 1)[:, :width]  # rows lie apart
        unseen = (
            torch.arange(width * size) >= torch.tensor(lengths)[:, None] if lengths else torch.empty(0, width * size)
        )
        for row, table in enumerate(tables.tolist()):
            for place in unseen[row].nonzero()[:, 0].tolist():
                pool[table[place // size], :, :, place % size] = float("nan")
        q = torch.randn(len(lengths), groups * share, dim, generator=noise) * scale
        sinks = torch.randn(groups * share, generator=noise) if sunk else None
        held = Pages(pool.flatten(0, 2).flatten(1), tables, torch.tensor(lengths, dtype=torch.int64), groups, size)
        out = kernels.decode(q, held, Seen(sinks, window))
        assert out.shape == q.shape
        for row, length in enumerate(lengths):
            wanted = by_formula(q[row], pool[tables[row]], length, window, sinks)
            torch.testing.assert_close(out[row].double(), wanted, rtol=0, atol=ATOL)

    law()


def by_formula(q: Tensor, pool: Tensor, length: int, window: int | None, sinks: Tensor | None) -> Tensor:
    """One token's heads `[H, d]` against `pool` `[N, 2, G, BS, d]`, in float64."""
    first, out = max(length - window, 0) if window else 0, torch.zeros(q.shape, dtype=torch.float64)
    k, v = pool.double().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, first:length]
    for head in range(len(q)):
        if length:
            group = head // (len(q) // len(k))
            scores = k[group] @ q[head].double() / q.shape[1] ** 0.5
            drain = scores.new_zeros(0) if sinks is None else sinks[head : head + 1].double()
            out[head] = torch.cat((scores, drain)).softmax(0)[: len(scores)] @ v[group]
    return out


@pytest.mark.parametrize("spoiled", [float("nan"), float("inf")])
def test_what_is_no_number_stays_so_in_its_own_row_only(kernels: Kernels, spoiled: float) -> None:
    pool = torch.randn(2, 2, 1, 16, 32)
    pool[0, 0, 0, 3] = spoiled
    held = Pages(pool.flatten(0, 2).flatten(1), torch.tensor([[0], [1]]), torch.tensor([11, 16]), 1, 16)
    out = kernels.decode(torch.randn(2, 2, 32), held, Seen(None, None))
    assert out[0].isnan().any()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("norm", ["none", "head", "projection"])
@pytest.mark.parametrize(
    ("heads", "groups", "dim", "turned", "size", "clip"),
    [(4, 4, 128, 128, 16, None), (6, 2, 24, 8, 3, 0.7), (8, 1, 64, 64, 16, None), (6, 3, 10, 10, 1, 0.2)],
)
def test_placing_is_the_formula_and_touches_no_other_slot(
    kernels: Kernels, norm: str, heads: int, groups: int, dim: int, turned: int, size: int, clip: float | None
) -> None:
    @DRAWN
    @given(tokens=st.integers(0, 5), seed=st.integers(0, 99))
    def law(tokens: int, seed: int) -> None:
        noise = torch.Generator().manual_seed(seed)
        qkv = torch.randn(tokens, heads + 2 * groups, dim, generator=noise)
        angles = torch.rand(tokens, 1, turned, generator=noise) * 6
        shape = {"none": None, "head": (2, dim), "projection": ((heads + groups) * dim,)}[norm]
        weight = None if shape is None else torch.rand(shape, generator=noise) + 0.5
        pool = torch.randn(7, 2, groups, size, dim, generator=noise)
        slots = torch.randperm(7 * size, generator=noise)[:tokens]
        layer = pool.flatten(0, 2).flatten(1).clone()
        q = kernels.place(
            qkv.clone(), angles.cos(), angles.sin(), Placing(weight, EPS, clip), Target(layer, slots, size),
            kv_heads=groups,
        )  # fmt: skip
        parts = qkv.double().split([heads, groups, groups], 1)
        wanted_q, wanted_k = (turned_by(parts[kind], angles.double(), weight, kind, clip) for kind in (0, 1))
        wanted_v = parts[2] if clip is None else parts[2].clamp(-clip, clip)
        wanted = pool.double()
        for token, slot in enumerate(slots.tolist()):
            wanted[slot // size, 0, :, slot % size] = wanted_k[token]
            wanted[slot // size, 1, :, slot % size] = wanted_v[token]
        torch.testing.assert_close(q.double(), wanted_q, rtol=0, atol=ATOL)
        torch.testing.assert_close(layer.double().view(pool.shape), wanted, rtol=0, atol=ATOL)

    law()


def turned_by(x: Tensor, angles: Tensor, norm: Tensor | None, kind: int, clip: float | None) -> Tensor:
    """Queries (kind 0) or keys (1) `[T, n, d]`, in float64; angles `[T, 1, r]` are each dimension's own."""
    if norm is not None and norm.ndim == 2:
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * norm[kind].double()
    elif norm is not None:
        width = x.shape[1] * x.shape[2]
        weight = (norm[:width] if kind == 0 else norm[-width:]).double()
        x = (x.flatten(1) / (x.flatten(1).square().mean(-1, keepdim=True) + EPS).sqrt() * weight).view_as(x)
    x = x if clip is None else x.clamp(-clip, clip)
    turned = angles.shape[-1]
    part = x[..., :turned]
    return torch.cat((part * angles.cos() + part.roll(turned // 2, -1) * angles.sin(), x[..., turned:]), -1)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_by_kernels_equals_the_packed_forward_for_every_family(
    kernels: Kernels, family: str, make_decoder: Callable[..., Decoder], forward: Callable[..., Tensor]
) -> None:
    decoder, lengths = make_decoder(family), [21, 1, 8]
    tokens = pages.sequences(lengths)

    def plan(cache: KVCache, tables: Tensor, lengths: Tensor, slots: Tensor, _: Tensor | None) -> KernelPlan:
        return KernelPlan(cache, tables, lengths, slots, kernels=kernels)

    with torch.inference_mode():
        decoded = pages.Pages(decoder, lengths, 4, 1, plan).one_by_one(tokens)
        torch.testing.assert_close(decoded, forward(decoder, tokens), rtol=0, atol=1e-4)


def test_several_tokens_of_a_sequence_are_refused(kernels: Kernels, make_config: Callable[..., ModelConfig]) -> None:
    config = make_config("llama")
    cache = KVCache(config, blocks=2, block_tokens=4, dtype=torch.float32, device="cpu")
    one = torch.ones(1, dtype=torch.int64)
    plan = KernelPlan(cache, torch.zeros(1, 1, dtype=torch.int64), one, one, torch.zeros(1, 1).long(), kernels)
    with pytest.raises(ModelError, match="one token a sequence"):
        plan.attend(torch.zeros(1, config.heads, config.head_dim), cache.layers[0][0], None)


def test_a_machine_without_a_compiler_is_told_so() -> None:
    assert build(["no-such-compiler"]) == "no C compiler: none of no-such-compiler is on the PATH"


def test_a_compiler_that_fails_or_builds_nothing_is_named() -> None:
    assert "false gave 1: and said nothing" in str(build(["no-such-compiler", "false"]))
    assert "true gave no library" in str(build(["true"]))


@pytest.mark.parametrize(
    ("experts", "choices", "dim", "ffn"), [(8, 2, 64, 96), (3, 3, 8, 16), (1, 1, 24, 8), (5, 2, 16, 8)]
)
def test_experts_are_their_formula(kernels: Kernels, experts: int, choices: int, dim: int, ffn: int) -> None:
    @DRAWN
    @given(tokens=st.integers(0, 40), seed=st.integers(0, 99), large=st.sampled_from([1.0, 40.0]), skew=st.booleans())
    def law(tokens: int, seed: int, large: float, skew: bool) -> None:
        noise = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, dim, generator=noise) * large
        ids = torch.randint(-1, 1 if skew else experts, (tokens, choices), generator=noise)  # -1: none
        weights = torch.rand(tokens, choices, generator=noise)
        gate_up = torch.randn(experts, 2 * ffn, dim, generator=noise) / dim**0.5
        down = torch.randn(experts, dim, ffn, generator=noise) / ffn**0.5
        out = kernels.experts(x, ids, weights, gate_up, down)
        wanted = torch.zeros(tokens, dim, dtype=torch.float64)
        for token, row in enumerate(ids.tolist()):
            for choice, expert in enumerate(row):
                if expert >= 0:
                    gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
                    hidden = gate / (1 + (-gate).exp()) * up
                    wanted[token] += weights[token, choice].double() * (down[expert].double() @ hidden)
        torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5 * large**2)

    law()


def test_an_expert_of_no_number_spoils_its_own_tokens_only(kernels: Kernels) -> None:
    x, ids = torch.randn(5, 8), torch.tensor([[0], [1], [0], [1], [1]])
    gate_up, down = torch.randn(2, 16, 8), torch.randn(2, 8, 8)
    gate_up[1, 3, 2] = float("nan")
    out = kernels.experts(x, ids, torch.ones(5, 1), gate_up, down)
    assert out[ids[:, 0] == 1].isnan().all()
    assert out[ids[:, 0] == 0].isfinite().all()
