"""What a decode pass takes from the host and what it gives back, without the host waiting for either.

Takes the tables of `DecodeRows`, gives the same on the device, and a pass's samples when they are asked for. On a CPU
there is one memory and nothing to wait for. Does not know what is computed.

Shape letters: R rows there are.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from contraflow.types import Int32

Sampled = Callable[[], Int32]  # waits for a pass, gives `[2, R]`: tokens, and the bits of their log-probabilities


class Exchange:
    """`inputs` are the given host tensors as the device has them, `samples` is int32 `[2, R]`; neither ever moves.

    Invariant: what `send` copied stays as it is until its pass is through, though the host tensors change at once: each
    pass has a pinned copy of its own, taken in turn, and a turn's event is waited for before it is written again.
    """

    def __init__(self, host: tuple[Tensor, ...], rows: int, device: torch.device, *, passes: int) -> None:
        """`passes` is how many may be under way at once."""
        self._host = host
        cuda = device.type == "cuda"
        self.inputs = tuple(tensor.to(device) for tensor in host) if cuda else host
        self.samples = torch.zeros((2, rows), dtype=torch.int32, device=device)
        self._turns = [_Turn(host, self.samples) for _ in range(passes)] if cuda else []
        self._next = 0

    def send(self) -> None:
        """Bring the host tensors, as they are now, to the device."""
        if not self._turns:
            return
        turn = self._turns[self._next]
        turn.through.synchronize()
        for mine, host, device in zip(turn.inputs, self._host, self.inputs, strict=True):
            mine.copy_(host)
            device.copy_(mine, non_blocking=True)

    def receive(self) -> Sampled:
        """Ask for `samples` as the pass that was begun with the last `send` leaves them."""
        if not self._turns:
            given: Int32 = self.samples.numpy().copy()
            return lambda: given
        turn = self._turns[self._next]
        self._next = (self._next + 1) % len(self._turns)
        turn.samples.copy_(self.samples, non_blocking=True)
        turn.through.record()
        return turn.read


class _Turn:
    """Pinned memory of one pass, and the event behind everything the device does with it."""

    def __init__(self, host: tuple[Tensor, ...], samples: Tensor) -> None:
        self.inputs = tuple(torch.empty_like(tensor, pin_memory=True) for tensor in host)
        self.samples = torch.empty(samples.shape, dtype=samples.dtype, pin_memory=True)
        self.through = torch.cuda.Event(blocking=True)

    def read(self) -> Int32:
        self.through.synchronize()
        return np.array(self.samples.numpy())
