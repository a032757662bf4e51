"""The life of groups under an adversary: any order of completion, lagging engines, deaths, lies, late puts, resumes.

The machine plays loop, engines and trainer on a real ledger, and keeps its own books. After every call it holds the
store to the age guarantee, the tickets, exactly-once and the accounts.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from contraflow.buffer.accounts import accounts
from contraflow.buffer.ledger import Event, Kind
from contraflow.buffer.store import Store
from contraflow.buffer.window import Window
from contraflow.config import Buffer
from contraflow.errors import EngineError, LedgerError
from contraflow.types import Chosen, Group, Take, Ticket, Version
from tests.buffer.ledgers import open_ledger

MakeGroup = Callable[..., Group]
ENGINES = 2
MEMORY = Path("/dev/shm")  # the laws do not depend on a disk, and thousands of synced commits take minutes on one
FINAL = {"no_signal", "no_episodes"}


@dataclass
class Live:
    """The machine's own record of a group with a ticket; `oldest` is the least n its tokens can honestly have, `served`
    the least that an engine has to serve to start it."""

    ticket: Ticket
    group: int
    oldest: int
    newest: int
    served: int = 0
    engine: int | None = None
    ready: bool = False
    left: Group | None = None  # what it goes on from


class Machine(RuleBasedStateMachine):
    """One run, resumed now and then."""

    def __init__(self, make_group: MakeGroup, section: Buffer) -> None:
        super().__init__()
        self.make_group, self.section = make_group, section
        self.window = Window.of(section)
        self.place = tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)
        self.folder = Path(self.place.name)
        self.waiting: set[int] = set()
        self.attempts: dict[int, int] = {}
        self.trained: dict[int, int] = {}  # group -> step, on the surviving history
        self.dropped: set[int] = set()
        self.past: list[Ticket] = []
        self.cuts = [0]
        self.durable: tuple[dict[int, int], set[int]] = ({}, set())
        self.open(None, 0)

    def open(self, resume_step: int | None, step: int) -> None:
        self.ledger, opening = open_ledger(self.folder, resume_step=resume_step)
        self.store = Store(self.section, opening, accounts(self.folder), self.record)
        self.line, self.step, self.published = opening.line, step, step
        self.served, self.engines = step, [step] * ENGINES
        self.live: dict[int, Live] = {}
        self.left: dict[int, tuple[int, int, Group]] = {}  # oldest and newest n of what was handed back
        self.take: Take | None = None

    def commit(self) -> None:
        """As the worker does before it answers a take, and a crash forgets only what came after."""
        self.ledger.commit()
        self.durable = (dict(self.attempts), set(self.dropped))

    def record(self, event: Event) -> None:
        self.ledger.append(event)
        if event.kind in (Kind.WAITING, Kind.DROPPED):
            gone = self.live.pop(event.group)
            self.past.append(gone.ticket)
            (self.waiting if event.kind == Kind.WAITING else self.dropped).add(event.group)
        if event.reason == "expired":
            assert self.section.expiry != "hold"
            assert (gone.newest if self.section.expiry == "mask" else gone.oldest) < self.step - self.section.max_age

    def pick(self, data: st.DataObject, *, ready: bool = False, started: bool | None = None) -> Live | None:
        fit = [each for each in self.live.values() if each.ready == ready]
        fit = [each for each in fit if started is None or (each.engine is not None) == started]
        return data.draw(st.sampled_from(fit)) if fit else None

    @rule(count=st.integers(1, 6))
    def admit(self, count: int) -> None:
        for _ in range(count):
            free = self.store.counts().tickets_free
            ticket = self.store.pose()
            assert (ticket is None) == (free == 0)
            if ticket is None:
                return
            oldest_first = min(self.waiting, default=len(self.attempts))
            attempt = self.attempts.get(oldest_first, 0) + 1
            assert ticket == Ticket(group=oldest_first, attempt=attempt, line=self.line)
            self.waiting.discard(ticket.group)
            self.attempts[ticket.group] = attempt
            live = self.live[ticket.group] = Live(ticket, ticket.group, self.served, self.served, self.served)
            self.rejoin(live)

    def rejoin(self, live: Live) -> None:
        """It goes on from what was handed back exactly if nothing live becomes too old by that."""
        oldest, newest, left = self.left.pop(live.group, (0, self.step + 1, None))
        live.oldest = min(oldest, self.served)
        if self.section.expiry == "hold":
            fits = self.window.feasible(self.step, self.live.values())
        else:
            fits = live.oldest >= self.step - self.section.max_age
        if newest <= self.step and fits:
            live.left = left
        else:
            live.oldest = self.served

    @rule(data=st.data(), engine=st.integers(0, ENGINES - 1), count=st.integers(1, 6))
    def start(self, data: st.DataObject, engine: int, count: int) -> None:
        for _ in range(count):
            live = self.pick(data, started=False)
            if live is None:
                return
            self.start_one(live, engine)

    def start_one(self, live: Live, engine: int) -> None:
        version = Version(self.line, self.engines[engine])
        if version.n < live.served:
            with pytest.raises(EngineError, match="already served"):
                self.store.start(live.group, live.ticket.attempt, version)
            return
        assert self.store.start(live.group, live.ticket.attempt, version) is live.left
        live.engine, live.served = engine, version.n
        live.oldest = version.n if live.left is None else live.oldest

    @rule(data=st.data(), count=st.integers(1, 6))
    def finish(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            live = self.pick(data, started=True)
            if live is None:
                return
            assert live.engine is not None
            span = st.integers(live.oldest, self.engines[live.engine])
            self.deliver(live, sorted(data.draw(st.lists(span, min_size=1, max_size=2))))

    def deliver(self, live: Live, versions: list[int]) -> None:
        live.oldest, live.newest, live.ready = versions[0], versions[-1], True
        self.store.put(self.make_group(live.ticket, versions))

    @rule(data=st.data(), stale=st.booleans())
    def hand_back(self, data: st.DataObject, stale: bool) -> None:
        live = self.pick(data, started=True)
        if live is None:
            return
        assert live.engine is not None
        span = st.integers(live.oldest, self.engines[live.engine])
        self.give_back(live, sorted(data.draw(st.lists(span, min_size=1, max_size=2))), stale)

    def give_back(self, live: Live, versions: list[int], stale: bool = False) -> None:
        versions[0] -= stale and versions[0] - live.oldest + 1
        part = self.make_group(live.ticket, versions, errors=("", "cut off"))
        assert self.store.takes_back(part) != stale
        reason = "older_than_start" if stale else "handed_back"
        before = self.store.counts().reposed.get(reason, 0)
        self.store.hand_back(part)
        assert self.store.counts().reposed[reason] == before + 1
        if not stale:
            self.left[live.group] = versions[0], versions[-1], part

    @rule(moved=st.integers(1, 4))
    def step_while_groups_move(self, moved: int) -> None:
        """Some groups are handed back, a step is trained and served, and they go on under its version."""
        self.engines[0] = max(self.engines[0], self.served)
        self.admit(self.section.tickets)
        for live in list(self.live.values()):
            if live.engine is None and not live.ready:
                self.start_one(live, 0)
        under_way = [live for live in self.live.values() if not live.ready and live.engine is not None]
        for place, live in enumerate(under_way):
            if place >= moved:
                self.deliver(live, [live.oldest])
        if self.take is None:
            self.choose()
        for live in under_way[:moved]:
            if live.group in self.live:
                self.give_back(live, [live.oldest])
        if self.take is not None:
            self.train(False)
        self.engines[0] = self.served = self.published
        self.store.serve(Version(self.line, self.published))
        self.admit(self.section.tickets)

    @rule(data=st.data(), fate=st.sampled_from(["no_signal", "no_episodes", "older_than_start", "dead_line", "lost"]))
    def fail(self, data: st.DataObject, fate: str) -> None:
        live = self.pick(data)
        if live is None:
            return
        ticket, versions = live.ticket, [live.oldest]
        before = self.store.counts()
        if fate == "lost":
            self.store.lose(ticket.group, ticket.attempt, "worker 1: killed")
        elif fate == "no_signal":
            self.store.put(self.make_group(ticket, versions, rewards=(0.5, 0.5)))
        elif fate == "no_episodes":
            self.store.put(self.make_group(ticket, versions, errors=("env", "env")))
        elif fate == "dead_line":
            self.store.put(self.make_group(ticket, versions, line=self.line - 1))
        else:
            self.store.put(self.make_group(ticket, [live.oldest - 1]))
        after = self.store.counts()
        if fate in FINAL:
            assert after.dropped.get(fate, 0) == before.dropped.get(fate, 0) + 1
        else:
            assert after.reposed.get(fate, 0) == before.reposed.get(fate, 0) + 1
        assert after.tickets_free == before.tickets_free + 1

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def report_late(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.past))
        before = self.store.counts()
        if data.draw(st.booleans()):
            assert not self.store.takes_back(self.make_group(ticket))
            self.store.hand_back(self.make_group(ticket))
        elif ticket.line != self.line or data.draw(st.booleans()):
            self.store.put(self.make_group(ticket))
        else:
            self.store.lose(ticket.group, ticket.attempt, "twice")
        after = self.store.counts()
        assert sum(after.refused.values()) == sum(before.refused.values()) + 1
        assert after.held == before.held

    @rule()
    def choose(self) -> None:
        if self.take is not None:
            assert self.store.choose(self.take.step) == self.take
            with pytest.raises(LedgerError, match="not trained yet"):
                self.store.choose(self.step)
            return
        take = self.store.choose(self.step)
        if take is None:
            assert self.store.why_no_take()
            return
        self.check(take)
        for each in take.groups:
            self.past.append(self.live.pop(each.group).ticket)
        self.take, self.step = take, self.step + 1
        self.commit()

    def check(self, take: Take) -> None:
        assert take.step == self.step
        assert len(take.groups) == self.section.groups_per_step
        floor = max(self.step - self.section.max_age, 0)
        for chosen, payload in zip(take.groups, self.store.fetch(take.groups), strict=True):
            assert chosen == Chosen(payload.ticket.group, payload.ticket.attempt, Version(self.line, floor))
            spans = [span.version.n for episode in payload.episodes for span in episode.spans]
            assert (max(spans) if self.section.expiry == "mask" else min(spans)) >= floor
            if self.section.max_age == 0 and self.section.expiry == "hold":
                assert set(spans) == {self.step}
            assert chosen.group not in self.trained
            assert chosen.group not in self.dropped
        ages = [self.live[each.group].oldest for each in take.groups]
        assert ages == sorted(ages)

    @precondition(lambda self: self.take is not None)
    @rule(twice=st.booleans())
    def train(self, twice: bool) -> None:
        take = self.take
        assert take is not None
        self.published = take.step + 1
        for _ in range(1 + twice):
            self.store.finish(take.step, Version(self.line, self.published))
        for each in take.groups:
            self.trained[each.group] = take.step
        self.take = None
        with pytest.raises(LedgerError, match="not taken by a step in training"):
            self.store.fetch(take.groups)

    @rule(engine=st.integers(0, ENGINES - 1), data=st.data(), tell=st.booleans())
    def refresh(self, engine: int, data: st.DataObject, tell: bool) -> None:
        self.engines[engine] = data.draw(st.integers(self.engines[engine], self.published))
        if tell:
            self.served = max(self.served, self.engines[engine])
            self.store.serve(Version(self.line, self.engines[engine]))

    @rule()
    def cut(self) -> None:
        self.store.check_cut(self.published)
        self.commit()
        self.ledger.cut(self.published)
        self.cuts.append(self.published)

    @rule(late=st.integers(0, 3))
    def whole_step(self, late: int) -> None:
        """The common case, so that the rare ones happen far into a run: all but `late` groups finish, one engine
        keeps up."""
        self.admit(self.section.tickets)
        for live in list(self.live.values())[: len(self.live) - late]:
            if not live.ready:
                self.deliver(live, [live.oldest])
        if self.take is None:
            self.choose()
        if self.take is not None:
            self.train(False)
        self.engines[0] = self.served = self.published
        self.store.serve(Version(self.line, self.published))

    @rule(data=st.data(), crash=st.booleans())
    def resume(self, data: st.DataObject, crash: bool) -> None:
        step = data.draw(st.sampled_from(self.cuts))
        self.past += [live.ticket for live in self.live.values()]
        before = self.ledger
        if not crash:
            self.commit()
            before.close()
        self.attempts, self.dropped = dict(self.durable[0]), set(self.durable[1])
        self.trained = {group: at for group, at in self.trained.items() if at < step}
        self.waiting = set(self.attempts) - set(self.trained) - self.dropped
        self.cuts = [each for each in self.cuts if each <= step]
        self.open(step, step)
        if crash:  # the one before goes on for a while, as a process does that lost its lock
            before.append(Event(Kind.POSED, 0, 1))
            with pytest.raises(LedgerError, match="has taken over"):
                before.close()

    @invariant()
    def accounts_add_up(self) -> None:
        counts = self.store.counts()
        ready = sum(live.ready for live in self.live.values())
        assert counts.posed == counts.trained + sum(counts.dropped.values()) + counts.held == len(self.attempts)
        assert (counts.waiting, counts.ready) == (len(self.waiting), ready)
        assert counts.running == len(self.live) - ready
        assert (counts.trained, sum(counts.dropped.values())) == (len(self.trained), len(self.dropped))
        assert counts.taken == (0 if self.take is None else len(self.take.groups))

    @rule()
    def the_ledger_says_the_same(self) -> None:
        self.commit()
        counts, written = self.store.counts(), accounts(self.folder)
        for name in (
            "line",
            "posed",
            "waiting",
            "running",
            "ready",
            "taken",
            "trained",
            "dropped",
            "reposed",
            "refused",
        ):
            assert getattr(written, name) == getattr(counts, name), name
        assert written.final == sum(step < max(self.cuts) for step in self.trained.values())

    @invariant()
    def tickets_bound_what_is_in_flight(self) -> None:
        counts = self.store.counts()
        assert counts.tickets_free + counts.tickets_busy == self.section.tickets
        spent = (self.step - self.served) * self.section.groups_per_step
        assert counts.tickets_busy == len(self.live) + spent <= self.section.tickets

    @invariant()
    def whatever_is_held_can_still_be_trained_in_time(self) -> None:
        if self.section.expiry == "hold":
            assert self.window.feasible(self.step, self.live.values())

    def teardown(self) -> None:
        """However it came to this, the run goes on as long as engines refresh and groups finish."""
        try:
            for _ in range(3):
                self.one_more_step()
            self.the_ledger_says_the_same()
        finally:
            self.ledger.close()
            self.place.cleanup()

    def one_more_step(self) -> None:
        if self.take is not None:
            self.train(False)
        self.engines = [self.published] * ENGINES
        self.served = self.published
        self.store.serve(Version(self.line, self.published))
        for _ in range(3):  # groups given up on the way (expired ones) need another round
            self.admit(self.section.tickets)
            for live in list(self.live.values()):
                if not live.ready:
                    self.deliver(live, [max(live.oldest, self.published if live.engine is None else live.oldest)])
            self.choose()
            if self.take is not None:
                return
        raise AssertionError(f"stuck: {self.store.why_no_take()}")


SECTIONS = [
    Buffer.model_validate({"expiry": expiry, "max_age": max_age, "groups_per_step": groups})
    for expiry, max_age, groups in (
        ("hold", 0, 1),
        ("hold", 0, 3),
        ("hold", 1, 2),
        ("hold", 3, 2),
        ("mask", 0, 3),
        ("mask", 2, 1),
        ("repose", 1, 2),
        ("repose", 3, 1),
    )
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: f"{s.expiry}-eta{s.max_age}-P{s.groups_per_step}")
def test_every_law_of_the_buffer_holds_after_every_call(make_group: MakeGroup, section: Buffer) -> None:
    run_state_machine_as_test(
        partial(Machine, make_group, section),
        settings=settings(
            max_examples=20,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
