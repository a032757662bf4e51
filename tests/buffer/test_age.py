"""Thousands of steps of a run on simulated time: log-normal lengths, stragglers, engines that lag and that die.

Says what each policy promises about age, and shows that taking the oldest ready groups without a rule does not.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contraflow.buffer.accounts import Accounts
from contraflow.buffer.opening import Opening
from contraflow.buffer.store import Store
from contraflow.config import Buffer
from contraflow.errors import EngineError
from contraflow.types import Group, Ticket, Version

MakeGroup = Callable[..., Group]
NOTHING = Accounts(
    line=0, cut=0, posed=0, waiting=0, running=0, ready=0, taken=0, trained=0, final=0, dropped={}, reposed={},
    refused={}, superseded=0,
)  # fmt: skip


@dataclass
class Seen:
    """What a run came to: by step, the oldest and the newest n it trained."""

    oldest: list[int] = field(default_factory=list)
    newest: list[int] = field(default_factory=list)

    @property
    def max_age(self) -> int:
        return max(step - n for step, n in enumerate(self.oldest))


class World:
    """Engines, a trainer and a refresh on simulated time around one store. An event is (time, tie, action)."""

    def __init__(
        self, make_group: MakeGroup, section: Buffer, seed: int, *, engines: int = 2, sigma: float = 1.0
    ) -> None:
        self.rng = random.Random(seed)
        self.make_group, self.section, self.sigma = make_group, section, sigma
        self.store = Store(section, Opening(line=0, step=0), NOTHING, lambda event: None)
        self.engines = [0] * engines
        self.playing: dict[int, tuple[Ticket, int]] = {}  # group -> ticket, engine
        self.begun: dict[int, int] = {}
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.now, self.tie = 0.0, 0
        self.training = False
        self.in_flight = section.tickets
        self.seen = Seen()

    def run(self, steps: int) -> Seen:
        while len(self.seen.oldest) < steps:
            self.ask()
            self.learn()
            assert self.events, f"stuck: {self.store.why_no_take()}; {self.store.why_no_ticket()}"
            self.now, _, action = heapq.heappop(self.events)
            action()
        return self.seen

    def after(self, mean: float, action: Callable[[], None]) -> None:
        self.tie += 1
        heapq.heappush(self.events, (self.now + mean * self.rng.lognormvariate(0, self.sigma), self.tie, action))

    def ask(self) -> None:
        while self.store.counts().tickets_busy < self.in_flight and (ticket := self.store.pose()) is not None:
            self.play(ticket)

    def play(self, ticket: Ticket) -> None:
        engine = self.rng.randrange(len(self.engines))
        try:
            self.store.start(ticket.group, ticket.attempt, Version(0, self.engines[engine]))
        except EngineError:
            self.after(0.1, lambda: self.play(ticket))
            return
        self.playing[ticket.group] = ticket, engine
        self.begun[ticket.group] = self.engines[engine]
        self.after(1.0, lambda: self.end(ticket))

    def end(self, ticket: Ticket) -> None:
        playing, engine = self.playing.get(ticket.group, (None, 0))
        begun = self.begun.get(ticket.group, 0)
        chance = self.rng.random()
        if chance < 0.05:
            self.store.lose(ticket.group, ticket.attempt, "killed")
        elif chance < 0.15:
            self.store.put(self.make_group(ticket, [begun], rewards=(1.0, 1.0)))
        else:
            now = self.engines[engine] if playing == ticket else begun
            self.store.put(self.make_group(ticket, [begun, now]))

    def learn(self) -> None:
        if self.training:
            return
        step = len(self.seen.oldest)
        take = self.store.choose(step)
        if take is None:
            return
        floor = take.groups[0].floor.n
        tokens = [s.version.n for g in self.store.fetch(take.groups) for e in g.episodes for s in e.spans]
        kept = [n for n in tokens if n >= floor or self.section.expiry != "mask"]
        self.seen.oldest.append(min(kept))
        self.seen.newest.append(max(kept))
        self.training = True
        self.after(0.3, lambda: self.publish(step))

    def publish(self, step: int) -> None:
        self.training = False
        self.store.finish(step, Version(0, step + 1))
        for engine in range(len(self.engines)):
            self.after(0.1, lambda engine=engine: self.refresh(engine, step + 1))  # type: ignore[misc]

    def refresh(self, engine: int, n: int) -> None:
        self.engines[engine] = max(self.engines[engine], n)
        self.store.serve(Version(0, self.engines[engine]))


def section(expiry: str, max_age: int, groups: int) -> Buffer:
    return Buffer.model_validate({"expiry": expiry, "max_age": max_age, "groups_per_step": groups})


cases = st.tuples(st.integers(0, 2**32), st.integers(0, 4), st.integers(1, 6), st.integers(1, 3))


@given(cases)
@settings(max_examples=25, deadline=None)
def test_hold_never_trains_a_token_older_than_eta_nor_drops_a_group_for_its_age(
    make_group: MakeGroup, case: tuple[int, int, int, int]
) -> None:
    seed, max_age, groups, engines = case
    world = World(make_group, section("hold", max_age, groups), seed, engines=engines)
    seen = world.run(60)
    assert seen.max_age <= max_age
    assert set(world.store.counts().reposed) <= {"lost"}
    assert world.store.counts().refused == {}
    if max_age == 0:
        assert seen.oldest == seen.newest == list(range(60))


@given(cases, st.sampled_from(["mask", "repose"]))
@settings(max_examples=25, deadline=None)
def test_mask_and_repose_never_train_a_token_older_than_eta_either(
    make_group: MakeGroup, case: tuple[int, int, int, int], expiry: str
) -> None:
    seed, max_age, groups, engines = case
    seen = World(make_group, section(expiry, max_age, groups), seed, engines=engines).run(60)
    assert seen.max_age <= max_age


def test_taking_the_oldest_ready_without_the_rule_trains_ever_older_tokens(make_group: MakeGroup) -> None:
    """`mask` with a bound that never bites, and the tickets of eta = 2: so the tests above have teeth."""
    world = World(make_group, section("mask", 10**6, 4), seed=1, sigma=1.5)
    world.in_flight = 12
    assert world.run(400).max_age > 10


@pytest.mark.parametrize("max_age", [0, 1, 2])
def test_the_bound_is_reached_so_it_cannot_be_tightened(make_group: MakeGroup, max_age: int) -> None:
    assert World(make_group, section("hold", max_age, 4), seed=2).run(100).max_age == max_age
