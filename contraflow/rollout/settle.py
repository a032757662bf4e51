"""`Peers` over real ranks: what they settle goes by the leader, what tp ranks sample by their process group."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from contraflow.errors import CarrierError
from contraflow.parallel.mesh import Mesh
from contraflow.rollout.orders import Consent, Passes, hear
from contraflow.rollout.star import LEADER, Star
from contraflow.types import Int32

M = TypeVar("M", bound=Passes | Consent)


class StarPeers:
    """See `Peers`; every call also raises WorkerDied or DeadlineExceeded, naming a rank."""

    def __init__(self, star: Star, mesh: Mesh) -> None:
        self._star, self._mesh = star, mesh

    def passes(self, prefill: bool, decode: bool) -> tuple[bool, bool]:
        """See `Peers`."""
        any_has = self._settle(
            Passes(prefill, decode), lambda all_: Passes(any(p.prefill for p in all_), any(p.decode for p in all_))
        )
        return any_has.prefill, any_has.decode

    def sampled(self, sampled_2B: Int32) -> Int32:
        """See `Peers`: what the first tp rank sampled, in case logits differ in the last bit between them."""
        if self._mesh.parallel.tp == 1:
            return sampled_2B
        shared = torch.from_numpy(sampled_2B.copy()).to(self._mesh.device)
        dist.broadcast(shared, group=self._mesh.tp, group_src=0)
        agreed: Int32 = shared.cpu().numpy()
        return agreed

    def consent(self, fault: CarrierError | None) -> None:
        """See `Peers`."""
        mine = "" if fault is None else f"rank {self._star.rank}: {fault}"
        settled = self._settle(
            Consent(mine), lambda all_: Consent(next((c.objection for c in all_ if c.objection), ""))
        )
        if settled.objection:
            raise CarrierError(settled.objection)

    def _settle(self, mine: M, join: Callable[[list[M]], M]) -> M:
        star, kind = self._star, type(mine)
        if star.rank != LEADER:
            star.tell(LEADER, mine)
            return star.hear(LEADER, kind)
        joined = join([mine, *(hear(star, rank, kind) for rank in star.others)])
        for rank in star.others:
            star.tell(rank, joined)
        return joined
