"""The paged KV cache: one pool of blocks per layer, preallocated once.

Takes a model's shape and a number of blocks, gives storage that `paged`'s plans read and write. Does not know which
sequence owns which block (`blocks.py` does), nor when to drop one.

Shape letters: N layers, NB blocks, BS tokens of a block, G key/value heads, d head dimension.
"""

import torch
from torch import Tensor

from contraflow.errors import ModelError
from contraflow.model.families import ModelConfig


class KVCache:
    """Keys and values of every layer: views `[layers, NB, G, BS, d]` of one pool `[layers, NB, 2, G, BS, d]`.

    A head's tokens lie together in each block, so that one gather of pages gives every head its keys and values as
    plain matrices. `layers` are each layer's views as pages `[NB * 2 * G, BS * d]` and as slots `[NB * 2 * G * BS, d]`.
    Invariant: the pool never moves or grows, so a CUDA graph may hold its address.
    """

    def __init__(
        self, config: ModelConfig, *, blocks: int, block_tokens: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        if blocks < 1 or block_tokens < 1:
            raise ModelError(f"a KV cache of {blocks} blocks of {block_tokens} tokens holds nothing; give at least 1")
        shape = (config.layers, blocks, 2, config.kv_heads, block_tokens, config.head_dim)
        # Zeros, not garbage: masked-out positions are multiplied by probability 0, and 0 * NaN is NaN.
        self.pool: Tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.keys, self.values = self.pool.unbind(2)
        self.layers = [(layer.flatten(0, 2).flatten(1), layer.flatten(0, 3)) for layer in self.pool]
        self.heads = torch.arange(2 * config.kv_heads, device=device)  # of keys, then of values, within a block
        self.blocks = blocks
        self.block_tokens = block_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.pool.nbytes
