"""The scheduler with a fake model: all that is submitted is finished, no budget is exceeded, prefixes are shared."""

from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from contraflow.model.blocks import BlockPool
from contraflow.rollout.schedule import Plan, Scheduler, Sequence
from contraflow.types import Request, Version

V1 = Version(0, 1)
BLOCK = 4


class Rig:
    """Runs plans as an engine would, checking each; K/V is a dict from (block, offset) to the prefix it stands for."""

    def __init__(self, *, blocks: int, max_sequences: int = 8, prefill_tokens: int = 32) -> None:
        self.pool = BlockPool(blocks, BLOCK)
        self.scheduler = Scheduler(self.pool, max_sequences=max_sequences, prefill_tokens=prefill_tokens)
        self.blocks, self.max_sequences, self.prefill_tokens = blocks, max_sequences, prefill_tokens
        self.kv: dict[tuple[int, int], bytes] = {}
        self.version = V1
        self.finished: list[int] = []
        self.arrivals = 0

    def submit(self, prompt: Rows[int], new: int) -> Sequence:
        tokens = np.zeros(len(prompt) + new, np.int32)
        tokens[: len(prompt)] = prompt
        request = Request(id=str(self.arrivals), prompt=tokens[: len(prompt)].copy(), seed=0, max_new_tokens=new)
        sequence = Sequence(
            request=request,
            arrival=self.arrivals,
            tokens=tokens,
            logprobs=np.zeros(new, np.float32),
            length=len(prompt),
            limit=new,
        )
        assert self.scheduler.fits(len(prompt) + new - 1)
        self.arrivals += 1
        self.scheduler.submit(sequence)
        return sequence

    def step(self) -> Plan:
        scheduler = self.scheduler
        for sequence in sorted(scheduler.decoding.values(), key=lambda s: s.arrival):
            while sequence.arrival in scheduler.decoding and sequence.length > len(sequence.blocks) * BLOCK:
                if not scheduler.grow(sequence):
                    scheduler.preempt(scheduler.youngest(), self.version)
        plan = scheduler.plan(self.version)
        self.check(plan)
        for chunk in plan.chunks:  # all writes of a layer come before its reads
            for position in range(chunk.start, chunk.end):
                self.write(chunk.sequence, position)
        for chunk in plan.chunks:
            self.read(chunk.sequence, chunk.end)
        copies = {(to, i): self.kv[frm, i] for frm, to in plan.copies for i in range(BLOCK) if (frm, i) in self.kv}
        self.kv |= copies
        scheduler.settle()
        for sequence in list(scheduler.decoding.values()):
            self.decode(sequence)
        return plan

    def check(self, plan: Plan) -> None:
        assert self.scheduler.active <= self.max_sequences
        if plan.chunks:
            longest = max(chunk.end - chunk.start for chunk in plan.chunks)
            assert longest == plan.longest
            assert len(plan.chunks) * longest <= self.prefill_tokens
        held = {b for s in self.active() for b in s.blocks} | {source for source, _ in plan.copies}
        assert self.pool.available == self.blocks - len(held)
        writers = [s.blocks[p // BLOCK] for s in self.scheduler.decoding.values() for p in [s.length - 1]]
        assert len(writers) == len(set(writers)), "two sequences would write to one block"

    def active(self) -> list[Sequence]:
        return [*self.scheduler.prefilling.values(), *self.scheduler.decoding.values()]

    def meaning(self, sequence: Sequence, position: int) -> bytes:
        return str(self.version).encode() + sequence.tokens[: position + 1].tobytes()

    def write(self, sequence: Sequence, position: int) -> None:
        block = sequence.blocks[position // BLOCK]
        self.kv[block, position % BLOCK] = self.meaning(sequence, position)

    def read(self, sequence: Sequence, end: int) -> None:
        for position in range(end):
            assert self.kv[sequence.blocks[position // BLOCK], position % BLOCK] == self.meaning(sequence, position)

    def decode(self, sequence: Sequence) -> None:
        assert sequence.cached == sequence.length - 1
        self.write(sequence, sequence.length - 1)
        self.read(sequence, sequence.length)
        sequence.tokens[sequence.length] = sequence.arrival % 3
        sequence.length += 1
        sequence.cached += 1
        if sequence.length == sequence.prompt + sequence.limit:
            self.scheduler.leave(sequence, self.version)
            self.finished.append(sequence.arrival)

    def run(self, limit: int = 20_000) -> int:
        steps = 0
        while self.scheduler.waiting or self.active():
            self.step()
            steps += 1
            assert steps < limit, "no progress"
        return steps


def test_a_group_computes_its_prompt_once_and_shares_it() -> None:
    rig = Rig(blocks=64)
    prompt = list(range(11))  # 10 tokens need K/V: two whole blocks and a tail of two
    group = [rig.submit(prompt, 5) for _ in range(6)]
    plan = rig.step()
    assert [(c.sequence.arrival, c.start, c.end) for c in plan.chunks] == [(0, 0, 10)]
    assert [s.arrival for s in plan.ready] == [0, 1, 2, 3, 4, 5]
    assert len(plan.copies) == 5
    assert {tuple(s.blocks[:2]) for s in group} == {tuple(group[0].blocks[:2])}
    assert len({s.blocks[2] for s in group}) == 6
    assert rig.scheduler.shared_tokens == 50
    rig.run()
    assert sorted(rig.finished) == list(range(6))
    assert rig.pool.available == 64


def test_a_group_waits_for_its_long_prompt_while_others_go_on() -> None:
    rig = Rig(blocks=64, prefill_tokens=8)
    for _ in range(3):
        rig.submit(range(21), 2)
    rig.submit([7], 4)
    first = rig.step()
    assert [(c.start, c.end) for c in first.chunks] == [(0, 8)]
    assert [s.arrival for s in first.ready] == [3]
    assert len(rig.scheduler.waiting) == 2
    rig.step()
    third = rig.step()
    assert [(c.start, c.end) for c in third.chunks] == [(16, 20)]
    assert [s.arrival for s in third.ready] == [0, 1, 2]
    rig.run()
    assert rig.pool.available == 64


def test_prompts_that_share_a_beginning_share_its_whole_blocks_within_one_pass() -> None:
    rig = Rig(blocks=64)
    rig.submit([*range(8), 20, 21, 22], 2)
    rig.submit([*range(8), 30, 31, 32], 2)
    plan = rig.step()
    assert [(c.sequence.arrival, c.start, c.end) for c in plan.chunks] == [(0, 0, 10), (1, 8, 10)]
    rig.run()


def test_a_prompt_of_one_token_needs_no_prefill() -> None:
    rig = Rig(blocks=2)
    rig.submit([5], 3)
    plan = rig.step()
    assert not plan.chunks
    assert len(plan.ready) == 1
    rig.run()


def test_a_finished_turn_is_found_again_by_the_next_turn_of_the_episode() -> None:
    rig = Rig(blocks=64)
    first = rig.submit(range(6), 7)
    rig.run()
    rig.submit([*first.tokens[:13].tolist(), 9, 9], 3)
    plan = rig.step()
    assert [(c.start, c.end) for c in plan.chunks] == [(12, 14)]
    rig.run()


def test_after_a_refresh_nothing_old_is_shared_and_prefills_begin_again() -> None:
    rig = Rig(blocks=64, prefill_tokens=8)
    old = rig.submit(range(20, 25), 9)
    rig.submit(range(33), 2)
    rig.step()
    rig.step()
    assert (list(rig.scheduler.decoding), list(rig.scheduler.prefilling)) == ([0], [1])
    rig.version = Version(0, 2)
    rig.scheduler.refresh()
    rig.kv = {place: rig.meaning(old, p) for p in range(old.cached) for place in [(old.blocks[p // BLOCK], p % BLOCK)]}
    assert rig.pool.match(V1, np.arange(8, dtype=np.int32)).blocks == []
    plan = rig.step()
    assert [(c.sequence.arrival, c.start) for c in plan.chunks] == [(1, 0)]
    while old.arrival in rig.scheduler.decoding:
        rig.step()
    assert not rig.pool.match(rig.version, old.tokens[:12]).blocks, "what was kept from the old version is not shared"
    rig.run()


def test_a_tail_that_only_fits_uncopied_is_computed_again() -> None:
    rig = Rig(blocks=3)
    rig.submit(range(11), 2)
    rig.run()
    rig.submit(range(11), 2)  # its three blocks are all there is: the cached tail can't be held beside them
    plan = rig.step()
    assert not plan.copies
    assert [(c.start, c.end) for c in plan.chunks] == [(8, 10)]
    rig.run()


def test_the_youngest_is_preempted_and_resumed_with_its_tokens() -> None:
    rig = Rig(blocks=4)
    old = rig.submit([1], 12)
    young = rig.submit([2], 12)
    while not rig.scheduler.preempted:
        rig.step()
    assert young.length > 1
    assert not young.blocks
    assert old.arrival in rig.scheduler.decoding
    rig.run()
    assert sorted(rig.finished) == [0, 1]


REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=14), st.integers(1, 12), st.integers(0, 3)),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(
    requests=REQUESTS,
    blocks=st.integers(7, 24),
    max_sequences=st.integers(1, 6),
    prefill_tokens=st.integers(1, 20),
    events=st.lists(st.sampled_from(["none", "none", "none", "abort", "keep", "recompute"]), max_size=30),
)
def test_everything_submitted_is_finished_and_no_budget_is_exceeded(
    requests: list[Any], blocks: int, max_sequences: int, prefill_tokens: int, events: list[str]
) -> None:
    rig = Rig(blocks=blocks, max_sequences=max_sequences, prefill_tokens=prefill_tokens)
    expected: set[int] = set()
    for prompt, new, pause in requests:
        expected.add(rig.submit(prompt, new).arrival)
        for _ in range(pause):
            rig.step()
            disturb(rig, events.pop() if events else "none", expected)
    rig.run()
    assert expected <= set(rig.finished)
    assert len(rig.finished) == len(set(rig.finished))
    assert rig.pool.available == blocks


def disturb(rig: Rig, event: str, expected: set[int]) -> None:
    everyone = [*rig.scheduler.waiting.values(), *rig.active()]
    if event == "abort" and everyone:
        rig.scheduler.leave(everyone[-1], rig.version)
        expected.discard(everyone[-1].arrival)
    if event == "recompute":
        rig.version = Version(0, rig.version.n + 1)
        rig.scheduler.refresh()
        for sequence in rig.active():
            rig.scheduler.leave(sequence, rig.version)
            rig.scheduler.submit(sequence)
        rig.kv.clear()
    if event == "keep":
        # Kept K/V is of the old version but must still be that sequence's own: rename it as if it were new.
        old, rig.version = rig.version, Version(0, rig.version.n + 1)
        rig.scheduler.refresh()
        kept = {(s.blocks[p // BLOCK], p % BLOCK) for s in rig.active() for p in range(s.cached)}
        rename = (str(old).encode(), str(rig.version).encode())
        rig.kv = {place: rig.kv[place].replace(*rename, 1) for place in kept}
