"""Where on a cluster a worker may live: its pool by its name, and what a start asks of machines that offer pools.

A machine offers a pool by a resource `contraflow_POOL`: how many workers of it may live there. Pure; knows of machines
only what they offer.
"""

import math
from collections.abc import Collection, Mapping, Sequence

import msgspec

from contraflow.errors import ClusterError

POOLS = {"trainer": "train", "rollout": "rollout", "reward-model": "reward", "buffer": "buffer"}
ANYWHERE = 0.001  # of a CPU: as good as nothing, but a machine that offers no CPU, such as a head, is left out

Offers = Mapping[str, float]  # what one machine has, by name of resource


class Berths(msgspec.Struct, frozen=True):
    """Bundles of resources, each on one machine; `each` workers live in one. `spread`: no two on the same machine."""

    bundles: tuple[dict[str, float], ...]
    each: int
    spread: bool

    def bundle_of(self, rank: int) -> int:
        """Neighbours by rank share a machine, and so its NVLink domain."""
        return rank // self.each

    @property
    def one(self) -> dict[str, float]:
        """What one worker takes of its bundle."""
        return {name: amount / self.each for name, amount in self.bundles[0].items()}


def resource(pool: str) -> str:
    return f"contraflow_{pool}"


def pool_of(worker: str) -> str:
    """The pool that a worker is of, by the name that the system gives it; empty for any other name."""
    role, _, number = worker.rpartition("-")
    return POOLS.get(worker) or (POOLS.get(role, "") if number.isdigit() else "")


def plan_berths(name: str, size: int, machines: Sequence[Offers], gpu_pools: Collection[str]) -> Berths:
    """What to reserve for `size` workers started as `name`: all on one machine where they fit, else whole machines.

    A worker takes one of its pool's resource where any machine offers that, and a GPU if its pool computes on GPUs.
    Raises: ClusterError when no number of such machines can hold them.
    """
    pool = pool_of(name)
    wanted = [resource(pool)] if pool and any(machine.get(resource(pool)) for machine in machines) else []
    wanted += ["GPU"] if pool in gpu_pools else []
    if not wanted:
        return Berths(({"CPU": ANYWHERE * size},), size, spread=False)
    most = max((min(math.floor(machine.get(kind, 0)) for kind in wanted) for machine in machines), default=0)
    if not most or (size > most and size % most):
        raise ClusterError(
            f"no place for {size} workers of {name!r}: a worker takes 1 of each of {wanted}, and the machine that"
            f" offers most has room for {most}; offer more, or ask for a size that fills whole machines"
        )
    each = min(size, most)
    bundle = {kind: float(each) for kind in wanted}
    return Berths((bundle,) * (size // each), each, spread=size > most)
