"""A rank of a spread engine that is not the leader: does what it is told until it is told to stop.

Takes orders from the star, gives replies. Deals with no requests of its own, no future and no event loop.
"""

from collections.abc import Iterable
from contextlib import suppress

from contraflow.errors import CarrierError, DeadlineExceeded, WorkerDied
from contraflow.parallel.mesh import Mesh
from contraflow.rollout.core import EngineCore
from contraflow.rollout.intake import Intake
from contraflow.rollout.orders import Abort, Beat, Broken, Ended, Order, Reply, Step, Stop, Submit, Swap
from contraflow.rollout.parts import share_parts
from contraflow.rollout.star import LEADER, Star


def follow(core: EngineCore, star: Star, mesh: Mesh, intake: Intake | None = None) -> None:
    """Returns when the leader says stop. Raises WorkerDied or DeadlineExceeded when it is gone or silent, and
    whatever else goes wrong. `intake` has this rank's part of a version when it is to be swapped in; None: the leader
    has them all.
    """
    try:
        order: Order
        while not isinstance(order := star.hear(LEADER, Order), Stop):
            if isinstance(order, Step):
                obey(core, order.orders)
                core.step()
                outcomes = ended(core)
                star.tell(LEADER, Reply(outcomes if mesh.here.tp == 0 else (), core.report()))
            elif isinstance(order, Swap):
                if core.slots is not None:
                    core.slots.take_loads(mesh.world)
                parts = share_parts(None, core.weights, mesh=mesh) if intake is None else intake.take(order.version)
                with suppress(CarrierError):  # all ranks go on with the old version, and the leader says so
                    core.swap(order.version, parts, order.probe)
            elif isinstance(order, Beat):
                star.tell(LEADER, order)
    except Exception as fault:
        with suppress(WorkerDied, DeadlineExceeded):
            star.tell(LEADER, Broken(f"{type(fault).__name__}: {fault}"))
        raise


def obey(core: EngineCore, orders: Iterable[Submit | Abort]) -> None:
    """Carry out what comes before a step."""
    for order in orders:
        if isinstance(order, Submit):
            core.submit(order.request, order.number)
        else:
            core.abort([order.id])


def ended(core: EngineCore) -> tuple[Ended, ...]:
    """The core's outcomes as they travel."""
    outcomes = []
    for number, outcome in core.take_outcomes():
        assert isinstance(number, int)  # `obey` gave it
        if isinstance(outcome, Exception):
            outcomes.append(Ended(number, None, str(outcome)))
        else:
            outcomes.append(Ended(number, outcome))
    return tuple(outcomes)
