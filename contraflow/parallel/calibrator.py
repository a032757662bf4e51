"""Ranks on this machine that time the dispatch forms together: `contraflow bench dispatch`.

Takes a mesh of dp ranks that share out the experts; gives the calibration's table. Does not choose: that is
`dispatch/choose.py`.
"""

import tempfile
from contextlib import ExitStack
from pathlib import Path

from contraflow.config import Parallel
from contraflow.dispatch.base import Phase
from contraflow.dispatch.choose import Shape, Table, calibrate
from contraflow.parallel.experts import links
from contraflow.parallel.mesh import open_mesh
from contraflow.runtime.base import Host, Rendezvous
from contraflow.runtime.local import LocalRuntime
from contraflow.telemetry import Clock


class Calibrator:
    """One rank, as a worker. Collective: all ranks make the same calls."""

    def __init__(self, parallel: Parallel, rendezvous: Rendezvous, host: Host, device: str) -> None:
        self._stack = ExitStack()
        self._mesh = self._stack.enter_context(
            open_mesh(parallel, rank=rendezvous.rank, init_method=rendezvous.init_method, device=device)
        )
        self._links = links(self._mesh, self._mesh.ep)
        self._clock = host.clock

    async def measure(self, shape: Shape, tokens: dict[Phase, list[int]], repeats: int) -> Table:
        """See `calibrate`."""
        return calibrate(
            self._links, shape, tokens, clock=self._clock, seed=0, repeats=repeats, device=self._mesh.device
        )

    async def close(self) -> None:
        """Leave the process group."""
        self._stack.close()


def make_calibrator(host: Host, *, rendezvous: Rendezvous, parallel: Parallel, device: str) -> Calibrator:
    """Joins the other ranks. `device` is cpu or cuda; on cuda each rank takes the GPU of its number."""
    place = f"cuda:{rendezvous.rank}" if device == "cuda" else device
    return Calibrator(parallel, rendezvous, host, place)


async def run_calibration(
    parallel: Parallel,
    shape: Shape,
    tokens: dict[Phase, list[int]],
    *,
    repeats: int,
    device: str,
    clock: Clock,
    deadline_s: float = 600.0,
) -> Table:
    """Start `parallel.ranks` processes on this machine, let them calibrate, stop them."""
    with tempfile.TemporaryDirectory(prefix="calibration-") as folder:
        runtime = LocalRuntime(Path(folder), clock=clock, preload=("torch", __name__))
        try:
            gang = await runtime.start_gang("rank", parallel.ranks, make_calibrator, parallel=parallel, device=device)
            tables = await gang.call(deadline_s, Calibrator.measure, shape, tokens, repeats)
        finally:
            await runtime.close()
    return tables[0]
