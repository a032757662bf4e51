"""A GPU's memory seen from another process of the same machine: nothing travels, the reader copies it where it lies.

Takes uint8 tensors on one side, gives handles of plain bytes and numbers; takes those, gives the memory as tensors.
torch has no public call for a handle without pickle, so this file alone uses the two that its own reductions use.

torch counts readers: each handle must be opened once and closed once, and sharing the same memory again adds a count.
So a piece of memory is shared once with each reader, who keeps it open for as long as the writer keeps it.
"""

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from contraflow.errors import CarrierError


class Handle(msgspec.Struct, frozen=True):
    """What another process needs to open a tensor's memory, in the order in which torch takes it."""

    device: int  # ordinal, the same in both processes
    memory: bytes
    nbytes: int
    start: int  # within the allocation
    counter: bytes
    counter_start: int
    event: bytes
    waits: bool  # for the event, before the memory may be read


class Shared:
    """The writer's side: handles by reader. Invariant: a tensor is shared at most once with each reader."""

    def __init__(self) -> None:
        self._given: dict[tuple[str, int], Handle] = {}

    def give(self, reader: str, tensors: Sequence[Tensor]) -> tuple[Handle, ...]:
        """Handles of whole uint8 tensors, which must stay where they are. Raises CarrierError for the CPU's memory."""
        return tuple(self._one(reader, data_B) for data_B in tensors)

    def forget(self, reader: str) -> None:
        """The reader is gone; one of the same name is another."""
        self._given = {key: handle for key, handle in self._given.items() if key[0] != reader}

    def _one(self, reader: str, data_B: Tensor) -> Handle:
        if data_B.device.type != "cuda":
            raise CarrierError(
                f"a tensor on {data_B.device} cannot be shared with another process as a GPU's memory; use "
                "weights.carrier = 'memory' on the CPU"
            )
        key = (reader, data_B.data_ptr())
        if key not in self._given:
            self._given[key] = Handle(*data_B.untyped_storage()._share_cuda_())
        return self._given[key]


class Opened:
    """The reader's side: memory by handle, kept open. Belongs to one thread at a time."""

    def __init__(self) -> None:
        self._open: dict[Handle, Tensor] = {}

    def tensor(self, handle: Handle) -> Tensor:
        """The memory as uint8 `[B]`, on the device where it lies; not to be written to.

        Raises CarrierError where it cannot be opened: another machine, a GPU that this process does not see.
        """
        if handle not in self._open:
            try:
                storage = torch.UntypedStorage._new_shared_cuda(*msgspec.structs.astuple(handle))
            except (RuntimeError, AssertionError, AttributeError) as fault:
                first = str(fault).strip().splitlines()[0][:200]
                raise CarrierError(
                    f"the trainer's memory on GPU {handle.device} cannot be opened here ({first}); both must be on one "
                    "machine and see the same GPUs, or use another weights.carrier"
                ) from fault
            bytes_B = torch.empty(0, dtype=torch.uint8, device=storage.device)
            self._open[handle] = bytes_B.set_(storage)
        return self._open[handle]
