"""Tasks of the `verifiers` package (an extra), any installed taskset by name, played and scored by its own code.

Takes the name of a taskset and its options; gives its tasks in an order that is a function of split and index. A keyed
hash of what is asked decides what is held out, so the splits are disjoint by construction. Episodes are played by a
process beside the rollout worker (rollout/player.py); the package itself is spoken to in `verifiers_package.py` alone.
"""

import functools
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from contraflow.envs.base import Session, Split
from contraflow.envs.draws import derive_seed, in_test_split
from contraflow.envs.harness import Reference
from contraflow.envs.options import Options
from contraflow.errors import ConfigError
from contraflow.types import Task

if TYPE_CHECKING:
    from contraflow.envs.verifiers_package import World


class VerifiersOptions(Options):
    """Which tasks, and which environment of the package plays them."""

    taskset: Annotated[str, Field(min_length=1)]  # an installed one, by its id
    options: Annotated[dict[str, Any], Field(default_factory=dict)]  # the taskset's own, as the package names them
    env: str = ""  # id of the package's environment; empty: the taskset's own, or one turn after another as it comes
    env_options: Annotated[dict[str, Any], Field(default_factory=dict)]  # that environment's own
    listed: Annotated[int, Field(ge=10, le=1_000_000)] = 100_000  # tasks that are read at most
    seed: int = 0
    test_share: Annotated[float, Field(ge=0.01, le=0.5)] = 0.1  # share of all questions that is held out


class Verifiers:
    """The environment. Stateless: a task depends on options, split and index alone."""

    name = "verifiers"
    bounded = False  # the first task of an epoch sorts all of them

    def __init__(self, options: VerifiersOptions) -> None:
        """Raises: ConfigError without the extra, for a taskset that is refused, and when a split would be empty."""
        self.options = options
        self._world = open_world(options)
        self._rows: dict[Split, list[int]] = {"train": [], "test": []}
        for row, asked in enumerate(self._world.asked):
            self._rows["test" if in_test_split(options.seed, asked, options.test_share) else "train"].append(row)
        if empty := [split for split, rows in self._rows.items() if not rows]:
            raise ConfigError(
                f"env.options.taskset = {options.taskset!r}: none of its {len(self._world.asked)} tasks is a {empty[0]}"
                " task; choose another env.options.test_share or seed"
            )
        self._order = functools.lru_cache(maxsize=4)(self._shuffled)

    def task(self, split: Split, index: int) -> Task:
        """Each task of the split once before any comes again. Facts name the row and the hash of its contents."""
        rows = self._rows[split]
        epoch, place = divmod(index, len(rows))
        row = self._order(split, epoch)[place]
        facts = {"kind": self.options.taskset, "row": str(row), "hash": self._world.hash(row), "scored": "env"}
        return Task(key=f"{split}/{index}", prompt=self._world.asked[row], reference="", facts=facts)

    def open(self, task: Task) -> Session:
        """What an episode is without the process that plays, for the check before a run."""
        return Reference(task)

    def _shuffled(self, split: Split, epoch: int) -> list[int]:
        return sorted(self._rows[split], key=lambda row: derive_seed(self.options.seed, split, epoch, row))


def open_world(options: VerifiersOptions, *, deadline_s: float | None = None) -> "World":
    """The package's side of it. `deadline_s` bounds each hook of a task. Raises: ConfigError."""
    try:
        from contraflow.envs.verifiers_package import World
    except ImportError as fault:
        raise ConfigError(f"env.name = 'verifiers' needs pip install 'contraflow[verifiers]': {fault}") from None
    return World(options, deadline_s=deadline_s)
