"""Brings a cut about while training goes on: trainer ranks and the buffer write parts, then one commit.

Takes a started `System`; moves names and digests, no payloads. Does not decide when to save: that is loop.py.
"""

import asyncio
import hashlib

from contraflow.buffer.service import Buffer
from contraflow.config import Recipe, recipe_toml
from contraflow.cuts import CutId, cut_name
from contraflow.system import System
from contraflow.train.uploads import space_url
from contraflow.train.worker import Trainer

CALL_S = 30.0  # deadline of a call that has nothing to wait for
GRACE_S = 10.0  # the way there and back for a call that bounds its own wait


class Saver:
    """Invariant: at most one cut is on its way; the next begins when it is committed."""

    def __init__(self, system: System, recipe: Recipe) -> None:
        self._system = system
        self._recipe = recipe
        self._under_way: asyncio.Task[None] | None = None
        self.newest = ""  # name of the cut committed last
        self.step = -1  # of the cut begun last

    async def begin(self, step: int, tasks: asyncio.TaskGroup) -> None:
        """Copy the state before `step`, and have it written and committed by one of `tasks`; once for each step.

        Waits for the cut before. Raises what kept that one from being committed.
        """
        if step == self.step:
            return
        await self.settle()
        await self._system.trainer.call(self._recipe.run.stall_s, Trainer.save, step)
        self.step = step
        self._under_way = tasks.create_task(self._finish(step))

    async def settle(self) -> None:
        """Wait until the cut begun last is committed."""
        if self._under_way is not None:
            await asyncio.shield(self._under_way)

    async def export(self) -> str:
        """Write the model of the newest cut as RUN/model; its folder."""
        folder = str(self._system.folder / "model")
        deadline_s = self._recipe.train.checkpoint_deadline_s + GRACE_S
        await self._system.trainer.refs[0].call(deadline_s, Trainer.export, self.newest, folder)
        return folder

    async def _finish(self, step: int) -> None:
        system, train = self._system, self._recipe.train
        deadline_s = train.checkpoint_deadline_s + GRACE_S
        cut = CutId(cut_name(system.line, step), system.writer)
        by_rank, (ridden, stands) = await asyncio.gather(
            system.trainer.call(deadline_s, Trainer.saved),
            system.buffer.call(
                deadline_s,
                Buffer.ride,
                space_url(train, system.folder),
                cut,
                train.checkpoint_deadline_s,
                self._recipe.runtime.kind != "inline",
            ),
        )
        toml = recipe_toml(self._recipe)
        about = {"ledger": stands, "recipe": toml, "config": hashlib.sha256(toml.encode()).hexdigest()}
        parts = [part for parts in [*by_rank, ridden] for part in parts]
        self.newest = await system.trainer.refs[0].call(deadline_s, Trainer.commit, parts, about)
        await system.buffer.call(CALL_S, Buffer.cut, step)
