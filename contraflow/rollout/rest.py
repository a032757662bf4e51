"""An engine at rest: its weights and its cache leave the device to whoever shares it, and come back.

Takes the computing parts of an engine between two steps. What sequences hold in the cache goes to the host and back;
prefixes that nobody holds are forgotten. Does not stop steps (`core` does) or decide when.
"""

import torch
from torch import Tensor

from contraflow.model.blocks import BlockPool
from contraflow.rollout.passes import Passes
from contraflow.rollout.swap import LiveWeights


class Rest:
    """Invariant: between `begin` and `end` the storages of cache and weights are empty, and `resting` is true."""

    def __init__(self, passes: Passes, pool: BlockPool, weights: LiveWeights) -> None:
        self._passes, self._pool, self._weights = passes, pool, weights
        self._held: list[int] = []
        self._kept: list[Tensor] = []  # of each store, the blocks held, on the host
        self._sizes: list[int] = []
        self.resting = False

    @torch.inference_mode()
    def begin(self) -> int:
        """Give the memory away; gives the bytes freed on the device. Twice is once."""
        if self.resting:
            return 0
        self._pool.forget()
        self._held = self._pool.held
        stores = self._stores()
        self._kept = [store.index_select(dim, self._index(store)).cpu() for store, dim in stores]
        self._sizes = [store.untyped_storage().nbytes() for store, _ in stores]
        for store, _ in stores:
            store.untyped_storage().resize_(0)
        freed = sum(self._sizes) + self._passes.rest() + self._weights.rest()
        self.resting = True
        if self._passes.device.type == "cuda":
            torch.cuda.empty_cache()  # torch keeps what is freed, and other processes can't have it
        return freed

    @torch.inference_mode()
    def end(self) -> None:
        """Take memory again and fill it. Raises what torch raises when the device has no room; still resting then."""
        if not self.resting:
            return
        self._weights.wake()
        self._passes.refresh()
        for (store, dim), kept, nbytes in zip(self._stores(), self._kept, self._sizes, strict=True):
            store.untyped_storage().resize_(nbytes)
            store.zero_()  # not garbage: see `KVCache`
            store.index_copy_(dim, self._index(store), kept.to(store.device))
        self._kept, self.resting = [], False

    def _stores(self) -> list[tuple[Tensor, int]]:
        """What is kept by block, and which of its dimensions counts blocks."""
        routes = self._passes.routes
        return [(self._passes.cache.pool, 1), *([] if routes is None else [(routes.blocks, 0)])]

    def _index(self, store: Tensor) -> Tensor:
        return torch.tensor(self._held, dtype=torch.int64, device=store.device)
