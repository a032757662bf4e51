"""Digests of bytes where they lie, a GPU included: what tells a bucket that arrived from one that did not.

Takes uint8 tensors, gives int64 ones; copies nothing to the host. Multilinear hashing (Dietzfelbinger 1996; Lemire and
Kaser 2014), twice: of rows of 32-bit words w_i with random 64-bit keys k_i, sum of w_i k_i mod 2^64, then
of the rows' sums, by halves. Against damage that does not know the keys: two buckets that differ have the same digest
with a chance of at most 2^-32 (each level 2^-33); not a defence against an attacker. Shape letters: B bytes, R rows.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

ROW = 1 << 14  # words of a row; their keys stay in the cache of a GPU
_SEED = 20260


def bucket_sum(data_B: Tensor) -> Tensor:
    """The digest of `data_B` (uint8, contiguous, at most 512 MiB), int64 of no dimension, on its device.

    Length is not part of it: who compares knows it. Needs four times the memory of `data_B` beside it.
    """
    keys_W = _keys(data_B.device)
    nbytes = data_B.numel()
    if nbytes > 4 * ROW * (ROW // 2):
        raise ValueError(f"a bucket of {nbytes} bytes; at most {4 * ROW * (ROW // 2)} have keys")
    whole = nbytes - nbytes % (4 * ROW)
    sums = [_row_sums(data_B[:whole].view(torch.int32).view(-1, ROW), keys_W)]
    if whole < nbytes:
        rest_B = data_B.new_zeros(-(-(nbytes - whole) // 4) * 4)
        rest_B[: nbytes - whole] = data_B[whole:]
        sums.append(_row_sums(rest_B.view(torch.int32).view(1, -1), keys_W))
    halves_R2 = torch.cat(sums).view(torch.int32)  # two words a row, by new keys: those of the rows' end
    return (halves_R2 * keys_W[ROW : ROW + len(halves_R2)]).sum()


def as_text(digests_N: Tensor) -> tuple[str, ...]:
    """Digests as a manifest writes them."""
    return tuple(f"{value & (2**64 - 1):016x}" for value in digests_N.tolist())


def _row_sums(words_RW: Tensor, keys_W: Tensor) -> Tensor:
    return (words_RW * keys_W[: words_RW.shape[1]]).sum(1)  # int64, which wraps: mod 2^64


@cache
def _keys(device: torch.device) -> Tensor:
    """The same on every machine: the raw stream of PCG64 is fixed for good."""
    drawn = np.random.PCG64(_SEED).random_raw(2 * ROW).astype(np.uint64)
    return torch.from_numpy(drawn.view(np.int64)).to(device)
