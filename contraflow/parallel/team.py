"""What the ranks that train one model say to each other: sums and gathers of what each has seen of an update.

A team of one says nothing and gives back what it was given. Does not compute losses or know the model. Every method is
collective: all ranks call it, in the same order, with the same shapes where a sum is asked for.
Shape letters: B micro-batches of an update, N trained tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from contraflow.dispatch.domains import Topology
from contraflow.dispatch.group import GroupLinks
from contraflow.errors import TrainingError
from contraflow.parallel.mesh import Mesh

T = TypeVar("T")


class Team:
    """The ranks of a mesh; None is one rank alone.

    Tensor ranks compute the same losses, so only the first of each set speaks. What a pipeline stage does not know (the
    losses, the loads of other stages' layers) it gives as zeros or as nothing.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        self.mesh = mesh
        self.shares = 1 if mesh is None else mesh.parallel.dp  # of the micro-batches of an update

    @property
    def first(self) -> bool:
        """Whether this rank writes and reports for all."""
        return self.mesh is None or self.mesh.first

    @property
    def staged(self) -> bool:
        """Whether some layers are on other ranks."""
        return self.mesh is not None and self.mesh.parallel.pp > 1

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A stretch of work in which ranks wait for each other: all enter it, for the same purpose.

        Raises: WorkerDied, naming them, when ranks do not enter, or fall silent later; TrainingError when some are at
        something else.
        """
        if self.mesh is None:
            yield
            return
        circle = GroupLinks(
            self.mesh.world,
            topology=Topology((0,) * self.mesh.parallel.ranks),  # nobody counts these bytes
            device=self.mesh.device,
            store=self.mesh.store,
            deadline_s=self.mesh.parallel.deadline_s,
        )
        for rank, theirs in enumerate(circle.gather(what)):
            if theirs != what:
                raise TrainingError(f"rank {circle.rank} is at {what}, rank {rank} at {theirs}: calls went astray")
        try:
            yield
        except RuntimeError as fault:
            if not isinstance(fault, dist.DistError) and "gloo" not in str(fault):
                raise
            raise circle.fallen(what, fault) from fault

    def mine(self, everybody: Sequence[T]) -> list[T]:
        """This rank's share of a list that all ranks have alike; its length is a multiple of `shares`."""
        return list(everybody) if self.mesh is None else list(everybody[self.mesh.here.dp :: self.shares])

    def total(self, value: Tensor) -> Tensor:
        """The sum over all ranks that have something to say; on every rank. `value` has one shape everywhere."""
        if self.mesh is None:
            return value
        return self.sum(value if self._speaks else torch.zeros_like(value))

    def once(self, value: Tensor) -> Tensor:
        """As `total`, where all stages of a pipeline have the same to say: only the last one's counts."""
        last = self.mesh is None or self.mesh.here.pp == self.mesh.parallel.pp - 1
        return self.total(value if last else torch.zeros_like(value))

    def along(self, value: Tensor) -> Tensor:
        """The sum over the ranks that share the tokens of each sequence with this one."""
        if self.mesh is None or self.mesh.parallel.cp == 1:
            return value
        summed = value.detach().clone()
        dist.all_reduce(summed, group=self.mesh.cp)
        return summed

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all ranks without exception; on every rank."""
        if self.mesh is None:
            return value
        summed = value.detach().clone()
        dist.all_reduce(summed, group=self.mesh.world)
        return summed

    def words(self, mine: str) -> list[str]:
        """What every rank has to say, by rank; for people."""
        if self.mesh is None:
            return [mine]
        said = [""] * self.mesh.parallel.ranks
        dist.all_gather_object(said, mine, group=self.mesh.world)
        return said

    def rows(self, mine_B: Tensor, count: int) -> Tensor:
        """Rows of all `count` micro-batches, in the order of the whole list, from each rank's `[B, ...]` of its own."""
        if self.mesh is None:
            return mine_B
        all_B = mine_B.new_zeros(count, *mine_B.shape[1:])
        all_B[self.mesh.here.dp :: self.shares] = mine_B
        return self.total(all_B)

    def joined(self, mine_xN: Tensor) -> Tensor:
        """Columns of all ranks side by side, `[..., N]`; ranks may have different numbers of them, or none."""
        if self.mesh is None:
            return mine_xN
        mine = (mine_xN if self._speaks else mine_xN[..., :0]).detach().cpu()
        parts: list[Tensor] = [mine] * self.mesh.parallel.ranks
        dist.all_gather_object(parts, mine, group=self.mesh.world)
        return torch.cat(parts, -1).to(mine_xN.device)

    @property
    def _speaks(self) -> bool:
        return self.mesh is None or self.mesh.here.tp == 0
