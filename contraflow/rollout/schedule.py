"""Which sequences compute what in a step: admission, chunked prefill, prefix sharing, growth, preemption.

Pure decisions over a `BlockPool` and plain records; no tensor, no clock, no thread. A sequence has `length` tokens of
which the first `cached` have K/V. Prefill brings `cached` to `length - 1`; from then on each decode pass feeds the one
token without K/V and samples the next, so prefill needs no logits and a resumed sequence is like a fresh one.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from contraflow.model.blocks import BlockPool, Match
from contraflow.types import Float32, Int32, Request, Version


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One request on its way. While it is decoding, `DecodeRows` holds the current tokens and lengths."""

    request: Request
    arrival: int  # smaller is older
    tokens: Int32  # [Lp + limit], the first `length` are known
    logprobs: Float32  # [limit], the first `length - Lp` are known
    length: int
    limit: int  # new tokens at most: what was asked for, or what the context leaves
    cached: int = 0
    blocks: list[int] = field(default_factory=list)
    pure: bool = True  # all of its K/V is of the version served now; False only while decoding
    marks: list[tuple[Version, int]] = field(default_factory=list)  # (version, new tokens it had sampled by its end)
    cache: Literal["kept", "recomputed", "unbroken"] = "unbroken"
    waiter: Any = None  # whoever wants the completion; opaque here

    @property
    def prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def prefix(self) -> Int32:
        """The tokens that need K/V before the sequence can decode."""
        return self.tokens[: self.length - 1]


@dataclass(slots=True)
class Chunk:
    """Feed `sequence.tokens[start:end]` in this step's prefill pass."""

    sequence: Sequence
    start: int
    end: int


@dataclass(slots=True)
class Plan:
    """One step: first all chunks in one pass, then the copies, then `ready` joins the decode pass.

    In the pass every layer writes K/V before it reads, so a chunk may stand on blocks another chunk fills.
    """

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from block, to block)
    ready: list[Sequence] = field(default_factory=list)
    longest: int = 0  # tokens of the longest chunk


class Scheduler:
    """Decides step by step; whoever owns it does the computing.

    Invariant: every submitted sequence is in exactly one of `waiting`, `prefilling` and `decoding` until `leave`; only
    the latter two hold blocks, at most `max_sequences` sequences are in them, and a pass never computes more than
    `prefill_tokens` positions, padding included. The oldest sequence is never preempted while it fits the pool alone,
    so everything submitted is finished.
    """

    def __init__(self, pool: BlockPool, *, max_sequences: int, prefill_tokens: int) -> None:
        self._pool = pool
        self._max_sequences = max_sequences
        self._prefill_tokens = prefill_tokens
        self._queue: list[tuple[int, Sequence]] = []  # heap by arrival; may hold sequences that left meanwhile
        self.waiting: dict[int, Sequence] = {}  # by arrival, as all three
        self.prefilling: dict[int, Sequence] = {}
        self.decoding: dict[int, Sequence] = {}
        self._computing: dict[bytes, Sequence] = {}  # prefix -> the sequence that is prefilling it for all
        self._growable = 0  # active sequences that may still need another block
        self._sources: list[int] = []  # blocks held for this step's copies
        self.shared_tokens = 0
        self.preempted = 0

    @property
    def active(self) -> int:
        """Sequences that hold blocks."""
        return len(self.prefilling) + len(self.decoding)

    def fits(self, tokens: int) -> bool:
        """Whether a sequence that feeds `tokens` could ever run, alone."""
        return self._blocks_for(tokens) <= self._pool.blocks

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; it starts when older ones leave it room."""
        self.waiting[sequence.arrival] = sequence
        heapq.heappush(self._queue, (sequence.arrival, sequence))

    def plan(self, version: Version | None) -> Plan:
        """This step's work. Blocks of what will be computed are already given out and indexed: the plan must be run."""
        plan = Plan()
        for sequence in self.prefilling.copy().values():
            self._feed(sequence, plan, version)
        self._admit_waiting(plan, version)
        return plan

    def settle(self) -> None:
        """The plan was run: give back what was held for its copies."""
        self._pool.release(self._sources)
        self._sources.clear()

    def grow(self, sequence: Sequence) -> bool:
        """Give one more block, or say that there is none: then preempt `youngest()` and try again."""
        if not self._pool.available:
            return False
        sequence.blocks += self._pool.allocate(1)
        self._growable -= not self._may_grow(sequence)
        return True

    def youngest(self) -> Sequence:
        """The active sequence to preempt first."""
        return max((*self.prefilling.values(), *self.decoding.values()), key=lambda s: s.arrival)

    def preempt(self, sequence: Sequence, version: Version | None) -> None:
        """Take an active sequence's blocks; it waits, ahead of younger ones, to be computed again."""
        self.leave(sequence, version)
        self.preempted += 1
        self.submit(sequence)

    def leave(self, sequence: Sequence, version: Version | None) -> None:
        """Forget a sequence in any state and release its blocks; what they hold stays indexed while it lasts."""
        if self.waiting.pop(sequence.arrival, None):
            return
        if self.prefilling.pop(sequence.arrival, None):
            self._stop_computing(sequence)
        else:
            del self.decoding[sequence.arrival]
        self._growable -= self._may_grow(sequence)
        if sequence.pure:
            self._pool.publish(version, sequence.tokens[: sequence.cached], sequence.blocks, tail=False)
        self._pool.release(sequence.blocks)
        sequence.blocks, sequence.cached, sequence.pure = [], 0, True

    def refresh(self) -> None:
        """The weights changed: nothing computed before is shared with what comes after, and prefills begin again."""
        self._pool.forget()
        for sequence in self.decoding.values():
            sequence.pure = False
        for sequence in list(self.prefilling.values()):
            sequence.pure = False
            self.leave(sequence, None)
            self.submit(sequence)

    def _admit_waiting(self, plan: Plan, version: Version | None) -> None:
        passed: list[tuple[int, Sequence]] = []
        while self.waiting and self.active < self._max_sequences:
            item = heapq.heappop(self._queue)
            sequence = item[1]
            if self.waiting.get(sequence.arrival) is not sequence:
                continue
            if self._computing and sequence.prefix.tobytes() in self._computing:  # share it soon, don't repeat it
                passed.append(item)
            elif not self._admit(sequence, plan, version):
                passed.append(item)
                break
            if len(passed) == len(self.waiting):
                break
        for item in passed:
            heapq.heappush(self._queue, item)

    def _admit(self, sequence: Sequence, plan: Plan, version: Version | None) -> bool:
        match = self._pool.match(version, sequence.prefix)
        shared = len(match.blocks) * self._pool.block_tokens
        whole = match.tail is not None or shared == sequence.length - 1
        if not whole and not self._room(plan):
            return False
        if not self._take_blocks(sequence, match, plan):
            return False
        del self.waiting[sequence.arrival]
        self.prefilling[sequence.arrival] = sequence
        self._growable += self._may_grow(sequence)
        self.shared_tokens += sequence.cached
        self._feed(sequence, plan, version)
        return True

    def _take_blocks(self, sequence: Sequence, match: Match, plan: Plan) -> bool:
        """Blocks for all known tokens, shared where they match, with one in reserve for each that may grow."""
        fresh = self._blocks_for(sequence.length) - len(match.blocks)
        spare = self._pool.available - self._growable - fresh - self._revived(match.blocks)
        tail = match.tail if match.tail is not None and self._revived([match.tail]) <= spare else None
        if spare < 0:
            return False
        self._pool.hold(match.blocks)
        sequence.cached = len(match.blocks) * self._pool.block_tokens
        if tail is not None:
            self._pool.hold([tail])
            self._sources.append(tail)
            sequence.cached = sequence.length - 1
        sequence.blocks = match.blocks + self._pool.allocate(fresh)
        if tail is not None:
            plan.copies.append((tail, sequence.blocks[len(match.blocks)]))
        return True

    def _feed(self, sequence: Sequence, plan: Plan, version: Version | None) -> None:
        """Give the sequence its share of this pass, and let it decode if that completes its prefix."""
        wanted = sequence.length - 1 - sequence.cached
        given = min(wanted, self._room(plan))
        if given:
            start = sequence.cached
            sequence.cached += given
            plan.chunks.append(Chunk(sequence, start, sequence.cached))
            plan.longest = max(plan.longest, given)
            tail = given == wanted
            self._pool.publish(version, sequence.tokens[: sequence.cached], sequence.blocks, tail=tail)
        if given == wanted:
            self._stop_computing(sequence)
            del self.prefilling[sequence.arrival]
            self.decoding[sequence.arrival] = sequence
            plan.ready.append(sequence)
        else:
            self._computing.setdefault(sequence.prefix.tobytes(), sequence)

    def _room(self, plan: Plan) -> int:
        """Longest chunk that another row of the pass may have: rows x longest stays within `prefill_tokens`."""
        most = self._prefill_tokens // (len(plan.chunks) + 1)
        return most if most >= plan.longest else 0

    def _stop_computing(self, sequence: Sequence) -> None:
        if self._computing and self._computing.get(key := sequence.prefix.tobytes()) is sequence:
            del self._computing[key]

    def _revived(self, blocks: Iterable[int]) -> int:
        """How many of these are available now and would not be once held."""
        return sum(self._pool.references(block) == 0 for block in blocks)

    def _may_grow(self, sequence: Sequence) -> bool:
        # The last token of a sequence is never fed.
        return len(sequence.blocks) < self._blocks_for(sequence.prompt + sequence.limit - 1)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._pool.block_tokens)
