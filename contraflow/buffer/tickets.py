"""The right to start a group: bounds what is in flight, and so what can go to waste.

Takes starts, ends, takes and served versions; gives the number of free tickets. Does not know groups or wait.
"""

from contraflow.errors import LedgerError


class Tickets:
    """(eta + 1) * P tickets and where they are.

    Invariant: free + held + spent == total. `held` are with groups that run or are ready; `spent` are with steps whose
    version no engine serves yet. Since step k publishes version k + 1, a ticket spent by step k comes home once a
    version n > k is served. `served` never falls. Only `free` may be negative: after a restart, while steps that are
    done again have spent more than there are.
    """

    def __init__(self, total: int, *, served: int) -> None:
        self.total = total
        self.served = served
        self.held = 0
        self._spent: dict[int, int] = {}

    @property
    def spent(self) -> int:
        return sum(self._spent.values())

    @property
    def free(self) -> int:
        return self.total - self.held - self.spent

    def issue(self) -> None:
        """Hand one out. Raises LedgerError when none is free."""
        if self.free <= 0:
            raise LedgerError(f"all {self.total} tickets are out; wait for one to come home")
        self.held += 1

    def home(self) -> None:
        """A group ended without being taken."""
        self.held -= 1

    def spend(self, step: int, count: int) -> None:
        """`step` took `count` groups; their tickets stay out until its version is served."""
        self.held -= count
        self._spent[step] = count

    def keep(self, held: int, again: dict[int, int]) -> None:
        """A restart found `held` groups ready, and steps to do again, with their numbers of groups."""
        self.held += held
        self._spent |= again

    def serve(self, n: int) -> None:
        """At least one live engine serves version `n`."""
        self.served = max(self.served, n)
        for step in [step for step in self._spent if step < self.served]:
            del self._spent[step]
