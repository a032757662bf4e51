"""What changed between two byte strings of one length, without loss: one chunk of a version that travels as a delta.

Takes old and new bytes, gives the encoded change; takes old bytes and a change, makes them new. Bits are compared, not
values, so NaN payloads and -0.0 survive. Works where the tensors are, CPU or GPU, without a Python loop over elements.
Does not hash: that the result is right is for the digests to prove. Little-endian machines only, as every format here.
Shape letters: B bytes, N 16-bit words of a chunk (one bf16 or half an fp32), K of them changed, W of those widely,
E bytes of the index.
"""

import struct

import torch
from torch import Tensor

from contraflow.errors import CarrierError

# An empty change means: as before. Any other begins with its form. WHOLE: the new chunk. GAPS and BITMAP: E and W, the
# index, K steps of one byte (WIDE: too large for one), and W new words. With STEPLESS there are no steps, and W = K.
WHOLE, GAPS, BITMAP = range(3)
STEPLESS = 4
HEAD = struct.Struct("<BII")
SKIP = 255  # in an index of gaps: pass 255 words, none of them changed; any other entry passes so many and hits one
WIDE = -128
MOST = 1 << 32  # bytes of a chunk: the header has 32 bits for a count


def encode(old_B: Tensor, new_B: Tensor) -> Tensor:
    """The change from `old_B` to `new_B`, uint8 of one length (below 4 GiB) and device: uint8 `[length]` there.

    Never longer than the chunk and one byte.
    """
    old_N, new_N = _words(old_B), _words(new_B)
    changed_N = old_N != new_N
    at_K = changed_N.nonzero().flatten()
    if not len(at_K):
        return new_B.new_empty(0)
    words_K = new_N[at_K]
    steps_K = words_K - old_N[at_K]  # wraps around, and so does the sum that undoes it
    wide_K = (steps_K < -127) | (steps_K > 127)
    words_W = words_K[wide_K]
    steps_K = torch.where(wide_K, WIDE, steps_K).to(torch.int8)
    index_E, form = _index(changed_N, at_K)
    if 2 * len(words_W) > len(words_K):
        form, steps_K, words_W = form | STEPLESS, steps_K[:0], words_K
    if HEAD.size + len(index_E) + len(steps_K) + 2 * len(words_W) >= 1 + len(new_B):
        return torch.cat((_bytes(bytes([WHOLE]), new_B.device), new_B))
    head = _bytes(HEAD.pack(form, len(index_E), len(words_W)), new_B.device)
    return torch.cat((head, index_E, steps_K.view(torch.uint8), words_W.view(torch.uint8)))


def apply(chunk_B: Tensor, change_B: Tensor) -> None:
    """Make `chunk_B` what `change_B` says it became, in place. Both uint8, on one device.

    Raises: CarrierError if the change cannot be one of a chunk of this length; `chunk_B` is then as it was.
    """
    if not len(change_B):
        return
    if int(change_B[0]) == WHOLE:
        _demand(len(change_B) == 1 + len(chunk_B), chunk_B, change_B)
        chunk_B.copy_(change_B[1:])
        return
    words_N = _words(chunk_B)
    at_K, steps_K, words_W = _parts(change_B, chunk_B, len(words_N))
    if len(words_W) < len(at_K):
        wide_K = steps_K == WIDE
        _demand(int(wide_K.sum()) == len(words_W), chunk_B, change_B)
        words_K = words_N[at_K] + steps_K
        words_K[wide_K] = words_W
        words_N[at_K] = words_K
    else:
        words_N[at_K] = words_W
    if words_N.data_ptr() != chunk_B.data_ptr():
        chunk_B.copy_(words_N.view(torch.uint8)[: len(chunk_B)])


def _parts(change_B: Tensor, chunk_B: Tensor, words: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where the changed words are, their steps (int16; none if all are given), and the words that are given."""
    _demand(len(change_B) >= HEAD.size, chunk_B, change_B)
    form, index_bytes, wide = HEAD.unpack(bytes(change_B[: HEAD.size].tolist()))
    steps = len(change_B) - HEAD.size - index_bytes - 2 * wide
    count = wide if form & STEPLESS else steps
    sound = steps == 0 if form & STEPLESS else steps > wide
    _demand(form & ~STEPLESS in (GAPS, BITMAP) and sound and count > 0, chunk_B, change_B)
    index_E, steps_K, tail_B = change_B[HEAD.size :].split([index_bytes, steps, 2 * wide])
    at_K = _passed(index_E) if form & GAPS else _set_bits(index_E)
    # Rising by construction, so the last tells for all.
    _demand(len(at_K) == count and int(at_K[-1]) < words, chunk_B, change_B)
    words_W = tail_B.clone().view(torch.int16)  # a copy: a slice may begin at any byte
    return at_K, steps_K.view(torch.int8).to(torch.int16), words_W


def _index(changed_N: Tensor, at_K: Tensor) -> tuple[Tensor, int]:
    """Which words changed, in the shorter of two forms."""
    most = -(-len(changed_N) // 8)
    if len(at_K) < most:
        gaps_K = torch.diff(at_K, prepend=at_K.new_tensor([-1])) - 1
        ends_K = (gaps_K // SKIP + 1).cumsum(0) - 1
        index_E = torch.full((int(ends_K[-1]) + 1,), SKIP, dtype=torch.uint8, device=changed_N.device)
        index_E[ends_K] = (gaps_K % SKIP).to(torch.uint8)
        if len(index_E) < most:
            return index_E, GAPS
    bits = torch.nn.functional.pad(changed_N.view(torch.uint8), (0, 8 * most - len(changed_N))).view(most, 8)
    return (bits << _ladder(bits.device)).sum(1, dtype=torch.uint8), BITMAP


def _passed(index_E: Tensor) -> Tensor:
    hits_E = index_E != SKIP
    at_E = (index_E.to(torch.int64) + hits_E).cumsum(0) - 1
    return at_E[hits_E]


def _set_bits(index_E: Tensor) -> Tensor:
    return ((index_E[:, None] >> _ladder(index_E.device)) & 1).flatten().nonzero().flatten()


def _ladder(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def _words(chunk_B: Tensor) -> Tensor:
    """The chunk as int16, in place if its length is even and it is aligned; else a copy, filled up with a zero byte."""
    if len(chunk_B) == 0:  # it may have any stride, and then no view
        return torch.empty(0, dtype=torch.int16, device=chunk_B.device)
    if len(chunk_B) % 2:
        chunk_B = torch.nn.functional.pad(chunk_B, (0, 1))
    elif chunk_B.storage_offset() % 2:
        chunk_B = chunk_B.clone()
    return chunk_B.view(torch.int16)


def _bytes(data: bytes, device: torch.device) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8, device=device)


def _demand(sound: bool, chunk_B: Tensor, change_B: Tensor) -> None:
    if not sound:
        raise CarrierError(
            f"a change of {len(change_B)} bytes to a chunk of {len(chunk_B)} is torn or was made for another chunk"
        )
