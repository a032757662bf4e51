"""What a view is shown: one snapshot of the whole run, made once a second and at the end.

Does not gather or draw: contraflow/run.py gathers, the views draw.
"""

from typing import Protocol

import msgspec


class Worker(msgspec.Struct, frozen=True):
    """One process: what it does now, and its seconds by cause since it started."""

    name: str
    doing: str
    seconds: dict[str, float]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment. Histories are one value per step (reward) or per look (accuracy), oldest first."""

    elapsed_s: float
    left_s: float | None  # None until a step has been timed
    step: int  # steps done
    steps: int
    rewards: tuple[float, ...]
    accuracies: tuple[float, ...]
    age_mean: float  # of the tokens trained by the last step
    age_max: int  # the oldest token trained so far
    age_bound: int  # eta
    rollout_tokens_s: float  # since the snapshot before
    train_tokens_s: float
    tickets_busy: int
    tickets: int
    groups: dict[str, int]  # by state: waiting, running, ready, taken, trained, dropped
    workers: tuple[Worker, ...]
    note: str = ""  # the last thing worth a line: a death, a refused version


class View(Protocol):
    """Where snapshots go."""

    def show(self, snapshot: Snapshot) -> None:
        """A second has passed, or the run has ended."""
        ...

    def end(self, outcome: str) -> None:
        """The run is over; `outcome` says how, in a line or two."""
        ...
