"""C kernels for generation on one CPU core: attention of one new token a sequence, and a mixture's experts.

Takes and gives what the Triton kernels do, of fp32 tensors.
Built when first asked for, by the machine's C compiler and for its processor; where that fails the reason is told.
Has no gradient and no threads: torch's own forms have both.

Shape letters: T tokens, B sequences, H query heads, G key/value heads, d head dimension, r dimensions that turn,
D width, F hidden width of an expert, E experts, K of them a token.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from contraflow.model.c_library import COMPILERS, build_library
from contraflow.model.paged import Kernels, Pages, Placing, Seen, Target

SOURCE = Path(__file__).with_suffix(".c")
LANES = 8


class _Shape(ctypes.Structure):
    """`struct Shape` of the source."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("tokens", "heads", "groups", "dim", "turned", "block_tokens", "width", "stride")
    ]


class _Mixture(ctypes.Structure):
    """`struct Mixture` of the source."""

    _fields_ = [(name, ctypes.c_int64) for name in ("tokens", "choices", "experts", "dim", "ffn")]


class CKernels:
    """`Kernels` of a library that was built of SOURCE. It has no prefill: torch's matmuls are better at that."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, whole, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        shape, mixture = ctypes.POINTER(_Shape), ctypes.POINTER(_Mixture)
        self._place, self._decode = library.place, library.decode
        self._place.argtypes = (*[pointer] * 4, whole, real, real, *[pointer] * 3, shape)
        self._decode.argtypes = (*[pointer] * 5, whole, *[pointer] * 2, shape)
        self._experts = library.experts
        self._experts.argtypes = (*[pointer] * 8, mixture)
        self._place.restype = self._decode.restype = self._experts.restype = None

    def place(
        self, qkv: Tensor, cos_T1r: Tensor, sin_T1r: Tensor, placing: Placing, target: Target, *, kv_heads: int
    ) -> Tensor:
        """`[T, H + 2 * G, d]`, which is written over -> queries `[T, H, d]`; keys and values go to their slots."""
        tokens, rows, dim = qkv.shape
        heads, norm = rows - 2 * kv_heads, placing.norm
        q_THd = qkv.new_empty(tokens, heads, dim)
        shape = _Shape(tokens, heads, kv_heads, dim, cos_T1r.shape[-1], target.block_tokens)
        qkv, cos, sin, weight = _plain(qkv), _plain(cos_T1r), _plain(sin_T1r), qkv if norm is None else _plain(norm)
        self._place(
            qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), weight.data_ptr(), 0 if norm is None else 3 - norm.ndim,
            placing.eps, placing.clip or 0.0, target.slots_T.data_ptr(), q_THd.data_ptr(), target.layer.data_ptr(),
            shape,
        )  # fmt: skip
        return q_THd

    def decode(self, q_BHd: Tensor, pages: Pages, seen: Seen) -> Tensor:
        """Attention of one new token of each sequence, whose key and value the pages hold: `[B, H, d]`.

        Sequences of length 0 give zeros.
        """
        batch, heads, dim = q_BHd.shape
        q_BHd, sinks = _plain(q_BHd), None if seen.sinks_H is None else _plain(seen.sinks_H)
        out, width = torch.empty_like(q_BHd), pages.tables_BN.shape[1]
        shape = _Shape(batch, heads, pages.kv_heads, dim, 0, pages.block_tokens, width, pages.tables_BN.stride(0))
        scores = q_BHd.new_empty(heads // pages.kv_heads * (width * pages.block_tokens + LANES))
        self._decode(
            q_BHd.data_ptr(), pages.layer.data_ptr(), pages.tables_BN.data_ptr(), pages.lengths_B.data_ptr(),
            None if sinks is None else sinks.data_ptr(), seen.window or 0, scores.data_ptr(), out.data_ptr(), shape,
        )  # fmt: skip
        return out

    def experts(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor
    ) -> Tensor:
        """The sum of each token's SwiGLU experts by weight: `[T, D]`. An id below 0 is no expert; D and F are
        multiples of 8."""
        (tokens, dim), (choices, (experts, _, ffn)) = x_TD.shape, (ids_TK.shape[1], down_EDF.shape)
        x_TD, ids_TK, weights_TK = x_TD.contiguous(), ids_TK.contiguous(), weights_TK.contiguous()
        out = torch.empty_like(x_TD)
        hidden, order = x_TD.new_empty(tokens * choices * ffn), ids_TK.new_empty(tokens * choices + experts + 1)
        self._experts(
            x_TD.data_ptr(), ids_TK.data_ptr(), weights_TK.data_ptr(), gate_up_E2FD.data_ptr(), down_EDF.data_ptr(),
            hidden.data_ptr(), order.data_ptr(), out.data_ptr(), _Mixture(tokens, choices, experts, dim, ffn),
        )  # fmt: skip
        return out


@cache
def built() -> Kernels | str:
    """What `build` gives, built once a process."""
    return build(COMPILERS)


def build(compilers: Sequence[str]) -> Kernels | str:
    """The kernels, or, for people, why there are none: see `build_library`."""
    library = build_library(SOURCE, compilers)
    if isinstance(library, str):
        return library
    kernels = CKernels(library)
    return Kernels(kernels.place, kernels.decode, None, kernels.experts)


def _plain(x: Tensor) -> Tensor:
    return x.float().contiguous()  # nothing is done to what is so
