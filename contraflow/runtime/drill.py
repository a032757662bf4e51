"""A worker to try a runtime with: it answers, waits, blocks, fails and calls others, and does nothing useful.

Used by the contract suite that every runtime passes and by the benchmark of the channel. Shipped, so that worker
processes can import it.
"""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from contraflow import errors
from contraflow.runtime.base import Address, Host, Rendezvous
from contraflow.types import Float32, Group


class Drill:
    """Its attributes are only what the methods below show."""

    def __init__(self, host: Host, rendezvous: Rendezvous | None, *, closing_s: float, marker: str) -> None:
        self._host, self._rendezvous = host, rendezvous
        self._closing_s, self._marker = closing_s, marker
        self._kept = np.zeros(4, np.float32)
        self._cancelled = 0
        self._cancellation = asyncio.Event()
        self._joined = False  # in a process group

    async def add(self, a: int, b: int = 2) -> int:
        return a + b

    async def name(self) -> str:
        return self._host.name

    async def clock(self) -> float:
        return self._host.clock()

    async def process(self) -> int:
        return os.getpid()

    async def threads(self) -> int:
        """Torch threads of the process."""
        import torch

        return torch.get_num_threads()

    async def variable(self, name: str) -> str:
        """An environment variable of the process."""
        return os.environ.get(name, "")

    async def echo(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array

    async def size(self, array: npt.NDArray[Any]) -> int:
        return array.nbytes

    async def group(self, group: Group) -> Group:
        return group

    async def keep(self, array: Float32) -> Float32:
        """Keep an array, and give the very one that is kept."""
        self._kept = array
        return self._kept

    async def kept(self) -> list[float]:
        return [float(x) for x in self._kept]

    async def wait(self, seconds: float) -> str:
        """Sleep on the event loop; counts when it is cancelled."""
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self._cancelled += 1
            self._cancellation.set()
            raise
        return "waited"

    async def cancelled(self, wanted: int) -> int:
        """Wait until that many waits were cancelled."""
        while self._cancelled < wanted:
            self._cancellation.clear()
            await self._cancellation.wait()
        return self._cancelled

    async def cancel_self(self) -> None:
        """End as a task that something in the worker cancelled."""
        raise asyncio.CancelledError

    async def block(self, seconds: float) -> None:
        """Hold up the event loop, as a bad worker would."""
        time.sleep(seconds)  # noqa: ASYNC251 - on purpose

    async def fail(self, kind: str, text: str) -> None:
        """Raise a class of errors.py by name, or a ValueError for any other name."""
        if kind == "WorkerDied":
            raise errors.WorkerDied("somebody", text)
        if kind == "DeadlineExceeded":
            raise errors.DeadlineExceeded("somebody", text, 1.5)
        if kind == "RemoteError":
            raise errors.RemoteError("somebody", "do", type="OSError", text=text)
        if kind == "ServerError":
            raise errors.ServerError("somewhere", "late", text)
        if kind == "JudgeError":
            raise errors.JudgeError("somewhere", "late", text)
        raise getattr(errors, kind, ValueError)(text)

    async def nonsense(self) -> int:
        """Break the promise of the annotation."""
        return "seven"  # type: ignore[return-value]

    async def unspeakable(self) -> Any:
        """Give what has no wire format."""
        return object()

    async def exit(self, code: int) -> None:
        """End the process on the spot."""
        os._exit(code)

    async def give_up(self, reason: str) -> None:
        """End as one that died."""
        self._host.give_up(reason)

    async def relay_add(self, address: Address, a: int) -> int:
        """Ask another worker to add."""
        return await self._host.connect(address).call(5, Drill.add, a)

    async def relay_wait(self, address: Address, seconds: float, deadline_s: float) -> str:
        """Let another worker wait."""
        return await self._host.connect(address).call(deadline_s, Drill.wait, seconds)

    async def rank(self) -> int:
        return self._rendezvous.rank if self._rendezvous else -1

    async def fail_on(self, rank: int, others_wait_s: float) -> int:
        """One rank raises, the others wait."""
        mine = await self.rank()
        if mine == rank:
            raise errors.TrainingError(f"rank {mine} has no gradient")
        await self.wait(others_wait_s)
        return mine

    async def exit_on(self, rank: int) -> float:
        """One rank ends its process, the others wait for it in a collective."""
        if await self.rank() == rank:
            os._exit(7)
        return await self.sum(1.0)

    async def sum(self, value: float) -> float:
        """All-reduce over the gang with torch.distributed (gloo)."""
        return await asyncio.to_thread(self._sum, value)

    def _sum(self, value: float) -> float:
        import torch
        import torch.distributed as dist

        place = self._rendezvous
        if place and not self._joined:
            dist.init_process_group("gloo", init_method=place.init_method, rank=place.rank, world_size=place.world)
            self._joined = True
        total = torch.tensor(value)
        dist.all_reduce(total)
        return total.item()

    async def close(self) -> None:
        if self._joined:
            import torch.distributed as dist

            dist.destroy_process_group()
        await asyncio.sleep(self._closing_s)
        self._mark()

    def _mark(self) -> None:
        if self._marker:
            Path(self._marker).write_text(self._host.name, encoding="utf-8")


def make_drill(
    host: Host,
    *,
    rendezvous: Rendezvous | None = None,
    fail: str = "",
    fail_rank: int = -1,
    block_s: float = 0.0,
    closing_s: float = 0.0,
    marker: str = "",
) -> Drill:
    """A `Drill`; raises `fail` (a class of errors.py, or a ValueError) if asked to, on one rank or on all."""
    time.sleep(block_s)
    if fail and (rendezvous is None or rendezvous.rank == fail_rank):
        raise getattr(errors, fail, ValueError)(f"{host.name} cannot be made")
    return Drill(host, rendezvous, closing_s=closing_s, marker=marker)
