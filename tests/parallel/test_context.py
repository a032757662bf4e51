"""Sequences whose tokens lie on several ranks: every token held once, work even, attention that of one rank."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contraflow.errors import ModelError
from contraflow.model.attention import LayerPlan, PackedPlan
from contraflow.model.decoder import new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.router import RouterTape
from contraflow.model.sinks import Sight
from contraflow.parallel.context import ContextPlan, held, pieces, share
from contraflow.train.forward import Reading, feed, score
from contraflow.types import Batch

RANKS = st.integers(1, 5)
LENGTHS = st.lists(st.integers(1, 30), max_size=6)


def starts_of(lengths: Sequence[int]) -> list[int]:
    return np.cumsum([0, *lengths]).tolist()


class ThreadExchange:
    """Ranks as threads: a table of what each sends, read once all have written."""

    def __init__(self, place: int, table: list[list[Tensor]], barrier: Barrier) -> None:
        self.place, self.size = place, len(table)
        self._table, self._barrier = table, barrier

    def begin(self, sent_SB: Tensor, send: Sequence[int], receive: Sequence[int]) -> Callable[[], Tensor]:
        self._table[self.place] = list(sent_SB.split(list(send)))
        self._barrier.wait(timeout=30)
        got = torch.cat([parts[self.place] for parts in self._table])
        self._barrier.wait(timeout=30)
        assert len(got) == sum(receive)
        return lambda: got


def on_ranks(ranks: int, work: Callable[[ThreadExchange], object]) -> list[object]:
    table, barrier = [list[Tensor]() for _ in range(ranks)], Barrier(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        jobs = [pool.submit(work, ThreadExchange(rank, table, barrier)) for rank in range(ranks)]
        return [job.result(timeout=60) for job in jobs]


@given(lengths=LENGTHS, ranks=RANKS)
def test_every_token_is_held_by_exactly_one_rank_and_in_order(lengths: list[int], ranks: int) -> None:
    starts = starts_of(lengths)
    parts = [held(starts, ranks, rank).tolist() for rank in range(ranks)]
    assert sorted(token for part in parts for token in part) == list(range(sum(lengths)))
    assert all(part == sorted(part) for part in parts)


@given(length=st.integers(1, 3000), ranks=RANKS)
def test_the_work_of_causal_attention_is_even(length: int, ranks: int) -> None:
    """Pairs of (query, key) differ by less than the rounding of two chunk borders can make: two rows of keys."""
    work = [
        sum((p.end - p.start) * (p.start + p.end + 1) // 2 for p in pieces([length], ranks, rank))
        for rank in range(ranks)
    ]
    assert max(work) - min(work) <= 2 * length


def test_short_sequences_are_spread_over_ranks() -> None:
    counts = [held(starts_of([1] * 12), 4, rank).size for rank in range(4)]
    assert counts == [3, 3, 3, 3]


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, ranks=RANKS, seed=st.integers(0, 99), sinks=st.booleans(), window=st.sampled_from([None, 1, 4]))
def test_attention_and_its_gradients_are_those_of_one_rank(
    lengths: list[int], ranks: int, seed: int, sinks: bool, window: int | None
) -> None:
    starts, noise = starts_of(lengths), torch.Generator().manual_seed(seed)
    q, k, v, pull = (torch.randn(sum(lengths), heads, 4, generator=noise).double() for heads in (4, 2, 2, 4))
    sinks_H = torch.randn(4, generator=noise).double()

    def attend(plan: LayerPlan, leaves: list[Tensor]) -> Tensor:
        return plan.attend(*leaves[:3], Sight(leaves[3], window)) if sinks else plan.attend(*leaves[:3])

    whole = [x.clone().requires_grad_() for x in (q, k, v, sinks_H)]
    wanted = attend(PackedPlan(starts), whole)
    wanted_grads = torch.autograd.grad(wanted, whole, pull, materialize_grads=True)

    def work(exchange: ThreadExchange) -> list[Tensor]:
        here = torch.from_numpy(held(starts, ranks, exchange.place))
        mine = [*(x[here].requires_grad_() for x in (q, k, v)), sinks_H.clone().requires_grad_()]
        plan = ContextPlan(starts, exchange)
        assert plan.tokens == len(here)
        out = attend(plan.layer(0), mine)
        return [here, out.detach(), *torch.autograd.grad(out, mine, pull[here], materialize_grads=True)]

    by_rank = on_ranks(ranks, work)
    *wanted_parts, wanted_sinks = (wanted, *wanted_grads)
    for here, *found, _ in by_rank:
        for part, of in zip(found, wanted_parts, strict=True):
            torch.testing.assert_close(part, of[here], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(parts[-1] for parts in by_rank), wanted_sinks, rtol=1e-12, atol=1e-12)


def test_a_sequence_without_tokens_is_refused() -> None:
    with pytest.raises(ModelError, match="no sequence may be empty"):
        on_ranks(1, lambda exchange: ContextPlan([0, 3, 3], exchange))


def batch_of(lengths: Sequence[int], seed: int) -> Batch:
    """Random tokens, half of them trained; the first of a sequence never is."""
    rng, starts = np.random.default_rng(seed), np.cumsum([0, *lengths]).astype(np.int32)
    mask = rng.random(sum(lengths)) < 0.5
    mask[starts[:-1]] = False
    zeros = np.zeros(sum(lengths), np.float32)
    return Batch(
        tokens=rng.integers(0, 11, sum(lengths), np.int32),
        positions=np.concatenate([np.zeros(0, np.int32), *(np.arange(n, dtype=np.int32) for n in lengths)]),
        starts=starts,
        mask=mask,
        behaviour=zeros,
        advantages=zeros,
        weights=np.where(mask, rng.random(sum(lengths)), 0).astype(np.float32),
        versions=zeros.astype(np.int32),
    )


@given(lengths=st.lists(st.integers(2, 20), max_size=5), ranks=RANKS, seed=st.integers(0, 99))
def test_every_trained_token_is_trained_by_the_rank_that_holds_its_predecessor(
    lengths: list[int], ranks: int, seed: int
) -> None:
    batch, trained = batch_of(lengths, seed), Counter[int]()
    fed = [token for start, end in itertools.pairwise(batch.starts) for token in range(start, end - 1)]
    for rank in range(ranks):
        part = share(batch, ranks, rank)
        predictors = {fed[f] for f in held(starts_of([n - 1 for n in lengths]), ranks, rank)}
        assert {t - 1 for t in np.flatnonzero(part.mask).tolist()} <= predictors
        assert np.array_equal(part.weights, np.where(part.mask, batch.weights, 0))
        trained.update(np.flatnonzero(part.mask).tolist())
    assert trained == Counter(np.flatnonzero(batch.mask).tolist())


@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.integers(2, 12), max_size=4), ranks=st.integers(2, 4), seed=st.integers(0, 99))
def test_losses_gradients_and_loads_of_all_ranks_add_up_to_those_of_one(
    lengths: list[int], ranks: int, seed: int
) -> None:
    """Also where a rank holds no token at all, down to a batch without any."""
    config = ModelConfig(
        family="qwen3_moe", vocab=11, dim=16, layers=2, heads=2, kv_heads=1, head_dim=8, experts=4, top_k=2,
        expert_ffn=8, renormalise=True,
    )  # fmt: skip
    decoder = new_decoder(config, seed=1, std=0.2)
    batch, device = batch_of(lengths, seed), torch.device("cpu")

    def outcome(part: Batch, exchange: ThreadExchange | None) -> list[Tensor]:
        tape, fed = RouterTape(), feed(part, device, exchange)
        scored = score(decoder, fed, Reading(0.7), tape=tape)
        weights_N = torch.from_numpy(part.weights[part.mask])
        loss = (weights_N * scored.logprobs_N).sum() + 0.1 * tape.balance_loss(loads_ME=2 * loads_ME, tokens=100)
        grads = torch.autograd.grad(loss, list(decoder.parameters()), materialize_grads=True)
        return [loss.detach(), tape.loads(), *grads]

    loads_ME = torch.arange(8).view(2, 4)
    whole = outcome(batch, None)
    parts = on_ranks(ranks, lambda exchange: outcome(share(batch, ranks, exchange.place), exchange))
    for wanted, *found in zip(whole, *parts, strict=True):
        torch.testing.assert_close(sum(found), wanted, rtol=1e-5, atol=1e-5)
