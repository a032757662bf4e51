"""Packed and paged attention are two plans of one function, and no sequence sees another."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contraflow.errors import ModelError
from contraflow.model.attention import PackedPlan, _rectangles, attend
from contraflow.model.cache import KVCache
from contraflow.model.decoder import Decoder
from contraflow.model.paged import PagedPlan
from tests.model.pages import Pages, sequences

Forward = Callable[[Decoder, Sequence[Tensor]], Tensor]
LENGTHS = st.lists(st.integers(1, 13), min_size=1, max_size=6)


@settings(max_examples=20, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_a_packed_sequence_comes_out_as_if_alone(
    lengths: list[int], seed: int, make_decoder: Callable[..., Decoder], forward: Forward
) -> None:
    decoder = make_decoder("qwen3_moe")
    tokens = sequences(lengths, seed)
    with torch.no_grad():
        alone = torch.cat([forward(decoder, [row]) for row in tokens])
        torch.testing.assert_close(forward(decoder, tokens), alone, rtol=0, atol=2e-5)


@settings(max_examples=15, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_gradients_of_packed_sequences_are_those_of_each_alone(
    lengths: list[int], seed: int, make_decoder: Callable[..., Decoder], forward: Forward
) -> None:
    decoder = make_decoder("llama", layers=1)
    tokens = sequences(lengths, seed)
    pull = torch.linspace(-1, 1, sum(lengths) * 32).view(-1, 32)
    packed = torch.autograd.grad(forward(decoder, tokens), [*decoder.layers.parameters()], pull)
    alone = torch.cat([forward(decoder, [row]) for row in tokens])
    wanted = torch.autograd.grad(alone, [*decoder.layers.parameters()], pull)
    torch.testing.assert_close(packed, wanted, rtol=1e-4, atol=1e-4)


def test_a_token_sees_what_came_before_and_nothing_after(
    make_decoder: Callable[..., Decoder], forward: Forward
) -> None:
    decoder = make_decoder("mixtral")
    (tokens,) = sequences([9])
    changed = tokens.clone()
    changed[5] = (changed[5] + 1) % 40
    with torch.no_grad():
        moved = (forward(decoder, [tokens]) - forward(decoder, [changed])).abs().amax(1) > 1e-6
    assert moved.tolist() == [False] * 5 + [True] * 4


@settings(max_examples=20, deadline=None)
@given(lengths=LENGTHS, block_tokens=st.sampled_from([1, 3, 16]), seed=st.integers(0, 99))
@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss"])
def test_decoding_token_by_token_equals_the_packed_forward(
    family: str,
    lengths: list[int],
    block_tokens: int,
    seed: int,
    make_decoder: Callable[..., Decoder],
    forward: Forward,
) -> None:
    decoder, tokens = make_decoder(family), sequences(lengths, seed)
    with torch.inference_mode():
        pages = Pages(decoder, lengths, block_tokens, seed)
        paged = pages.one_by_one(tokens)
        torch.testing.assert_close(paged, forward(decoder, tokens), rtol=0, atol=5e-5)


@settings(max_examples=15, deadline=None)
@given(lengths=LENGTHS, chunk=st.integers(1, 7), block_tokens=st.sampled_from([1, 4]), seed=st.integers(0, 99))
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_prefill_in_chunks_of_any_size_equals_the_packed_forward(
    family: str,
    lengths: list[int],
    chunk: int,
    block_tokens: int,
    seed: int,
    make_decoder: Callable[..., Decoder],
    forward: Forward,
) -> None:
    decoder, tokens = make_decoder(family), sequences(lengths, seed)
    with torch.inference_mode():
        pages = Pages(decoder, lengths, block_tokens, seed)
        paged = pages.in_chunks(tokens, chunk)
        torch.testing.assert_close(paged, forward(decoder, tokens), rtol=0, atol=5e-5)


def test_sequences_may_share_the_blocks_of_a_common_prefix(
    make_decoder: Callable[..., Decoder], forward: Forward
) -> None:
    decoder = make_decoder("qwen3_moe")
    (prefix,) = sequences([8])
    tails = sequences([3, 3], seed=1)
    with torch.inference_mode():
        whole = [torch.cat((prefix, tail)) for tail in tails]
        pages = Pages(decoder, [11, 11], 4, seed=0)
        pages.feed(whole, [8, 0])
        pages.tables[1][:2] = pages.tables[0][:2]
        pages.done[1] = 8
        pages.feed(whole, [3, 3])
        shared = torch.stack(pages.hidden[0] + pages.hidden[1])
        torch.testing.assert_close(
            shared, torch.cat([forward(decoder, [whole[0]]), forward(decoder, [whole[1]])[8:]]), rtol=0, atol=5e-5
        )


def test_padding_rows_give_finite_numbers_and_leave_the_others_alone(make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder("qwen3_moe")
    with torch.inference_mode():
        caches = [
            KVCache(decoder.config, blocks=3, block_tokens=4, dtype=torch.float32, device="cpu") for _ in range(2)
        ]
        plain = PagedPlan(caches[0], torch.tensor([[1]]), torch.tensor([1]), torch.tensor([4]))
        wanted = decoder(torch.tensor([5]), torch.tensor([0]), plain)
        padded = PagedPlan(caches[1], torch.tensor([[1], [0]]), torch.tensor([1, 0]), torch.tensor([4, 0]))
        got = decoder(torch.tensor([5, 0]), torch.tensor([0, 0]), padded)
    assert got.isfinite().all()
    torch.testing.assert_close(got[:1], wanted, rtol=0, atol=5e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_attend_is_softmax_attention_by_its_formula(heads: int, kv_heads: int) -> None:
    noise = torch.Generator().manual_seed(heads)
    q, k, v = (torch.randn(7, n, 8, generator=noise, dtype=torch.float64) for n in (heads, kv_heads, kv_heads))
    out = attend(q.float(), k.float(), v.float(), PackedPlan.of([0, 3, 4, 7]))
    for start, end in ((0, 3), (3, 4), (4, 7)):
        for token in range(start, end):
            for head in range(heads):
                group = head // (heads // kv_heads)
                scores = k[start : token + 1, group] @ q[token, head] / 8**0.5
                wanted = scores.softmax(0) @ v[start : token + 1, group]
                torch.testing.assert_close(out[token, head].double(), wanted, rtol=0, atol=1e-5)


@given(lengths=st.lists(st.integers(1, 3000), max_size=40))
def test_padding_never_doubles_the_tokens(lengths: list[int]) -> None:
    rectangles, firsts = _rectangles(lengths)
    assert sum(rows * width for rows, width in rectangles) <= 2 * sum(lengths)
    places = sorted((first, first + length) for first, length in zip(firsts, lengths, strict=True))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))


@pytest.mark.parametrize("starts", [[0, 3, 3], [0, 3, 2], [1, 3], []])
def test_starts_that_name_an_empty_sequence_are_refused(starts: list[int]) -> None:
    with pytest.raises(ModelError, match="starts"):
        PackedPlan.of(starts)


def test_no_tokens_at_all_are_no_fault(make_decoder: Callable[..., Decoder]) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    assert make_decoder("qwen3_moe")(nothing, nothing, PackedPlan.of([0])).shape == (0, 32)


def test_starts_may_be_a_tensor() -> None:
    assert PackedPlan.of(torch.tensor([0, 3, 7])).tokens == 7


def test_paged_tensors_that_do_not_fit_are_refused(make_config: Callable[..., Any]) -> None:
    cache = KVCache(make_config("llama"), blocks=2, block_tokens=4, dtype=torch.float32, device="cpu")
    with pytest.raises(ModelError, match="must be"):
        PagedPlan(cache, torch.zeros(2, 1), torch.ones(3), torch.zeros(3))
    with pytest.raises(ModelError, match="queries_BQ"):
        PagedPlan(cache, torch.zeros(2, 1), torch.ones(2), torch.zeros(3))
    with pytest.raises(ModelError, match="holds nothing"):
        KVCache(make_config("llama"), blocks=0, block_tokens=4, dtype=torch.float32, device="cpu")
