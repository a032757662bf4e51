"""One rank of an engine that is spread over several: joins the others, and takes its part of the model.

Takes an `engine` section and a rendezvous, gives the rank's core with what connects it. What the rank does then is
`gang.py` on rank 0 and `follow.py` on the others.
"""

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass

import torch

from contraflow.config import Engine as EngineSection
from contraflow.model.decoder import Decoder
from contraflow.parallel.mesh import Mesh, open_mesh
from contraflow.rollout.core import EngineCore
from contraflow.rollout.gang import GangCore, GangEngine
from contraflow.rollout.settle import StarPeers
from contraflow.rollout.star import Star, open_star
from contraflow.runtime.base import Rendezvous
from contraflow.telemetry import Clock
from contraflow.types import Version


@dataclass(frozen=True)
class Seat:
    """A rank's place among the others. `leave` ends it: the process may sit somewhere else then."""

    mesh: Mesh
    star: Star
    leave: Callable[[], None]


def take_seat(section: EngineSection, rendezvous: Rendezvous, *, device: torch.device | str = "cpu") -> Seat:
    """Join the engine's ranks. Collective. Raises DeadlineExceeded, or what torch raises, when one does not come."""
    parallel = section.parallel
    with ExitStack() as stack:
        mesh = stack.enter_context(
            open_mesh(parallel, rank=rendezvous.rank, init_method=rendezvous.init_method, device=device)
        )
        star = open_star(mesh.world, rendezvous.init_method, deadline_s=parallel.deadline_s, device=device)
        stack.enter_context(closing(star))
        return Seat(mesh, star, stack.pop_all().close)
    raise AssertionError("unreachable")


def seated_core(
    decoder: Decoder, section: EngineSection, seat: Seat, *, clock: Clock, version: Version | None = None
) -> EngineCore:
    """The core of a rank whose decoder is its part of the model."""
    return EngineCore(decoder, section, clock=clock, version=version, peers=StarPeers(seat.star, seat.mesh))


def led_engine(core: EngineCore, seat: Seat, *, clock: Clock, on_broken: Callable[[str], None]) -> GangEngine:
    """The engine over all ranks, on rank 0; closing it leaves the seat. `on_broken` is told if a rank is lost."""
    return GangEngine(GangCore(core, seat.star, seat.mesh, clock=clock, on_broken=on_broken), seat.leave)
