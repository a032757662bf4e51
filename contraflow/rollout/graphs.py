"""Passes of a few sizes, each captured once and from then on replayed: one launch instead of a thousand.

Takes a pass that reads and writes fixed addresses and gives nothing, and how to capture; runs it at the size asked for.
Capturing is bounded: by the number of sizes, and by the memory that must be left on the device. What does not fit runs
as it is, and `told` says so. Does not know what a pass computes.
"""

import functools
import gc
from collections.abc import Callable

import torch

Pass = Callable[[int], None]  # its rows
Replay = Callable[[], None]

MOST = 64  # graphs: a capture takes as long as one or two passes that are not captured
SPARE_BYTES = 2 << 30  # left on the device, or nothing more is captured


class Graphs:
    """A size runs as it is the first time, which loads its kernels and chooses their forms, and is captured then.

    The very first pass runs at the largest number of rows, whatever is asked for: smaller graphs find their memory in
    what the largest one used. Invariant: nobody needs what a graph leaves in its memory, so all share one pool.
    """

    def __init__(
        self,
        run: Pass,
        *,
        rows: int,
        capture: Callable[[Replay], Replay],
        free: Callable[[], int],
        most: int = MOST,
    ) -> None:
        """`capture` gives what repeats a call, and does not run it; `free` is the device's free bytes."""
        self._run, self._rows, self._most = run, rows, most
        self._capture, self._free = capture, free
        self._replays: dict[int, Replay] = {}
        self._full = ""

    @property
    def told(self) -> str:
        """How passes run, for people."""
        return f"{len(self._replays)} CUDA graphs{self._full and f'; other sizes eager: {self._full}'}"

    def run(self, rows: int) -> None:
        """The pass, for at least these rows."""
        if not self._replays and not self._full:
            rows = self._rows
        replay = self._replays.get(rows)
        if replay is not None:
            replay()
            return
        self._run(rows)
        if self._may_capture():
            self._replays[rows] = self._capture(functools.partial(self._run, rows))

    def _may_capture(self) -> bool:
        if self._full:
            return False
        if len(self._replays) >= self._most:
            self._full = f"{self._most} sizes are captured"
        elif (free := self._free()) < SPARE_BYTES:
            self._full = f"{free >> 20} MiB of device memory are free, {SPARE_BYTES >> 20} must stay so"
        return not self._full


class Capture:
    """What `Graphs` captures with, on one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Replay) -> Replay:
        graph = torch.cuda.CUDAGraph()
        # Garbage that is collected in the middle may free device memory, and that breaks a capture off. Other threads
        # of the process may allocate meanwhile: only this one is bound to what a capture forbids.
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                call()
        finally:
            if collecting:
                gc.enable()
        return graph.replay

    def free(self) -> int:
        """Bytes that the device could give now, those that torch holds in reserve included."""
        held = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return torch.cuda.mem_get_info(self._device)[0] + held
