"""Device memory on loan: tensors' bytes move to the host and their memory is freed, until it is taken back.

For pools that share a GPU and take turns. Takes tensors, which keep their identity, shapes and views; gives how many
bytes were moved. Their addresses change: whoever wrote one down (a CUDA graph) must forget it. Decides nothing.

Shape letters: B bytes.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class Loan:
    """Some tensors' memory. `borrowed` names them anew at each `lend`, since some are made late.

    Invariant: while `lent`, their storages are empty and the host holds their bytes; else the host's copies are idle.
    Host memory is kept for the next time (page-locked memory takes seconds to get), so this takes as much of the host
    as was ever lent at once.
    """

    def __init__(self, borrowed: Callable[[], Iterable[Tensor]]) -> None:
        self._borrowed = borrowed
        self._host: list[Tensor] = []  # uint8 [B], one a storage
        self._away: list[tuple[Tensor, Tensor]] = []  # whole storages as uint8 [B], and their bytes on the host

    @property
    def lent(self) -> bool:
        return bool(self._away)

    def lend(self) -> int:
        """Move the bytes away and free their memory, for other processes too; gives their number. Twice is once."""
        if self.lent:
            return 0
        storages = _whole(self._borrowed())
        for place, memory_B in enumerate(storages):
            host_B = self._shelf(place, memory_B)
            host_B.copy_(memory_B, non_blocking=True)
            self._away.append((memory_B, host_B))
        _wait(storages)  # before their memory is anybody else's
        for memory_B in storages:
            memory_B.untyped_storage().resize_(0)
        if any(memory_B.is_cuda for memory_B in storages):
            torch.cuda.empty_cache()  # torch keeps what is freed, and other processes can't have it
        return sum(host_B.numel() for _, host_B in self._away)

    def take_back(self) -> int:
        """Bring the bytes home; gives their number. Raises what torch raises when the device has no room for them."""
        moved = 0
        for memory_B, host_B in self._away:
            memory_B.untyped_storage().resize_(host_B.numel())
            memory_B.copy_(host_B, non_blocking=True)
            moved += host_B.numel()
        _wait([memory_B for memory_B, _ in self._away])
        self._away = []
        return moved

    def _shelf(self, place: int, memory_B: Tensor) -> Tensor:
        """Host memory for the storage of that number, as large as it is."""
        if place == len(self._host):
            self._host.append(torch.empty(0, dtype=torch.uint8))
        if self._host[place].numel() != memory_B.numel():
            self._host[place] = torch.empty(memory_B.numel(), dtype=torch.uint8, pin_memory=memory_B.is_cuda)
        return self._host[place]


def _whole(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The storages behind tensors, each once, as uint8 `[B]`; those without a byte left out."""
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return list(found.values())


def _wait(tensors: Iterable[Tensor]) -> None:
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)
