"""The native engine without threads or event loops: submit, step, swap, and outcomes to hand back.

Takes requests with an opaque waiter each, gives (waiter, completion or error) pairs. Everything here runs on one thread
at a time and is deterministic; `native.py` puts it on a thread or into a loop.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from contraflow.config import Engine as EngineSection
from contraflow.errors import ConfigError, EngineError
from contraflow.model.blocks import BlockPool
from contraflow.model.decoder import Decoder
from contraflow.model.families import ModelConfig
from contraflow.rollout.engine import EngineReport, check_request, spans_of
from contraflow.rollout.passes import Launched, Passes
from contraflow.rollout.peers import Alone, Peers
from contraflow.rollout.rest import Rest
from contraflow.rollout.schedule import Scheduler, Sequence
from contraflow.rollout.swap import LiveWeights
from contraflow.telemetry import Account, Clock
from contraflow.types import Completion, Probe, Request, Routes, StopReason, Version

if TYPE_CHECKING:
    from contraflow.parallel.slots import ExpertSlots

Outcome = tuple[object, Completion | Exception]  # the waiter of a request, and what it gets


class EngineCore:
    """A decoder, its cache and its sequences, one step at a time.

    Invariant: every submitted sequence gives exactly one outcome. `version` is what the weights are whenever a step
    runs. The account's cause is "idle" between calls. Of an engine spread over ranks this is one rank's part, and
    `step` and `swap` are collective.

    With `passes.ahead`, a step begins its decode pass before it reads what the one before sampled, which nothing but
    stops depends on. A sequence that stopped is then computed once more, for nothing, within its own blocks; one that
    reaches its length gives its row away in time. Whatever takes a sequence away or changes weights lands that first.
    """

    def __init__(
        self,
        decoder: Decoder,
        section: EngineSection,
        *,
        clock: Clock,
        version: Version | None,
        peers: Peers | None = None,
        slots: "ExpertSlots | None" = None,
        told: tuple[str, ...] = (),
    ) -> None:
        """`peers` are the other ranks that `decoder` is a part of a model with; None: it is whole. `slots` is where
        its experts lie; None: in order. `told` goes into reports: how tokens reach them."""
        blocks = section.kv_tokens // section.block_tokens
        if blocks < 1:
            raise ConfigError(
                f"engine.kv_tokens = {section.kv_tokens} holds no block of engine.block_tokens = {section.block_tokens}"
            )
        if section.context_tokens > decoder.config.context:
            raise ConfigError(
                f"engine.context_tokens = {section.context_tokens} is beyond the model's {decoder.config.context}"
            )
        self.section = section
        self.version = version
        self.account = Account(clock, "idle")
        self._clock = clock
        self._told = told
        self._peers = peers or Alone()
        self._pool = BlockPool(blocks, section.block_tokens)
        self._scheduler = Scheduler(
            self._pool, max_sequences=section.max_sequences, prefill_tokens=section.prefill_tokens
        )
        self._passes = Passes(decoder, section, blocks=blocks, alone=peers is None)
        self._rows = self._passes.rows
        self.slots = slots
        self._weights = LiveWeights(decoder, None if slots is None else slots.tables)
        self._vocab = decoder.config.vocab
        self._rest = Rest(self._passes, self._pool, self._weights)
        self._sequences: dict[str, Sequence] = {}
        self._outcomes: list[Outcome] = []
        self._launched: deque[Launched] = deque()  # decode passes whose tokens were not read, oldest first
        self._arrivals = self._steps = self._tokens = self._fed_tokens = self._swaps = 0
        self._longest_stall_s = 0.0

    @property
    def config(self) -> ModelConfig:
        """The whole model's."""
        return self._passes.decoder.config

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """What this rank computes with, by name. Only `swap` writes to it."""
        return self._weights.live

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do, and may."""
        return bool(self._sequences) and not self._rest.resting

    @property
    def patience_s(self) -> float | None:
        """Without requests nothing is due."""
        return None

    def beat(self) -> None:
        """Nothing to do."""

    def check(self, request: Request) -> None:
        """Raise EngineError if this engine could never answer. Reads nothing that changes: any thread may call it."""
        section = self.section
        check_request(request, context_tokens=section.context_tokens, vocab=self._vocab)
        most = len(request.prompt) + self._limit(request) - 1
        if not self._scheduler.fits(most):
            raise EngineError(
                f"request {request.id!r}: {most} tokens (prompt {len(request.prompt)}) do not fit a KV cache of "
                f"{self._pool.blocks * section.block_tokens}; raise engine.kv_tokens or ask for fewer"
            )
        if request.want_routes and self._passes.routes is None:
            why = "the model has no experts" if section.routes else "engine.routes is false"
            raise EngineError(f"request {request.id!r} wants routes, but {why}")

    def submit(self, request: Request, waiter: object) -> None:
        """Queue a request that `check` accepts, under an id not in use."""
        prompt, limit = len(request.prompt), self._limit(request)
        tokens = np.empty(prompt + limit, np.int32)
        tokens[:prompt] = request.prompt
        sequence = Sequence(
            request=request,
            arrival=self._arrivals,
            tokens=tokens,
            logprobs=np.empty(limit, np.float32),
            length=prompt,
            limit=limit,
            waiter=waiter,
        )
        self._arrivals += 1
        self._sequences[request.id] = sequence
        self._scheduler.submit(sequence)

    def abort(self, ids: Iterable[str]) -> None:
        """End these requests with what they have; ids not in flight pass."""
        names = [name for name in ids if name in self._sequences]
        if names:
            self._drain()
        ended = [self._sequences[name] for name in names if name in self._sequences]
        wanted = [sequence for sequence in ended if self._rows.has(sequence)]  # who waits or prefills has none yet
        self._passes.leave(wanted)
        routes = self._routes_of(wanted)
        for sequence in ended:
            self._remove(sequence)
            self._outcomes.append(
                (sequence.waiter, self._completion(sequence, StopReason.ABORTED, routes.get(sequence)))
            )

    def fail(self, error: EngineError) -> None:
        """Give every request in flight `error`. What the cache held is forgotten: a step may have broken off."""
        self._launched.clear()
        self._scheduler.refresh()
        for sequence in list(self._sequences.values()):
            self._remove(sequence)
            self._outcomes.append((sequence.waiter, error))
        self._scheduler.settle()
        self.account.switch("idle")

    def take_outcomes(self) -> list[Outcome]:
        """What has ended since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def step(self) -> None:
        """Prefill a budget's worth, decode every ready sequence by one token, and finish those that ended."""
        account, scheduler, passes, rows = self.account, self._scheduler, self._passes, self._rows
        account.switch("schedule")
        for sequence in rows.closing():
            rows.part(sequence)
        self._grow()
        plan = scheduler.plan(self.version)
        prefill, decode = self._peers.passes(bool(plan.chunks), bool(plan.ready or rows.count))
        if prefill:
            account.switch("prefill")
            passes.prefill(plan.chunks) if plan.chunks else passes.idle("prefill")
            self._fed_tokens += sum(chunk.end - chunk.start for chunk in plan.chunks)
        if plan.copies:
            passes.copy(plan.copies)
        passes.join(plan.ready)
        scheduler.settle()
        if decode:
            account.switch("decode")
            self._launched.append(passes.launch()) if rows.count else passes.idle("decode")
        self._land(leaving=1 if passes.ahead and rows.count else 0)
        self._steps += 1
        account.switch("idle")

    def swap(self, version: Version, tensors: Mapping[str, Tensor], probe: Probe) -> float:
        """See `Engine.swap`."""
        start = self._clock()
        try:
            self._drain()
            with self.account.charge("swap"):
                self._weights.load(tensors, probe, self._peers.consent)
                self._passes.refresh()
                self._flip(version)
        finally:
            stall = self._clock() - start
            self._longest_stall_s = max(self._longest_stall_s, stall)
        self._swaps += 1
        return stall

    def forget(self) -> None:
        """Be as a new engine with these weights. Raises EngineError with requests in flight."""
        if self._sequences:
            raise EngineError(
                f"{len(self._sequences)} requests are in flight; abort them before the cache is forgotten"
            )
        self._drain()
        self._pool.forget()
        self._passes.forget()

    def rest(self) -> int:
        """Give weights and cache away, requests kept; no step runs before `wake`. Gives the bytes freed on the device.

        Only of an engine of one rank.
        """
        self._drain()
        with self.account.charge("offload"):
            return self._rest.begin()

    def wake(self) -> None:
        """Go on where `rest` began."""
        with self.account.charge("reload"):
            self._rest.end()

    def report(self) -> EngineReport:
        """Counters and accounts; any thread may call it, each number is right by itself."""
        scheduler, block_tokens = self._scheduler, self.section.block_tokens
        return EngineReport(
            version=self.version,
            tokens=self._tokens,
            fed_tokens=self._fed_tokens,
            shared_tokens=scheduler.shared_tokens,
            steps=self._steps,
            running=scheduler.active,
            waiting=len(scheduler.waiting),
            kv_tokens=self._pool.blocks * block_tokens,
            kv_tokens_held=(self._pool.blocks - self._pool.available) * block_tokens,
            preempted=scheduler.preempted,
            swaps=self._swaps,
            longest_stall_s=self._longest_stall_s,
            seconds=self.account.seconds(),
            doing=self.account.cause,
            forms=self._told,
            decoding=self._passes.told,
        )

    def _limit(self, request: Request) -> int:
        return min(request.max_new_tokens, self.section.context_tokens - len(request.prompt))

    def _grow(self) -> None:
        """Give every row that filled its last block another, oldest first; the youngest pay when there is none."""
        scheduler = self._scheduler
        for sequence in self._rows.outgrown():
            while sequence.arrival in scheduler.decoding:
                if scheduler.grow(sequence):
                    self._rows.grown(sequence)
                    break
                if self._launched:  # who has ended already leaves blocks
                    self._drain()
                    continue
                youngest = scheduler.youngest()
                self._leave_row(youngest)
                scheduler.preempt(youngest, self.version)

    def _drain(self) -> None:
        """Let everything land that is under way: what the host knows is then all there is."""
        if self._launched:
            with self.account.charge("decode"):
                self._land(leaving=0)

    def _land(self, *, leaving: int) -> None:
        """Take the tokens of the oldest passes under way, but for so many of the latest."""
        while len(self._launched) > leaving:
            one = self._launched.popleft()
            self.account.switch("decode")
            sampled_2B = self._peers.sampled(one.sampled())
            self.account.switch("schedule")
            count, ended = self._rows.land(one.leg, sampled_2B)
            self._tokens += count
            self._finish(ended)
        if not self._sequences:
            self._launched.clear()  # it computes for nobody

    def _finish(self, ended: list[tuple[Sequence, StopReason]]) -> None:
        if not ended:
            return
        spoiled = [sequence for sequence, reason in ended if reason is StopReason.ENGINE_ERROR]
        blocks = self._spoil(spoiled) if spoiled else set()
        self._passes.leave([sequence for sequence, _ in ended])
        routes = self._routes_of([sequence for sequence, _ in ended])
        for sequence, reason in ended:
            self._scheduler.leave(sequence, self.version)
            del self._sequences[sequence.request.id]
            outcome: Completion | Exception
            if reason is StopReason.ENGINE_ERROR:
                outcome = EngineError(
                    f"request {sequence.request.id!r}: the model gave a probability that is no number"
                )
            else:
                outcome = self._completion(sequence, reason, routes.get(sequence))
            self._outcomes.append((sequence.waiter, outcome))
        if blocks:
            self._passes.wipe([block for block in blocks if not self._pool.references(block)])

    def _spoil(self, sequences: list[Sequence]) -> set[int]:
        """What these sequences hold is no number: nobody may share it, or find it behind what a row has written.

        Gives their blocks, to be wiped once nobody holds them.
        """
        for sequence in sequences:
            sequence.pure = False
        self._pool.forget()
        self._passes.wipe_rows(sequences)
        return {block for sequence in sequences for block in sequence.blocks}

    def _remove(self, sequence: Sequence) -> None:
        self._leave_row(sequence)
        self._scheduler.leave(sequence, self.version)
        del self._sequences[sequence.request.id]

    def _routes_of(self, sequences: list[Sequence]) -> dict[Sequence, Routes]:
        """Experts of what was fed of those that want to know. They have left their rows, and hold their blocks."""
        wanted = [sequence for sequence in sequences if sequence.request.want_routes]
        return dict(zip(wanted, self._passes.routes_of(wanted), strict=True)) if wanted else {}

    def _leave_row(self, sequence: Sequence) -> None:
        if self._rows.has(sequence):
            self._passes.leave([sequence])

    def _flip(self, version: Version) -> None:
        """From here on tokens are sampled by `version`; the section says what that does to the K/V of who is decoding.

        Who is not has none, or too little to keep, and is computed under `version` in any case.
        """
        scheduler, old = self._scheduler, self.version
        scheduler.refresh()
        for sequence in self._sequences.values():
            sampled = self._rows.sampled(sequence)
            if not sampled or old is None:
                continue
            sequence.marks.append((old, sampled))
            decoding = sequence.arrival in scheduler.decoding
            if decoding and self.section.on_refresh == "keep":
                sequence.cache = "kept"
                continue
            if decoding:
                self._leave_row(sequence)
                scheduler.leave(sequence, old)
                scheduler.submit(sequence)
            if sequence.cache == "unbroken":
                sequence.cache = "recomputed"
        self.version = version

    def _completion(self, sequence: Sequence, stop: StopReason, routes: Routes | None) -> Completion:
        assert self.version is not None  # nothing is submitted before
        new = sequence.length - sequence.prompt
        return Completion(
            tokens=sequence.tokens[sequence.prompt : sequence.length].copy(),
            logprobs=sequence.logprobs[:new].copy(),
            spans=spans_of(sequence.marks, self.version, new),
            stop=stop,
            cache=sequence.cache,
            routes=routes,
        )
