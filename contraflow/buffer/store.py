"""The groups of a run between the pools: who is where, what may move, and what is counted. Payloads are in memory,
but for those that a restart found (segments.py).

Takes calls in any order, gives tickets, takes and payloads; every change goes to `record` as an event first thing.
Synchronous and deterministic: no clock, no file, no waiting (service.py waits, ledger.py keeps the events).
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from contraflow import config
from contraflow.buffer.accounts import Accounts
from contraflow.buffer.counts import Counts
from contraflow.buffer.curriculum import Curriculum
from contraflow.buffer.entry import Entry, entry_of, equal_rewards, listed
from contraflow.buffer.ledger import HANDED_BACK, Event, Kind, Solved
from contraflow.buffer.opening import Opening
from contraflow.buffer.salvage import Kept
from contraflow.buffer.segments import Place
from contraflow.buffer.tickets import Tickets
from contraflow.buffer.window import Window
from contraflow.errors import EngineError, LedgerError
from contraflow.types import Chosen, Group, Take, Ticket, Version


class Store:
    """Groups by state, tickets, and the step that is next.

    Invariants, after every call: posed = trained + dropped + waiting + running + ready + due + taken; tickets held =
    running + ready; and for every policy the unfinished groups are `feasible` for the next step under `hold`, or for
    the first step after those that are done again.
    """

    def __init__(
        self, section: config.Buffer, opening: Opening, totals: Accounts, record: Callable[[Event], None]
    ) -> None:
        self.line = opening.line
        self.step = opening.step
        self.tickets = Tickets(section.tickets, served=opening.step)  # a line's first version is that of its first step
        self._window = Window.of(section)
        self._keep_no_signal = section.no_signal == "keep"
        self._curriculum = Curriculum(section.curriculum, opening.solved)
        self._first = opening.step
        self._waiting = list(opening.waiting)  # a heap of (group, last attempt)
        self._left = {kept.group: entry_of(kept) for kept in opening.left}  # of waiting groups, what is there of them
        self._fresh = opening.fresh
        self._running: dict[int, Entry] = {}
        self._ready = {kept.group: entry_of(kept) for kept in opening.ready}
        self._due = deque(
            [entry_of(kept) for kept in take] for take in opening.due
        )  # of step `step` and those after it
        self.tickets.keep(len(self._ready), {self.step + i: len(take) for i, take in enumerate(self._due)})
        self._taken: dict[int, Entry] = {}
        self._take: Take | None = None
        self._posed, self._trained = totals.posed, totals.trained
        self._dropped, self._reposed = Counter(totals.dropped), Counter(totals.reposed)
        self._refused = Counter(totals.refused)
        self._record = record

    def pose(self) -> Ticket | None:
        """A ticket for the oldest group that waits to be posed again, else for the next fresh one; None: none free."""
        if self.tickets.free <= 0:
            return None
        self.tickets.issue()
        if self._waiting:
            group, attempt = heapq.heappop(self._waiting)
        else:
            group, attempt = self._fresh, 0
            self._fresh += 1
            self._posed += 1
        entry = self._rejoined(group, attempt + 1)
        self._running[group] = entry
        self._record(Event(Kind.POSED, group, entry.attempt))
        return Ticket(group=group, attempt=entry.attempt, line=self.line)

    def wanted(self, group: int, attempt: int, kind: str) -> bool:
        """Whether an attempt at a task of this kind is to be sampled; if not, it is dropped. What is begun goes on."""
        entry = self._find(group, attempt)
        if entry is None or entry.left is not None:
            return entry is not None
        wants = self._curriculum.wants(group, kind)
        if not wants:
            self._drop(entry, "curriculum")
        return wants

    def start(self, group: int, attempt: int, version: Version) -> Group | Kept | None:
        """The first token of an attempt is about to be sampled by `version`; gives what is there to go on from.

        Raises EngineError when the engine lags: `version` is of a dead line, or older than what was served when the
        ticket was given. Nothing has changed then, and the ticket is good for another engine, or for this one later.
        """
        entry = self._find(group, attempt)
        if entry is None:
            return None
        if version.line != self.line or version.n < entry.newest:
            raise EngineError(
                f"group {group} was to start under version {version}, but {self._version(entry.newest)} was already"
                " served when it got its ticket; refresh this engine, or give the ticket to one that is not behind"
            )
        entry.newest = version.n
        if entry.left is None:
            entry.oldest = version.n
        self._record(Event(Kind.STARTED, group, attempt, version=version))
        return None if entry.left is None else entry.left.payload

    def wants(self, group: Group) -> bool:
        """Whether `put` would make the group ready: its payload is worth keeping. Raises as `put` does."""
        return self._fate(group)[0] == Kind.READY

    def put(self, group: Group, place: Place | None = None) -> None:
        """A group's episodes arrived, and lie at `place`: it becomes ready, is dropped, or is posed again. A late one
        is only counted. Raises LedgerError for tokens of a version that cannot be yet."""
        kind, reason = self._fate(group)
        ticket = group.ticket
        if kind == Kind.REFUSED:
            self._refuse(ticket.group, ticket.attempt, reason)
            return
        entry = self._running[ticket.group]
        if kind == Kind.DROPPED:
            self._drop(entry, reason, self._curriculum.measure(group))
        elif kind == Kind.WAITING:
            self._repose(entry, reason)
        else:
            self._settle(entry, group, place)

    def takes_back(self, group: Group) -> bool:
        """Whether `hand_back` would keep what is there of the group. Raises as it does."""
        ticket, entry = group.ticket, self._running.get(group.ticket.group)
        mine = ticket.line == self.line and entry is not None and entry.attempt == ticket.attempt
        return mine and entry is not None and self._ages(entry, group) is not None

    def hand_back(self, group: Group, place: Place | None = None) -> None:
        """An attempt ends unfinished, its episodes so far lie at `place`: its group is posed again, to go on from them.

        A late one is only counted. Raises LedgerError for tokens of a version that cannot be yet.
        """
        ticket = group.ticket
        if ticket.line != self.line:
            self._refuse(ticket.group, ticket.attempt, "dead_line")
            return
        entry = self._find(ticket.group, ticket.attempt)
        if entry is None:
            return
        ages = self._ages(entry, group)
        if ages is None:
            self._repose(entry, "older_than_start")
            return
        oldest, newest = ages
        self._repose(entry, HANDED_BACK, version=oldest, newest=newest, place=place)
        self._left[entry.group] = Entry(entry.group, entry.attempt, oldest.n, newest.n, payload=group)

    def lose(self, group: int, attempt: int, reason: str) -> None:
        """An attempt will never arrive: its group is posed again, its ticket comes home."""
        entry = self._find(group, attempt)
        if entry is not None:
            self._repose(entry, f"lost: {reason}")

    def call_in(self) -> None:
        """No attempt that runs will arrive: every group of them is posed again, to go on from what it was to go on from
        if that is still there."""
        for entry in list(self._running.values()):
            if entry.left is None:
                self._repose(entry, "called_in")
            else:
                self._repose(entry, HANDED_BACK, again=entry.left.attempt)
                self._left[entry.group] = replace(entry.left, attempt=entry.attempt)

    def drop(self, group: int, attempt: int, reason: str) -> None:
        """An attempt will never arrive, and is not to be made again: its group is dropped, its ticket comes home."""
        entry = self._find(group, attempt)
        if entry is not None:
            self._drop(entry, reason)

    def choose(self, step: int) -> Take | None:
        """The groups of `step`, or None when it has to wait. The same again until they are trained."""
        if self._take is not None and self._take.step == step:
            return self._take
        self._check_next(step)
        entries = self._again() if self._due else self._fresh_take(step)
        if not entries:
            return None
        floor = self._version(self._window.floor(step))
        for entry in entries:
            self._taken[entry.group] = entry
            self._record(Event(Kind.TAKEN, entry.group, entry.attempt, step, self._version(entry.oldest)))
        self._take = Take(step=step, groups=tuple(Chosen(entry.group, entry.attempt, floor) for entry in entries))
        self.step = step + 1
        return self._take

    @property
    def steps_due(self) -> int:
        """Steps that are done again, as the record says, before the window chooses."""
        return len(self._due)

    def fetch(self, chosen: Sequence[Chosen]) -> list[Group | Kept]:
        """Payloads of taken groups, in the order asked. Raises LedgerError for a group that is not taken now."""
        payloads = []
        for each in chosen:
            entry = self._taken.get(each.group)
            if entry is None or entry.attempt != each.attempt or entry.payload is None:
                raise LedgerError(f"attempt {each.attempt} of group {each.group} is not taken by a step in training")
            payloads.append(entry.payload)
        return payloads

    def finish(self, step: int, version: Version) -> None:
        """The take of `step` is trained; its payloads are let go. Saying so twice changes nothing."""
        if version != self._version(step + 1):
            raise LedgerError(
                f"step {step} was said to publish {version}; on this line it is {self._version(step + 1)}"
            )
        if self._take is None or self._take.step != step:
            if self._first <= step < self.step:
                return
            raise LedgerError(f"step {step} cannot be trained: it was not taken; the next to take is {self.step}")
        for entry in self._taken.values():
            self._record(Event(Kind.TRAINED, entry.group, entry.attempt, step))
        self._trained += len(self._taken)
        self._taken.clear()
        self._take = None

    def serve(self, version: Version) -> None:
        """A live engine serves `version`: the tickets of the steps that led to it come home."""
        if version.line != self.line or version.n > self.step:
            raise LedgerError(
                f"version {version} cannot be served: {self._version(self.step)} is the newest there can be"
            )
        self.tickets.serve(version.n)

    def check_cut(self, step: int) -> None:
        """Raises LedgerError unless every step below `step` is trained."""
        trained = self.step if self._take is None else self._take.step
        if not self._first <= step <= trained:
            raise LedgerError(f"a checkpoint of step {step} cannot be: line {self.line} is trained up to {trained}")

    def counts(self) -> Counts:
        oldest = min((e.oldest for held in (self._running, self._ready) for e in held.values()), default=self.step)
        return Counts(
            line=self.line,
            step=self.step,
            served=self._version(self.tickets.served),
            posed=self._posed,
            waiting=len(self._waiting),
            running=len(self._running),
            ready=len(self._ready),
            taken=len(self._taken),
            trained=self._trained,
            dropped=dict(self._dropped),
            reposed=dict(self._reposed),
            refused=dict(self._refused),
            tickets_free=self.tickets.free,
            tickets_busy=self.tickets.held + self.tickets.spent,
            oldest_age=max(self.step - oldest, 0),
            due=sum(map(len, self._due)),
            solve_rates=self._curriculum.rates(),
        )

    def why_no_ticket(self) -> str:
        """What `pose` waits for."""
        tickets = self.tickets
        return (
            f"a free ticket: {tickets.total} in all, {len(self._running)} with running groups, {len(self._ready)} with"
            f" ready ones, {tickets.spent} with steps whose version no engine serves (newest served:"
            f" {self._version(tickets.served)})"
        )

    def why_no_take(self) -> str:
        """What `choose` waits for."""
        decision = self._window.decide(self.step, self._ready.values(), self._running.values())
        age = "" if decision.up_to is None else f" of version <= {self._version(decision.up_to)}"
        dropped = "".join(f"; dropped as {reason}: {count}" for reason, count in sorted(self._dropped.items()))
        return (
            f"{decision.missing} more {'group' if decision.missing == 1 else 'groups'}{age} for step {self.step}"
            f" (running: {listed(decision.among)}; ready: {len(self._ready)}; to be posed again: {len(self._waiting)};"
            f" tickets free: {self.tickets.free}; newest served: {self._version(self.tickets.served)}{dropped})"
        )

    def _again(self) -> list[Entry]:
        """The groups of a step that is done again; their tickets were spent when the line began."""
        return self._due.popleft()

    def _fresh_take(self, step: int) -> list[Entry]:
        decision = self._window.decide(step, self._ready.values(), self._running.values())
        for group in decision.expired:
            self._repose(self._ready.get(group) or self._running[group], "expired")
        if decision.chosen:
            self.tickets.spend(step, len(decision.chosen))
        return [self._ready.pop(group) for group in decision.chosen]

    def _fate(self, group: Group) -> tuple[Kind, str]:
        """What `put` makes of a group, and why."""
        ticket, entry = group.ticket, self._running.get(group.ticket.group)
        if ticket.line != self.line:
            return Kind.REFUSED, "dead_line"
        if entry is None or entry.attempt != ticket.attempt:
            return Kind.REFUSED, "late"
        usable = [episode for episode in group.episodes if not episode.failed and episode.spans]
        versions = [span.version for episode in usable for span in episode.spans]
        if not versions:
            return Kind.DROPPED, "no_episodes"
        if not self._keep_no_signal and equal_rewards(usable):
            return Kind.DROPPED, "no_signal"
        if any(version.line != self.line for version in versions):
            return Kind.WAITING, "dead_line"
        if (newest := max(versions)).n > self.step:
            raise LedgerError(f"group {entry.group} holds tokens of {newest}; {self._version(self.step)} is the newest")
        if min(versions).n < entry.oldest:  # its deadline would be earlier than what the window has reckoned with
            return Kind.WAITING, "older_than_start"
        return Kind.READY, ""

    def _ages(self, entry: Entry, part: Group) -> tuple[Version, Version] | None:
        """Oldest and newest version of what is there of a group; None if the window has not reckoned with it."""
        versions = [span.version for episode in part.episodes for span in episode.spans]
        if not versions or any(version.line != self.line or version.n < entry.oldest for version in versions):
            return None
        if (newest := max(versions)).n > self.step:
            raise LedgerError(f"group {entry.group} holds tokens of {newest}; {self._version(self.step)} is the newest")
        return min(versions), newest

    def _rejoined(self, group: int, attempt: int) -> Entry:
        """A group's next attempt: it goes on from what is there of it, if that can still be trained in time."""
        served, left = self.tickets.served, self._left.pop(group, None)
        entry = Entry(group, attempt, oldest=served, newest=served)
        if left is None:
            return entry
        entry.oldest = min(left.oldest, served)
        others = (*self._running.values(), *self._ready.values())
        known = left.newest <= self.step  # else it is of a version that a restart undid and has yet to come to again
        if known and self._window.may_rejoin(self.step + len(self._due), entry, others):
            entry.left = left
        else:
            entry.oldest = served
        return entry

    def _settle(self, entry: Entry, payload: Group, place: Place | None) -> None:
        versions = [span.version for episode in payload.episodes if not episode.failed for span in episode.spans]
        oldest, newest = min(versions), max(versions)
        entry.oldest, entry.newest, entry.payload = oldest.n, newest.n, payload
        self._ready[entry.group] = self._running.pop(entry.group)
        told: dict[str, Any] = {"newest": newest, "place": place, "solved": self._curriculum.measure(payload)}
        self._record(Event(Kind.READY, entry.group, entry.attempt, version=oldest, **told))

    def _find(self, group: int, attempt: int) -> Entry | None:
        """The running attempt; any other is counted as late."""
        entry = self._running.get(group)
        if entry is None or entry.attempt != attempt:
            self._refuse(group, attempt, "late")
            return None
        return entry

    def _refuse(self, group: int, attempt: int, reason: str) -> None:
        self._refused[reason] += 1
        self._record(Event(Kind.REFUSED, group, attempt, reason=reason))

    def _drop(self, entry: Entry, reason: str, solved: Solved | None = None) -> None:
        self._leave(entry)
        self._dropped[reason] += 1
        self._record(Event(Kind.DROPPED, entry.group, entry.attempt, reason=reason, solved=solved))

    def _repose(self, entry: Entry, reason: str, **left: Any) -> None:
        """`left`: where what is there of it lies and its versions, or the attempt whose it is."""
        self._leave(entry)
        heapq.heappush(self._waiting, (entry.group, entry.attempt))
        self._reposed[reason.partition(":")[0]] += 1
        self._record(Event(Kind.WAITING, entry.group, entry.attempt, reason=reason, **left))

    def _leave(self, entry: Entry) -> None:
        if self._running.pop(entry.group, None) is None:
            del self._ready[entry.group]
        self.tickets.home()

    def _check_next(self, step: int) -> None:
        if self._take is not None:
            raise LedgerError(f"step {step} cannot be taken: step {self._take.step} is taken and not trained yet")
        if step != self.step:
            raise LedgerError(f"step {step} cannot be taken: the next is step {self.step}")

    def _version(self, n: int) -> Version:
        return Version(self.line, n)
