"""What a token looks like on its way: its values in a chosen precision, then its expert ids and weights, as bytes.

`same`: the values as they are. `bf16`: rounded to bfloat16. `fp8`: float8 e4m3 with one fp32 scale for each 128 values
(DeepSeek-V3 report, section 3.3), for forward dispatch only; answers and gradients then travel as bf16. Bytes, since
gloo and NCCL move uint8 everywhere and float8 nowhere.

Shape letters: N rows, D width, K experts of a row, B bytes of a row, Q blocks of 128 values.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from contraflow.errors import DispatchError

Wire = Literal["same", "bf16", "fp8"]
BLOCK = 128
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0


def encode(x_ND: Tensor, wire: Wire) -> Tensor:
    """Values as bytes, `[N, B]` uint8, with `value_bytes` of them a row."""
    if wire == "fp8":
        scaled_NQb, scales_NQ = quantise(x_ND)
        return torch.cat((as_bytes(scaled_NQb.flatten(1)), as_bytes(scales_NQ)), 1)
    return as_bytes(x_ND.to(torch.bfloat16) if wire == "bf16" else x_ND)


def decode(bytes_NB: Tensor, wire: Wire, dim: int, dtype: torch.dtype) -> Tensor:
    """The values back, `[N, D]` in `dtype`."""
    if wire != "fp8":
        sent = torch.bfloat16 if wire == "bf16" else dtype
        return from_bytes(bytes_NB, sent).to(dtype)
    blocks = -(-dim // BLOCK)
    scaled_NQb = from_bytes(bytes_NB[:, : blocks * BLOCK], E4M3).view(-1, blocks, BLOCK)
    scales_NQ = from_bytes(bytes_NB[:, blocks * BLOCK :], torch.float32)
    return (scaled_NQb.float() * scales_NQ[..., None]).flatten(1)[:, :dim].to(dtype)


def value_bytes(dim: int, wire: Wire, dtype: torch.dtype) -> int:
    """Bytes that the values of one row take."""
    if wire == "fp8":
        return -(-dim // BLOCK) * (BLOCK + 4)
    return dim * (2 if wire == "bf16" else dtype.itemsize)


def meta_bytes(choices: int) -> int:
    """Bytes of a row's expert ids (int16) and weights (fp32)."""
    return choices * (2 + 4)


def back_wire(wire: Wire) -> Wire:
    """How answers and gradients travel when tokens went out as `wire`."""
    return "same" if wire == "same" else "bf16"


def quantise(x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 values `[N, Q, 128]` (the last block padded with zeros) and fp32 scales `[N, Q]`; value = e4m3 * scale.

    A block of zeros has scale 1, so that nothing is divided by 0.
    """
    blocks = -(-x_ND.shape[1] // BLOCK)
    x_NQb = F.pad(x_ND.float(), (0, blocks * BLOCK - x_ND.shape[1])).view(-1, blocks, BLOCK)
    most_NQ = x_NQb.abs().amax(-1)
    # By a tensor: by a number, a GPU multiplies with the reciprocal, and other ranks' bits would differ from a CPU's.
    scales_NQ = most_NQ / torch.full_like(most_NQ, E4M3_MAX)
    scales_NQ = torch.where(scales_NQ == 0, 1.0, scales_NQ)  # also where the quotient of a denormal became 0
    return (x_NQb / scales_NQ[..., None]).to(E4M3), scales_NQ


def encode_meta(ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """Expert ids and weights as bytes, `[N, 6 K]`. Ids travel one higher, so that zero bytes mean no expert."""
    return torch.cat((as_bytes((ids_NK + 1).to(torch.int16)), as_bytes(weights_NK)), 1)


def decode_meta(bytes_NB: Tensor, choices: int) -> tuple[Tensor, Tensor]:
    """Expert ids int64 and weights fp32, both `[N, K]`."""
    ids_NK = from_bytes(bytes_NB[:, : 2 * choices], torch.int16)
    return ids_NK.to(torch.int64) - 1, from_bytes(bytes_NB[:, 2 * choices :], torch.float32)


def as_bytes(x_ND: Tensor) -> Tensor:
    """The same memory as uint8 `[N, D * itemsize]`."""
    if x_ND.numel() == 0:  # whose strides may be anything, and then it has no view
        return torch.empty(x_ND.shape[0], x_ND.shape[1] * x_ND.itemsize, dtype=torch.uint8, device=x_ND.device)
    return x_ND.contiguous().view(torch.uint8)


def from_bytes(bytes_NB: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 `[N, B]` as `[N, B / itemsize]` of `dtype`, in memory of its own: a slice of a row need not be aligned."""
    if bytes_NB.shape[1] % dtype.itemsize:
        raise DispatchError(f"rows of {bytes_NB.shape[1]} bytes hold no whole number of {dtype}")
    columns = bytes_NB.shape[1] // dtype.itemsize
    if bytes_NB.numel() == 0:
        return torch.empty(bytes_NB.shape[0], columns, dtype=dtype, device=bytes_NB.device)
    return bytes_NB.clone(memory_format=torch.contiguous_format).view(dtype)
