"""Virtual ranks of one process that share memory as GPUs joined by NVLink do, and run the same kernels.

On a CPU by Triton's interpreter, where TRITON_INTERPRET=1 is set before Triton is imported; on one GPU compiled. A
kernel that waits for another rank would wait for ever when ranks take turns, so its two parts are launched apart, with
a meeting of the threads between.
"""

import importlib.util
import mmap
import os
import threading
from typing import Any

import torch
from torch import Tensor

from contraflow.dispatch.domains import Topology
from contraflow.dispatch.nvlink import SharedDispatch, row_bytes
from contraflow.dispatch.nvlink_memory import Ground, Layout, Sizes
from contraflow.dispatch.virtual import VirtualLinks, VirtualWorld

CAN_RUN = importlib.util.find_spec("triton") is not None and (
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
)
NORESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python 3.11 has no name for
ONE_AT_A_TIME = threading.Lock()  # the interpreter keeps the program's number for all threads


class TwinGround(Ground):
    """See `Ground`; `links` of a virtual world lead to the other ranks."""

    def __init__(self, links: VirtualLinks, looks: int = 0, **given: Any) -> None:
        super().__init__(rank=links.rank, deadline_s=looks / 1e9, **given)
        self._links = links

    def meet(self, tag: int) -> None:
        """See `Ground.meet`. All have told before anybody listens, so a rank that has not is found missing at once."""
        self.ring(tag)
        self._links.gather("")
        self._launch(
            "listen", 1, self.own, self._peers, self.turn, self._told, self.rank, tag, self._limit,
            **self._signals(), CLOCK=False, num_warps=1,
        )  # fmt: skip
        self._links.gather("")

    def ring(self, tag: int) -> None:
        """The first part of a meeting."""
        self._launch("ring", 1, *self._where, tag, **self._signals(), num_warps=1)

    def meet_alone(self, tag: int) -> None:
        """A meeting as it is between GPUs: for ranks of one thread, the others having told."""
        super().meet(tag)

    def _launch(self, name: str, programs: int, *given: Any, **constants: Any) -> None:
        with ONE_AT_A_TIME:
            super()._launch(name, programs, *given, **constants)


class TwinWorld:
    """Memory of all ranks; `open` gives each rank's dispatch."""

    def __init__(
        self, ranks: int, *, experts: int, choices: int, dim: int, most: int, dtype: torch.dtype = torch.float32,
        wire: str = "same", fixed: bool = False, sizes: Sizes | None = None,
    ) -> None:  # fmt: skip
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.layout = Layout(ranks, max(1, most), choices, row_bytes(dim, dtype, wire))  # type: ignore[arg-type]
        self.memory = [zeros(2 * self.layout.half, self.device) for _ in range(ranks)]
        self.world = VirtualWorld(Topology.even(ranks, ranks), deadline_s=60)
        self.run = self.world.run
        self.sizes = sizes or Sizes(sms=2, local=3, tile_bytes=2048)
        self._experts = experts
        self._shared = {"dim": dim, "dtype": dtype, "wire": wire, "fixed": fixed}

    def open(self, links: VirtualLinks) -> SharedDispatch:
        ground = TwinGround(
            links, layout=self.layout, experts=self._experts, own=self.memory[links.rank], sizes=self.sizes,
            addresses=[memory.data_ptr() for memory in self.memory],
        )  # fmt: skip
        names = tuple(range(self.layout.ranks))
        return SharedDispatch(ground, names=names, deadline_s=1.0, **self._shared)  # type: ignore[arg-type]


def zeros(nbytes: int, device: str) -> Tensor:
    """Bytes; on a CPU of pages that take no memory until they are written, so that there may be more than it has."""
    if device == "cuda":
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return torch.frombuffer(pages, dtype=torch.uint8)
