"""Looks at held-out tasks in a run: when one is due, who takes it, what is told of it.

Takes a started `System`; gives records and the accuracy of the last look. Does not decide what follows from it.
"""

from collections.abc import Callable

import msgspec

from contraflow.config import Recipe
from contraflow.progress import Progress
from contraflow.rollout.worker import RolloutWorker
from contraflow.system import System
from contraflow.versions import Versions


class Looks:
    """All looks are at the same tasks, by the first rollout worker, each of one version."""

    def __init__(self, system: System, recipe: Recipe, progress: Progress, record: Callable[..., None]) -> None:
        self._system, self._run, self._progress, self._record = system, recipe.run, progress, record

    def due(self, name: str, n: int) -> bool:
        """Whether worker `name` is to look at version `n`, now that it serves it."""
        run = self._run
        return name == self._first and run.eval_tasks > 0 and n % run.eval_every == 0 and n < run.steps

    async def look(self, name: str) -> None:
        """Held-out accuracy of the version that `name` serves, which stays the same; the same tasks every time."""
        run = self._run
        asked = (0, run.eval_tasks, run.eval_samples, run.eval_temperature)
        report = await self._system.rollouts[name].call(run.stall_s, RolloutWorker.evaluate, *asked)
        self._record("eval", **msgspec.to_builtins(report))
        self._progress.accuracy = report.accuracy
        self._progress.accuracies.append(report.accuracy)

    async def last(self, versions: Versions) -> None:
        """Look at the newest version, once it is served. Raises DeadlineExceeded."""
        first, final = self._first, versions.newest.version
        await versions.until(lambda: versions.served.get(first) == final, "learn", f"{first} to serve version {final}")
        if self._run.eval_tasks > 0:
            await self.look(first)

    @property
    def _first(self) -> str:
        return min(self._system.rollouts)
