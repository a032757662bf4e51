"""The block pool: no leak, no double use, capacity conserved, and a prefix found only while its contents stand."""

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from contraflow.model.blocks import BlockPool, Match
from contraflow.types import Version

V1, V2 = Version(0, 1), Version(0, 2)


def ids(*tokens: int) -> Any:
    return np.array(tokens, np.int32)


def test_a_released_block_is_given_again_and_too_many_are_refused() -> None:
    pool = BlockPool(3, 4)
    first = pool.allocate(3)
    assert sorted(first) == [0, 1, 2]
    assert pool.available == 0
    with pytest.raises(ValueError, match="1 blocks asked of a pool with 0"):
        pool.allocate(1)
    pool.release(first[:1])
    assert pool.allocate(1) == first[:1]


def test_releasing_twice_is_refused() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="more often"):
        pool.release(blocks)


def test_whole_blocks_of_a_common_prefix_are_found_and_the_rest_is_not() -> None:
    pool = BlockPool(8, 2)
    blocks = pool.allocate(3)
    pool.publish(V1, ids(1, 2, 3, 4, 5), blocks, tail=False)
    assert pool.match(V1, ids(1, 2, 3, 4, 5)) == Match(blocks[:2], None)
    assert pool.match(V1, ids(1, 2, 3, 9)) == Match(blocks[:1], None)
    assert pool.match(V1, ids(9, 2, 3, 4)) == Match([], None)
    assert pool.match(V1, ids()) == Match([], None)


def test_the_same_block_of_tokens_behind_another_prefix_is_another_block() -> None:
    pool = BlockPool(8, 2)
    blocks = pool.allocate(2)
    pool.publish(V1, ids(1, 2, 3, 4), blocks, tail=False)
    assert pool.match(V1, ids(7, 7, 3, 4)) == Match([], None)
    assert pool.match(V1, ids(3, 4)) == Match([], None)


def test_a_tail_is_found_only_for_the_very_same_prefix() -> None:
    pool = BlockPool(8, 4)
    blocks = pool.allocate(2)
    pool.publish(V1, ids(1, 2, 3, 4, 5, 6), blocks, tail=True)
    assert pool.match(V1, ids(1, 2, 3, 4, 5, 6)) == Match(blocks[:1], blocks[1])
    assert pool.match(V1, ids(1, 2, 3, 4, 5)) == Match(blocks[:1], None)
    assert pool.match(V1, ids(1, 2, 3, 4, 5, 6, 7)) == Match(blocks[:1], None)


def test_another_version_never_sees_a_prefix() -> None:
    pool = BlockPool(8, 2)
    pool.publish(V1, ids(1, 2), pool.allocate(1), tail=False)
    assert pool.match(V2, ids(1, 2)) == Match([], None)
    assert pool.match(None, ids(1, 2)) == Match([], None)


def test_idle_blocks_keep_their_contents_until_they_are_needed_oldest_first_and_deepest_first() -> None:
    pool = BlockPool(3, 1)
    old = pool.allocate(2)
    pool.publish(V1, ids(1, 2), old, tail=False)
    pool.release(old)
    young = pool.allocate(1)
    pool.publish(V1, ids(9), young, tail=False)
    pool.release(young)
    assert pool.available == 3
    assert pool.allocate(1) == [old[1]]  # the block behind, before the one it was built on
    assert pool.match(V1, ids(1, 2)) == Match(old[:1], None)
    pool.hold(old[:1])
    assert pool.allocate(1) == young
    assert pool.match(V1, ids(9)) == Match([], None)


def test_forget_frees_idle_blocks_and_leaves_held_ones_held() -> None:
    pool = BlockPool(4, 1)
    held, idle = pool.allocate(1), pool.allocate(1)
    pool.publish(V1, ids(1), held, tail=False)
    pool.publish(V1, ids(2), idle, tail=False)
    pool.release(idle)
    pool.forget()
    assert pool.match(V1, ids(1)) == pool.match(V1, ids(2)) == Match([], None)
    assert pool.available == 3
    pool.release(held)
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]


class PoolMachine(RuleBasedStateMachine):
    """Random owners against a model that remembers, per block, what was last written into it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6, 2)
        self.owners: list[tuple[Any, list[int]]] = []  # (tokens, blocks)
        self.written: dict[int, bytes] = {}  # block -> the whole prefix whose last chunk it holds

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=7), version=st.sampled_from([V1, V2]))
    def start(self, tokens: list[int], version: Version) -> None:
        prefix = ids(*tokens)
        match = self.pool.match(version, prefix)
        for i, block in enumerate(match.blocks):
            assert self.written[block].startswith(str(version).encode() + prefix[: 2 * i + 2].tobytes())
        if match.tail is not None:
            assert self.written[match.tail].startswith(str(version).encode() + prefix.tobytes())
        self.pool.hold(match.blocks)
        missing = -(-len(tokens) // 2) - len(match.blocks)
        if missing > self.pool.available:
            self.pool.release(match.blocks)
            return
        fresh = self.pool.allocate(missing)
        held = {b for _, blocks in self.owners for b in blocks} | set(match.blocks)
        assert not held & set(fresh)
        blocks = match.blocks + fresh
        for i, block in enumerate(blocks[len(match.blocks) :], start=len(match.blocks)):
            self.written[block] = str(version).encode() + prefix[: 2 * i + 2].tobytes()
        self.pool.publish(version, prefix, blocks, tail=True)
        self.owners.append((prefix, blocks))

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if self.owners:
            _, blocks = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
            self.pool.release(blocks)

    @rule()
    def refresh(self) -> None:
        self.pool.forget()

    @invariant()
    def capacity_is_conserved(self) -> None:
        held = [b for _, blocks in self.owners for b in blocks]
        assert self.pool.available == 6 - len(set(held))
        for block in range(6):
            assert self.pool.references(block) == held.count(block)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
