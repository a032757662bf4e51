"""Sinks and windows by their formula in float64: packed and over pages, in value and in gradient."""

import itertools
from collections.abc import Callable, Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contraflow.model.attention import PackedPlan, attend
from contraflow.model.cache import KVCache
from contraflow.model.decoder import Decoder
from contraflow.model.families import ModelConfig
from contraflow.model.paged import PagedPlan
from contraflow.model.sinks import Sight, sink_attention, sink_softmax

D = 8


def by_formula(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None) -> Tensor:
    """One sequence `[L, H, d]`, token by token and head by head."""
    out = []
    for token in range(len(q)):
        first = 0 if window is None else max(0, token + 1 - window)
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // k.shape[1])
            scores = k[first : token + 1, group] @ q[token, head] / D**0.5
            shares = torch.cat((scores, sinks[head : head + 1])).exp()
            out.append((shares[:-1, None] * v[first : token + 1, group]).sum(0) / shares.sum())
    return torch.stack(out).view(q.shape)


def drawn(tokens: int, heads: int, kv_heads: int, seed: int) -> list[Tensor]:
    noise = torch.Generator().manual_seed(seed)
    qkv = [torch.randn(tokens, n, D, generator=noise, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)]
    return [*qkv, torch.randn(heads, generator=noise, dtype=torch.float64) * 2]


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    window=st.sampled_from([None, 1, 3, 50]),
    seed=st.integers(0, 99),
)
def test_packed_values_and_gradients_are_those_of_the_formula(
    lengths: list[int], heads: tuple[int, int], window: int | None, seed: int
) -> None:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    leaves = [x.requires_grad_() for x in drawn(starts[-1], *heads, seed)]
    q, k, v, sinks = leaves
    pull = torch.linspace(-1, 1, q.numel(), dtype=torch.float64).view(q.shape)
    got = attend(q, k, v, PackedPlan.of(starts), Sight(sinks, window))
    wanted = torch.cat([by_formula(q[a:b], k[a:b], v[a:b], sinks, window) for a, b in itertools.pairwise(starts)])
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)
    grads, wanted_grads = torch.autograd.grad(got, leaves, pull), torch.autograd.grad(wanted, leaves, pull)
    torch.testing.assert_close(grads, wanted_grads, rtol=0, atol=1e-10)
    assert grads[3].abs().amax() > 0


def test_gradients_are_those_of_finite_differences() -> None:
    q, k, v, sinks = drawn(3, 4, 2, seed=1)
    leaves = [x.transpose(0, 1)[None].contiguous().requires_grad_() for x in (q, k, v)]
    mask = torch.zeros(1, 1, 3, 3, dtype=torch.float64).masked_fill(torch.ones(3, 3).triu(1).bool(), -1e9)
    assert torch.autograd.gradcheck(
        lambda q, k, v, s: sink_attention(q, k, v, mask, s), [*leaves, sinks.requires_grad_()]
    )


def test_a_sink_that_takes_nothing_is_plain_attention_and_one_that_takes_all_leaves_nothing() -> None:
    q, k, v, sinks = (x.float() for x in drawn(7, 4, 2, seed=0))
    plan = PackedPlan.of([0, 7])
    nothing, everything = torch.full_like(sinks, -1e4), torch.full_like(sinks, 1e4)
    torch.testing.assert_close(attend(q, k, v, plan, Sight(nothing, None)), attend(q, k, v, plan))
    assert not attend(q, k, v, plan, Sight(everything, None)).any()


def test_large_scores_do_not_overflow() -> None:
    shares = sink_softmax(torch.full((1, 1, 3), 3e4), torch.full((1, 1), 3e4))
    torch.testing.assert_close(shares, torch.full((1, 1, 3), 0.25))


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 13), min_size=1, max_size=4),
    window=st.sampled_from([None, 1, 4]),
    fed=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
)
def test_over_pages_it_is_the_formula_too(lengths: list[int], window: int | None, fed: int, seed: int) -> None:
    """The last tokens of each sequence against pages that already hold the others, one token each or several."""
    config = ModelConfig(family="llama", vocab=8, dim=8, layers=1, heads=4, kv_heads=2, head_dim=D, ffn=8, context=64)
    cache = KVCache(config, blocks=20, block_tokens=4, dtype=torch.float32, device="cpu")
    cache.pool.normal_(0, 10, generator=torch.Generator().manual_seed(seed))
    whole = [drawn(length, 4, 2, seed + i) for i, length in enumerate(lengths)]
    sinks = whole[0][3]
    tables = torch.arange(16).view(4, 4)[: len(lengths)]
    out: list[Tensor] = []
    splits = [max(length - fed, 0) for length in lengths]
    for firsts, lasts in (([0] * len(lengths), splits), (splits, lengths)):
        rows = [i for i in range(len(lengths)) if lasts[i] > firsts[i]]
        if not rows:
            continue
        q, k, v = (torch.cat([whole[i][j][firsts[i] : lasts[i]] for i in rows]).float() for j in range(3))
        positions = [(i, p) for i in rows for p in range(firsts[i], lasts[i])]
        slots = torch.tensor([int(tables[i, p // 4]) * 4 + p % 4 for i, p in positions])
        queries = torch.full((len(rows), max(lasts[i] - firsts[i] for i in rows)), -1)
        for n, (i, p) in enumerate(positions):
            queries[rows.index(i), p - firsts[i]] = n
        one_each = queries.shape[1] == 1
        ends = torch.tensor([lasts[i] for i in rows])
        plan = PagedPlan(cache, tables[rows], ends, slots, None if one_each else queries)
        out = list(attend(q, k, v, plan.layer(0), Sight(sinks.float(), window)))
    wanted = [by_formula(*w[:3], sinks, window)[split:] for w, split in zip(whole, splits, strict=True)]
    torch.testing.assert_close(torch.stack(out).double(), torch.cat(wanted), rtol=0, atol=1e-5)


def test_a_windowed_layer_forgets_what_is_far(
    make_decoder: Callable[..., Decoder], forward: Callable[..., Tensor]
) -> None:
    decoder = make_decoder("gpt_oss", layers=1, window=3, window_layers=(0,))
    tokens = torch.arange(9) * 7 % 40
    changed = tokens.clone()
    changed[2] += 1
    with torch.no_grad():
        moved = (forward(decoder, [tokens]) - forward(decoder, [changed])).abs().amax(1) > 1e-6
    assert moved.tolist() == [False, False, True, True, True, False, False, False, False]


def test_no_tokens_are_no_fault(make_decoder: Callable[..., Decoder]) -> None:
    nothing: Sequence[Tensor] = [torch.zeros(0, dtype=torch.int64)] * 2
    for family in ("gpt_oss", "deepseek_v3", "glm4_moe"):
        decoder = make_decoder(family)
        out = decoder(*nothing, PackedPlan.of([0]))
        assert out.shape == (0, 32)
        decoder.logits(out).sum().backward()  # a rank without a token has gradients like the others, all zero
        for name, weight in decoder.named_parameters():
            assert not weight.requires_grad or (weight.grad is not None and not weight.grad.any()), (family, name)
