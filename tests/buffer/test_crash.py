"""A crash at any boundary, damaged files, resumes from any cut: no group is lost, skipped, trained twice or too old.

The machine plays loop, engines and trainer on real buffers over real files. Its oracle of weights is the list of takes
that led to them: two versions are the same exactly when these lists are, and the way from one to the other is what they
do not share. It knows nothing of lines.
"""

import asyncio
import os
import tempfile
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from contraflow.buffer.accounts import accounts
from contraflow.buffer.audit import audit
from contraflow.buffer.segments import FOLDER
from contraflow.buffer.service import Buffer
from contraflow.config import Buffer as Section
from contraflow.errors import LedgerError
from contraflow.types import Group, Take, Ticket, Version

MakeGroup = Callable[..., Group]
Chain = tuple[tuple[tuple[int, int], ...], ...]  # of each step, its (group, attempt)
MEMORY = Path("/dev/shm")


def way(a: Chain, b: Chain) -> int:
    """Steps from one version back to the fork, and forth to the other."""
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return len(a) + len(b) - 2 * same


class Machine(RuleBasedStateMachine):
    """One run, killed now and then."""

    def __init__(self, make_group: MakeGroup, section: Section) -> None:
        super().__init__()
        self.make_group, self.section = make_group, section
        self.place = tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)
        self.folder = Path(self.place.name)
        self.loop = asyncio.new_event_loop()
        self.versions: dict[Version, Chain] = {}
        self.payloads: dict[tuple[int, int], Group] = {}  # of every put and hand-back that returned
        self.truth: dict[tuple[int, int], list[Version]] = {}  # by what each token of an episode was sampled
        self.begun: dict[int, Group] = {}  # what running groups go on from
        self.continued = 0
        self.cuts: dict[int, Chain] = {0: ()}
        self.chain: Chain = ()
        self.running: dict[int, Ticket] = {}
        self.ready: set[int] = set()
        self.open(None)

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def open(self, resume_step: int | None) -> None:
        self.buffer = Buffer(self.section, self.folder, resume_step, lambda: 0.0, threaded=False)
        self.line = self.do(self.buffer.line())
        self.served = len(self.chain)
        self.take: Take | None = None
        self.versions[Version(self.line, len(self.chain))] = self.chain

    @rule(count=st.integers(1, 4))
    def admit(self, count: int) -> None:
        for _ in range(count):
            if self.do(self.buffer.counts()).tickets_free <= 0:
                return
            ticket = self.do(self.buffer.admit(1.0))
            self.running[ticket.group] = ticket
            self.start(ticket)

    def start(self, ticket: Ticket) -> None:
        left = self.do(self.buffer.started(ticket.group, ticket.attempt, Version(self.line, self.served)))
        if left is None:
            return
        self.continued += 1
        assert left.ticket.attempt == ticket.attempt - 1
        was = self.payloads[ticket.group, left.ticket.attempt]
        assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(left.episodes, was.episodes, strict=True))
        assert [(e.stop, e.error, e.reward) for e in left.episodes] == [
            (e.stop, e.error, e.reward) for e in was.episodes
        ]
        assert all(span.version.line == self.line for episode in left.episodes for span in episode.spans)
        self.begun[ticket.group] = left

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def put(self, data: st.DataObject) -> None:
        self.deliver(data.draw(st.sampled_from(sorted(self.running))), data.draw(st.booleans()))

    def deliver(self, group: int, two: bool = False) -> None:
        """Tokens by the version served when its ticket was given, at the earliest."""
        ticket = self.running.pop(group)
        entry = self.buffer._store._running.get(group)
        if entry is None:  # the window gave it up; nobody told its engine
            return
        versions = sorted({entry.newest, self.served}) if two else [self.served]
        made = self.more(ticket, versions)
        self.do(self.buffer.put(made))
        self.payloads[group, ticket.attempt] = made
        self.ready.add(group)

    def more(self, ticket: Ticket, versions: list[int], **rest: Any) -> Group:
        """What there was of a group, and a token more by each of `versions`."""
        left = self.begun.pop(ticket.group, None)
        told = [] if left is None else [span.version.n for span in left.episodes[0].spans]
        true = [] if left is None else self.truth[ticket.group, left.ticket.attempt]
        self.truth[ticket.group, ticket.attempt] = [*true, *(Version(self.line, n) for n in versions)]
        return self.make_group(ticket, [*told, *versions], **rest)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def hand_back(self, data: st.DataObject) -> None:
        self.give_back(self.running.pop(data.draw(st.sampled_from(sorted(self.running)))))

    def give_back(self, ticket: Ticket) -> None:
        if ticket.group in self.buffer._store._running:
            part = self.more(ticket, [self.served], errors=("", "cut off"))
            self.do(self.buffer.hand_back(part))
            self.payloads[ticket.group, ticket.attempt] = part

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        ticket = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        self.do(self.buffer.lost(ticket.group, ticket.attempt, "worker died"))

    @rule()
    def choose(self) -> None:
        if self.take is not None or self.buffer._store.choose(len(self.chain)) is None:
            return
        self.take = self.do(self.buffer.take(len(self.chain), 0.0))
        assert self.take is not None
        for chosen, group in zip(self.take.groups, self.do(self.buffer.fetch(self.take.groups)), strict=True):
            was = self.payloads[chosen.group, chosen.attempt]
            assert [e.reward for e in group.episodes] == [e.reward for e in was.episodes]
            assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(group.episodes, was.episodes, strict=True))
            sampled = [version for _ in was.episodes for version in self.truth[chosen.group, chosen.attempt]]
            ages = [way(self.versions[version], self.chain) for version in sampled]
            assert (min(ages) if self.section.expiry == "mask" else max(ages)) <= self.section.max_age
            told = [span.version for episode in group.episodes for span in episode.spans]
            assert all(version.line == self.line for version in told)
            assert all(len(self.chain) - version.n >= age for version, age in zip(told, ages, strict=True))
            assert chosen.group not in {each for step in self.chain for each, _ in step}
            self.ready.discard(chosen.group)

    @precondition(lambda self: self.take is not None)
    @rule(serve=st.booleans())
    def train(self, serve: bool) -> None:
        assert self.take is not None
        step = len(self.chain)
        self.chain += (tuple((each.group, each.attempt) for each in self.take.groups),)
        version = Version(self.line, step + 1)
        self.versions[version] = self.chain
        self.do(self.buffer.trained(step, version))
        self.take = None
        if serve:
            self.serve()

    @rule()
    def serve(self) -> None:
        self.served = len(self.chain)
        self.do(self.buffer.served(Version(self.line, self.served)))

    @rule()
    def cut(self) -> None:
        if self.take is None:
            self.do(self.buffer.cut(len(self.chain)))
            self.cuts[len(self.chain)] = self.chain

    @rule()
    def whole_step(self) -> None:
        """The common case, so that the rare ones happen far into a run."""
        self.serve()
        self.admit(self.section.tickets)
        for group in list(self.running):
            self.deliver(group)
        self.choose()
        if self.take is not None:
            self.train(True)

    @rule(moved=st.integers(1, 3))
    def step_while_groups_move(self, moved: int) -> None:
        """Some groups are handed back, a step is trained and served, and they go on under its version."""
        self.admit(self.section.tickets)
        under_way = list(self.running)
        for group in under_way[moved:]:
            self.deliver(group)
        self.choose()
        for group in under_way[:moved]:
            self.give_back(self.running.pop(group))
        if self.take is not None:
            self.train(True)

    @rule(data=st.data(), how=st.sampled_from(["killed", "mid-put", "torn tail", "stopped"]), newest=st.booleans())
    def crash(self, data: st.DataObject, how: str, newest: bool) -> None:
        before = self.buffer
        if how == "mid-put" and self.running:
            ticket = self.running[min(self.running)]
            before._segments.write([self.make_group(ticket, [self.served])])  # synced, and no row yet
        if how == "torn tail" and (name := before._segments.name):
            with (self.folder / FOLDER / name).open("ab") as file:
                file.write(os.urandom(0) + bytes(data.draw(st.binary(max_size=50))))
        if how == "stopped":
            self.do(before.close())
        step = max(self.cuts) if newest or self.section.keep_payloads == "until_cut" else None
        step = data.draw(st.sampled_from(sorted(self.cuts))) if step is None else step
        due = self.expected_due(step)
        straight = self.cuts[step] == self.chain[:step]
        self.chain, ready = self.cuts[step], set(self.ready)
        self.cuts = {at: chain for at, chain in self.cuts.items() if at <= step}
        self.running, self.ready, self.begun = {}, set(), {}
        self.open(step)
        if how != "stopped":
            self.check_fence(before)
        if straight:
            assert [self.ids(take) for take in self.buffer._store._due] == due
        self.ready = set(self.buffer._store._ready)
        if straight:
            assert self.ready == ready

    def gave_up(self) -> dict[str, int]:
        reposed: dict[str, int] = self.do(self.buffer.counts()).reposed
        return reposed

    def expected_due(self, step: int) -> list[list[tuple[int, int]]]:
        """Every take of the newest history that the cut does not hold, in its order."""
        takes = [list(each) for each in self.chain[step:]]
        if self.take is not None:
            takes.append([(each.group, each.attempt) for each in self.take.groups])
        return takes + [self.ids(take) for take in self.buffer._store._due]

    def ids(self, take: Any) -> list[tuple[int, int]]:
        return [(entry.group, entry.attempt) for entry in take]

    def check_fence(self, before: Buffer) -> None:
        """The one before goes on for a while, as a process does that lost its lock."""
        before._segments.close()
        with pytest.raises(LedgerError, match="has taken over"):
            before._ledger.cut(0)
        before._ledger._db.close()

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """One payload is bad after the crash: its group is posed again, counted, and nothing else is lost."""
        step = max(self.cuts)
        if self.cuts[step] != self.chain[:step]:
            return
        due = self.expected_due(step)
        ready = {(group, self.buffer._store._ready[group].attempt) for group in self.ready}
        kept = sorted(ready.union(*due))
        if not kept:
            return
        bad = data.draw(st.sampled_from(kept))
        self.flip(bad, data)
        before, reposed = self.buffer, self.gave_up().get("damaged", 0)
        self.chain, self.running, self.begun = self.cuts[step], {}, {}
        self.open(step)
        self.check_fence(before)
        assert self.gave_up()["damaged"] == reposed + 1
        store, torn = self.buffer._store, next((i for i, take in enumerate(due) if bad in take), len(due))
        assert [self.ids(take) for take in store._due] == due[:torn]
        self.ready = set(store._ready)
        waiting = set(store._waiting)
        assert bad in waiting
        free = ready.union(*due[torn:]) - {bad}
        assert free == set(self.ids(store._ready.values())) | (waiting & free)
        if torn == len(due):
            assert not waiting & free

    def flip(self, which: tuple[int, int], data: st.DataObject) -> None:
        segment, start, length = self.buffer._ledger._db.execute(
            "SELECT segment, start, length FROM payloads WHERE group_id = ? AND attempt = ?", which
        ).fetchone()
        path, at = self.folder / FOLDER / segment, start + data.draw(st.integers(0, length - 1))
        whole = bytearray(path.read_bytes())
        whole[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(whole)

    @invariant()
    def accounts_add_up(self) -> None:
        counts = self.do(self.buffer.counts())
        assert counts.posed == counts.trained + sum(counts.dropped.values()) + counts.held
        assert counts.trained == sum(map(len, self.chain))
        assert counts.ready == len(set(self.buffer._store._ready))
        assert counts.tickets_free + counts.tickets_busy == self.section.tickets

    @rule()
    def the_record_says_the_same(self) -> None:
        self.buffer._ledger.commit()
        counts, written = self.do(self.buffer.counts()), accounts(self.folder)
        for name in ("line", "posed", "waiting", "running", "ready", "due", "taken", "trained", "dropped", "reposed"):
            assert getattr(written, name) == getattr(counts, name), name
        assert audit(self.folder) == []

    def teardown(self) -> None:
        """However it came to this, the run goes on."""
        try:
            if self.take is not None:
                self.train(True)
            for _ in range(8):
                before = len(self.chain)
                for _ in range(3):
                    self.whole_step()
                assert len(self.chain) > before, self.buffer._store.why_no_take()
            self.the_record_says_the_same()
        finally:
            self.do(self.buffer.close())
            self.loop.close()
            self.place.cleanup()


SECTIONS = [
    Section.model_validate(
        {"expiry": expiry, "max_age": eta, "groups_per_step": groups, "dead_line": dead, "keep_payloads": keep}
    )
    for expiry, eta, groups, dead, keep in (
        ("hold", 0, 2, "train", "until_cut"),
        ("hold", 1, 2, "train", "all"),
        ("hold", 2, 1, "repose", "all"),
        ("mask", 1, 2, "train", "all"),
        ("repose", 1, 2, "train", "until_cut"),
        ("repose", 2, 1, "train", "all"),
    )
]


@pytest.mark.parametrize(
    "section", SECTIONS, ids=lambda s: f"{s.expiry}-eta{s.max_age}-P{s.groups_per_step}-{s.keep_payloads}"
)
def test_no_crash_loses_a_group_or_trains_it_twice_or_too_old(make_group: MakeGroup, section: Section) -> None:
    run_state_machine_as_test(
        partial(Machine, make_group, section),
        settings=settings(
            max_examples=12,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
