"""Which ready groups may leave for the next step: the age guarantee, as a pure decision.

Takes the step, the ready and the running groups; gives the P groups to take, those to drop as expired, or what the
trainer has to wait for. Does not hold groups, count tickets or wait. docs/staleness.md has the proof.

Words: `step` is the step about to be taken (m), P groups a step, eta the largest age. A group's deadline is the last
step that may train its oldest token: n(oldest) + eta.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Literal, Protocol

from contraflow.config import Buffer


class Held(Protocol):
    """An unfinished group. Only the n of versions is here: all are of the same line."""

    @property
    def group(self) -> int: ...

    @property
    def oldest(self) -> int:
        """n of the oldest trained token; while running, n of a version that no token can be older than."""
        ...

    @property
    def newest(self) -> int:
        """n of the newest trained token; means nothing while the group runs."""
        ...


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the window says: either `chosen` has P groups, or `missing` says how many more must become ready.

    `among` are the running groups that can supply them, `up_to` their youngest version when only old ones will do.
    `expired` are to be dropped and posed again in either case.
    """

    chosen: tuple[int, ...] = ()
    expired: tuple[int, ...] = ()
    missing: int = 0
    among: tuple[int, ...] = ()
    up_to: int | None = None


@dataclass(frozen=True, kw_only=True)
class Window:
    """The rule by which groups leave.

    `hold`: a take must leave a set that later takes can still train in time (earliest deadline first, P a step);
    where the ready groups do not allow that, it waits for running ones. Nothing expires.
    `mask`: takes any P, oldest first; a group expires once its newest token is older than eta.
    `repose`: takes any P, oldest first; a group, ready or running, expires once its oldest token is older than eta.
    """

    policy: Literal["hold", "mask", "repose"]
    groups_per_step: int
    max_age: int

    @classmethod
    def of(cls, section: Buffer) -> "Window":
        return cls(policy=section.expiry, groups_per_step=section.groups_per_step, max_age=section.max_age)

    def floor(self, step: int) -> int:
        """n of the oldest version whose tokens `step` may train."""
        return max(step - self.max_age, 0)

    def decide(self, step: int, ready: Collection[Held], running: Collection[Held]) -> Decision:
        """Choose for `step`. Under `hold` the caller keeps `feasible` true between takes; tickets see to that."""
        expired = self._expired(step, ready, running)
        able = len(ready) - len(expired.intersection(held.group for held in ready))
        if able < self.groups_per_step:
            among = tuple(held.group for held in running if held.group not in expired)
            return Decision(expired=tuple(sorted(expired)), missing=self.groups_per_step - able, among=among)
        fit = (held for held in ready if held.group not in expired)
        ordered = sorted(fit, key=lambda held: (held.oldest, held.group))
        chosen, rest = ordered[: self.groups_per_step], ordered[self.groups_per_step :]
        if self.policy == "hold" and (shortage := self._shortage(step, rest, running)):
            return shortage
        return Decision(chosen=tuple(held.group for held in chosen), expired=tuple(sorted(expired)))

    def admit(self, step: int, held: Iterable[Held]) -> set[int]:
        """The groups, of those that a restart found ready, which steps `step`, `step` + 1, ... can still train in time:
        as many as possible, earliest deadline first (unit jobs: Moore 1968). The others are `feasible` without them."""
        admitted: set[int] = set()
        dated = ((each.newest if self.policy == "mask" else each.oldest, each.group) for each in held)
        for bound, group in sorted(dated):
            if len(admitted) < (bound + self.max_age - step + 1) * self.groups_per_step:
                admitted.add(group)
        return admitted

    def may_rejoin(self, step: int, old: Held, others: Iterable[Held]) -> bool:
        """Whether a group that is posed again may bring tokens of an earlier attempt along: what is live beside it, and
        itself, can still be trained in time. `step` is the next that chooses."""
        if self.policy == "hold":
            return self.feasible(step, chain(others, [old]))
        return old.oldest >= self.floor(step)

    def feasible(self, step: int, held: Iterable[Held]) -> bool:
        """Whether steps `step`, `step` + 1, ... can still train all of `held` in time: for every d >= step - 1,
        at most (d - step + 1) * P of them have a deadline of d or before."""
        return self._overfull(step, held) is None

    def _overfull(self, step: int, held: Iterable[Held]) -> tuple[int, int] | None:
        """The first deadline by which more groups are due than fit from `step` on, and by how many."""
        due = 0
        by_deadline = Counter(each.oldest + self.max_age for each in held)
        for deadline in sorted(by_deadline):  # between deadlines the count stands still and the room only grows
            due += by_deadline[deadline]
            excess = due - max(deadline - step + 1, 0) * self.groups_per_step
            if excess > 0:
                return deadline, excess
        return None

    def _shortage(self, step: int, rest: Iterable[Held], running: Collection[Held]) -> Decision | None:
        """What a take of the oldest ready groups lacks: it must leave a set that is feasible from `step` + 1 on.

        The oldest P ready are the best choice: for every deadline they hold as many of the due groups as any P can.
        """
        overfull = self._overfull(step + 1, chain(rest, running))
        if overfull is None:
            return None
        deadline, excess = overfull
        up_to = deadline - self.max_age
        among = tuple(held.group for held in running if held.oldest <= up_to)
        return Decision(missing=excess, among=among, up_to=up_to)

    def _expired(self, step: int, ready: Iterable[Held], running: Iterable[Held]) -> set[int]:
        floor = self.floor(step)
        match self.policy:
            case "hold":
                return set()
            case "mask":
                return {held.group for held in ready if held.newest < floor}
            case "repose":
                return {held.group for held in chain(ready, running) if held.oldest < floor}
