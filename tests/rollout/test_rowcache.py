"""Keys and values row by row: the same attention as over pages, and the same contents after every move."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contraflow.model.cache import KVCache
from contraflow.model.families import ModelConfig
from contraflow.model.paged import PagedPlan
from contraflow.model.sinks import Sight
from contraflow.rollout.rowcache import RowCache, RowPlan

LAYERS, HEADS, HEAD_DIM, PAGE, CONTEXT = 2, 4, 6, 4, 20


def config(kv_heads: int) -> ModelConfig:
    shape = {"family": "qwen3", "vocab": 8, "dim": 8, "ffn": 8, "heads": HEADS, "head_dim": HEAD_DIM}
    return ModelConfig(**shape, layers=LAYERS, kv_heads=kv_heads)


def caches(kv_heads: int, rows: int) -> tuple[KVCache, RowCache]:
    pages = KVCache(config(kv_heads), blocks=41, block_tokens=PAGE, dtype=torch.float32, device="cpu")
    pages.pool.copy_(torch.randn(pages.pool.shape, generator=torch.Generator().manual_seed(0)))
    return pages, RowCache(pages, rows, CONTEXT)


def tables(lengths: list[int]) -> list[list[int]]:
    """Disjoint pages in no order."""
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
    return [[order.pop() for _ in range(-(-length // PAGE))] for length in lengths]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[1], [4, 5], [17, 1, 20, 8, 9]])
def test_attention_over_rows_equals_attention_over_pages(kv_heads: int, lengths: list[int]) -> None:
    pages, rows = caches(kv_heads, 8)
    held = tables(lengths)
    rows.fill(0, held[:1])
    if held[1:]:
        rows.fill(1, held[1:])
    padding = 8 - len(lengths)
    lengths_B = torch.tensor(lengths + [0] * padding)
    positions_B = (lengths_B - 1).clamp_min(0)
    width = max(map(len, held))
    tables_BN = torch.tensor([[*t, *[40] * (width - len(t))] for t in held] + [[40] * width] * padding)
    slots_B = tables_BN.gather(1, (positions_B // PAGE)[:, None])[:, 0] * PAGE + positions_B % PAGE
    over_pages = PagedPlan(pages, tables_BN, lengths_B, slots_B)
    over_rows = RowPlan(rows, positions_B, lengths_B, width * PAGE)
    noise = torch.Generator().manual_seed(2)
    sinks = torch.randn(HEADS, generator=noise)
    for layer, sight in itertools.product(range(LAYERS), (None, Sight(sinks, None), Sight(sinks, 3), Sight(sinks, 1))):
        q, k, v = (torch.randn(8, heads, HEAD_DIM, generator=noise) for heads in (HEADS, kv_heads, kv_heads))
        wanted, given = (plan.layer(layer).attend(q, k, v, sight) for plan in (over_pages, over_rows))
        torch.testing.assert_close(given[: len(lengths)], wanted[: len(lengths)], atol=1e-5, rtol=0)
        assert torch.isfinite(given).all()


def test_attention_over_rows_equals_the_formula() -> None:
    _, rows = caches(2, 1)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    noise = torch.Generator().manual_seed(3)
    for position in range(CONTEXT):
        q, k, v = (torch.randn(1, heads, HEAD_DIM, generator=noise) for heads in (HEADS, 2, 2))
        kept.append((k[0], v[0]))
        longest = -(-(position + 1) // PAGE) * PAGE
        plan = RowPlan(rows, torch.tensor([position]), torch.tensor([position + 1]), longest)
        out = plan.layer(1).attend(q, k, v)[0]
        keys, values = (torch.stack(x).double() for x in zip(*kept, strict=True))
        for head in range(HEADS):
            scores = keys[:, head // 2] @ q[0, head].double() / math.sqrt(HEAD_DIM)
            torch.testing.assert_close(out[head].double(), scores.softmax(0) @ values[:, head // 2], atol=1e-5, rtol=0)


def test_pages_that_go_back_hold_what_the_rows_held_and_no_other_page_changes() -> None:
    pages, rows = caches(2, 3)
    held = tables([20, 20, 20])
    rows.fill(0, held)
    before = pages.pool.clone()
    rows.store.mul_(2)
    rows.spill([2, 0, 2], [1, 4, 3], [held[2][1], held[0][4], held[2][3]])
    changed = [held[2][1], held[0][4], held[2][3]]
    same = [block for block in range(41) if block not in changed]
    assert torch.equal(pages.pool[:, changed], before[:, changed] * 2)
    assert torch.equal(pages.pool[:, same], before[:, same])


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, CONTEXT), min_size=2, max_size=5), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)))
)
def test_rows_can_move_and_still_give_their_pages_back(lengths: list[int], moves: list[tuple[int, int]]) -> None:
    pages, rows = caches(1, 5)
    held = tables(lengths)
    rows.fill(0, held)
    owner: list[int | None] = [*range(len(held)), *[None] * (5 - len(held))]
    for source, target in moves:
        if owner[source] is not None and source != target:
            rows.move(source, target, len(held[owner[source]]) * PAGE)
            owner[target] = owner[source]
    before = pages.pool.clone()
    pages.pool.zero_()
    back = [(row, page, block) for row, o in enumerate(owner) if o is not None for page, block in enumerate(held[o])]
    rows.spill(*zip(*back, strict=True))
    blocks = sorted({block for _, _, block in back})
    assert torch.equal(pages.pool[:, blocks], before[:, blocks])


def test_rows_keep_what_they_hold_when_the_longest_of_them_changes_and_hold_zeros_behind_it() -> None:
    _, rows = caches(2, 3)
    held = tables([6, 18])
    rows.fill(0, held[:1])
    assert rows.positions == 8
    first = rows.store[:, :, 0].clone()
    rows.store[:, :, 1:] = torch.nan  # whoever had these rows before
    rows.fill(1, held[1:])
    assert rows.positions == 20
    assert torch.equal(rows.store[:, :, 0, :, :8], first)
    assert not rows.store[:, :, 0, :, 8:].any()
    rows.fit(1, 16)
    assert rows.positions == 20
    rows.fit(1, 12)
    assert rows.positions == 12
    assert torch.equal(rows.store[:, :, 0, :, :8], first)
    rows.fill(1, held[:1])
    assert torch.equal(rows.store[:, :, 1, :, :8], first)
    assert not rows.store[:, :, 1, :, 8:].any()
