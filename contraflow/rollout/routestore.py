"""The experts that computed each cached position, kept beside the paged K/V cache and addressed as it is.

Takes what a forward pass's router tape recorded, gives a sequence's experts in order. Knows no request.

Shape letters: T tokens fed, M MoE layers, K experts, L positions of a sequence, X sequences.
"""

import contextlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from contraflow.model.cache import KVCache
from contraflow.model.families import ModelConfig
from contraflow.model.router import RouterTape
from contraflow.types import Int64, Routes


class RouteStore:
    """`blocks` `[NB, BS, M, K]`, for a cache of NB blocks of BS tokens. It stays one tensor."""

    def __init__(self, config: ModelConfig, cache: KVCache) -> None:
        # torch can't index uint16 everywhere: the bits are kept as int16.
        dtype = torch.uint8 if config.experts <= 256 else torch.int16
        shape = (cache.blocks, cache.block_tokens, len(config.moe_layers), config.top_k)
        self.blocks = torch.zeros(shape, dtype=dtype, device=cache.pool.device)
        self._slots = self.blocks.flatten(0, 1)  # the same memory
        self._aside = torch.cuda.Stream(self.blocks.device) if self.blocks.is_cuda else None

    def write(self, slots_T: Tensor, tape: RouterTape) -> None:
        """Note a pass's experts at the slots of its tokens."""
        self._slots.index_copy_(0, slots_T, tape.routes().view(self.blocks.dtype))

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks: all sources are read before any destination is written."""
        self.blocks.index_copy_(0, target, self.blocks.index_select(0, source))

    def read(self, slots_XL: Sequence[Int64]) -> list[Routes]:
        """Experts at each sequence's slots, `[L, M, K]`, in one copy.

        Passes that wrote them must be through. One that is under way, and writes elsewhere, is not waited for.
        """
        with torch.cuda.stream(self._aside) if self._aside else contextlib.nullcontext():
            slots = torch.from_numpy(np.concatenate(slots_XL)).to(self.blocks.device)
            read = self._slots.index_select(0, slots).cpu().numpy()
        if self.blocks.dtype == torch.int16:
            read = read.view(np.uint16)
        return np.split(read, np.cumsum([len(slots_L) for slots_L in slots_XL])[:-1])
