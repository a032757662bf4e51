"""C kernels of batch-invariant arithmetic on a CPU: see `invariant_cpu.c`, which holds what is promised and how.

Takes and gives fp32 tensors; without gradients, which `invariant` adds, and without threads. Built when first asked
for, by the machine's C compiler.

Shape letters: T tokens, N outputs, K inputs, S sequences, H query heads, G key/value heads, d head dimension, r
dimensions that turn; D width, F hidden width, E experts, C choices of a token; V vocabulary.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from contraflow.errors import ModelError
from contraflow.model.c_library import build_library
from contraflow.model.paged import Fed, Kernels, Pages, Placing, Seen, Target
from contraflow.model.rotary import Rotation

SOURCE = Path(__file__).with_suffix(".c")
FLAGS = ("-ffp-contract=off",)  # a fused multiply-add rounds once: where there is one is for the source to say
LANES, ROWS = 8, 32


class _Heads(ctypes.Structure):
    """`struct Heads` of the source."""

    _fields_ = [(name, ctypes.c_int64) for name in ("tokens", "heads", "groups", "dim", "turned", "kind")]
    _fields_ += [("eps", ctypes.c_float), ("clip", ctypes.c_float)]


class _Attention(ctypes.Structure):
    """`struct Attention` of the source."""

    _fields_ = [
        (name, ctypes.c_int64) for name in ("sequences", "heads", "groups", "dim", "stride", "block_tokens", "width")
    ]


class _Mixture(ctypes.Structure):
    """`struct Mixture` of the source."""

    _fields_ = [(name, ctypes.c_int64) for name in ("tokens", "choices", "experts", "dim", "ffn")]


# Arguments of each function: p a pointer, n an integer, f a real, h a, m structures by reference.
ARGUMENTS = {
    "linear": "pnppnnnp",
    "norm": "ppfnnp",
    "swiglu": "pnnp",
    "softmax": "pnnp",
    "rotation": "ppfnnpp",
    "heads": "pppph",
    "store": "ppnpph",
    "packed": "pppppppp" + "a",
    "paged": "pppppppppp" + "a",
    "experts": "pppppppppp" + "m",
    "logprobs": "ppfnnppp",
    "sample": "ppppnnppp",
}


class InvariantKernels:
    """Functions of a library that was built of SOURCE. Each gives for a row what it gives for it alone.

    Raises: ModelError for a tensor that is not fp32 on a CPU.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        kinds = {
            "p": ctypes.c_void_p,
            "n": ctypes.c_int64,
            "f": ctypes.c_float,
            "h": ctypes.POINTER(_Heads),
            "a": ctypes.POINTER(_Attention),
            "m": ctypes.POINTER(_Mixture),
        }
        for name, letters in ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = [kinds[letter] for letter in letters], None
        self._library = library

    @property
    def paging(self) -> Kernels:
        """What a `KernelPlan` computes with."""
        return Kernels(self.place, self.decode, self.prefill, self.experts)

    def linear(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`: `[T, N]`."""
        (outputs, inputs), x_TK, weight_NK = weight_NK.shape, _plain(x_TK), _plain(weight_NK)
        out_TN = x_TK.new_empty(len(x_TK), outputs)
        bias = None if bias_N is None else _plain(bias_N)
        self._library.linear(
            x_TK.data_ptr(), inputs, weight_NK.data_ptr(), None if bias is None else bias.data_ptr(), len(x_TK),
            outputs, inputs, out_TN.data_ptr(),
        )  # fmt: skip
        return out_TN

    def norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x^2) + eps) * weight`."""
        x_TD, weight_D = _plain(x_TD), _plain(weight_D)
        out = torch.empty_like(x_TD)
        self._library.norm(x_TD.data_ptr(), weight_D.data_ptr(), eps, *x_TD.shape, out.data_ptr())
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `[T, 2F]` -> `[T, F]`."""
        tokens, both = gate_up.shape
        gate_up, out = _plain(gate_up), gate_up.new_empty(tokens, both // 2)
        self._library.swiglu(gate_up.data_ptr(), tokens, both // 2, out.data_ptr())
        return out

    def softmax(self, x_TN: Tensor) -> Tensor:
        """Of each row."""
        x_TN = _plain(x_TN)
        out = torch.empty_like(x_TN)
        self._library.softmax(x_TN.data_ptr(), *x_TN.shape, out.data_ptr())
        return out

    def rotation(self, positions_T: Tensor, signed_r: Tensor, gain: float) -> Rotation:
        """cos and signed sin `[T, 1, r]` of int64 positions times radians, times the gain."""
        positions_T, signed_r = positions_T.contiguous(), _plain(signed_r)
        tokens, turned = len(positions_T), len(signed_r)
        cos, sin = signed_r.new_empty(2, tokens, 1, turned).unbind()
        self._library.rotation(
            positions_T.data_ptr(), signed_r.data_ptr(), gain, tokens, turned, cos.data_ptr(), sin.data_ptr()
        )
        return cos, sin

    def heads(self, qkv: Tensor, turn: Rotation, placing: Placing, kv_heads: int) -> Tensor:
        """`[T, H + 2 * G, d]` -> the same with queries and keys normed, clamped and turned, values clamped."""
        out, _ = self._placed(qkv, turn, placing, kv_heads)
        return out

    def place(
        self, qkv: Tensor, cos_T1r: Tensor, sin_T1r: Tensor, placing: Placing, target: Target, *, kv_heads: int
    ) -> Tensor:
        """As `heads`, but keys and values go to their slots: queries `[T, H, d]`."""
        placed, shape = self._placed(qkv, (cos_T1r, sin_T1r), placing, kv_heads)
        q_THd = placed.new_empty(len(placed), shape.heads, shape.dim)
        self._library.store(
            placed.data_ptr(), target.slots_T.data_ptr(), target.block_tokens, q_THd.data_ptr(),
            _plain(target.layer).data_ptr(), shape,
        )  # fmt: skip
        return q_THd

    def _placed(self, qkv: Tensor, turn: Rotation, placing: Placing, kv_heads: int) -> tuple[Tensor, _Heads]:
        (tokens, rows, dim), norm = qkv.shape, placing.norm
        cos, sin, out = _plain(turn[0]), _plain(turn[1]), _plain(qkv).clone()
        kind, weight = (0, out) if norm is None else (3 - norm.ndim, _plain(norm))
        shape = _Heads(
            tokens, rows - 2 * kv_heads, kv_heads, dim, cos.shape[-1], kind, placing.eps, placing.clip or 0.0
        )
        self._library.heads(out.data_ptr(), weight.data_ptr(), cos.data_ptr(), sin.data_ptr(), shape)
        return out, shape

    def packed(self, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, starts_S1: Tensor) -> Tensor:
        """Causal attention within whole sequences that lie end to end, int32 `starts_S1`: `[T, H, d]`."""
        (tokens, heads, dim), groups = q_THd.shape, k_TGd.shape[1]
        together = _plain(torch.cat((q_THd, k_TGd, v_TGd), 1))
        out = together.new_empty(tokens, heads, dim)
        room = _scratch(int(starts_S1.diff().max()) if tokens else 0)
        q, k, v = together.split([heads, groups, groups], 1)
        self._library.packed(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), starts_S1.data_ptr(), *map(Tensor.data_ptr, room), out.data_ptr(),
            _Attention(len(starts_S1) - 1, heads, groups, dim, together.stride(0)),
        )  # fmt: skip
        return out

    def decode(self, q_BHd: Tensor, pages: Pages, seen: Seen) -> Tensor:
        """See `kernels_attention.decode`; no sinks and no window."""
        return self._paged(q_BHd, pages, None, seen)

    def prefill(self, q_THd: Tensor, pages: Pages, fed: Fed, seen: Seen) -> Tensor:
        """See `kernels_attention.prefill`; no sinks and no window."""
        return self._paged(q_THd, pages, fed, seen)

    def _paged(self, q_THd: Tensor, pages: Pages, fed: Fed | None, seen: Seen) -> Tensor:
        if seen != (None, None):
            raise ModelError("batch-invariant attention knows no sinks and no window")
        (_, heads, dim), tables, q_THd = q_THd.shape, pages.tables_BN, _plain(q_THd)
        out, width = torch.empty_like(q_THd), 1 if fed is None else fed.queries_BQ.shape[1]
        room = _scratch(tables.shape[1] * pages.block_tokens)
        queries, counts = (None, None) if fed is None else (fed.queries_BQ.data_ptr(), fed.counts_B.data_ptr())
        self._library.paged(
            q_THd.data_ptr(), _plain(pages.layer).data_ptr(), tables.data_ptr(), pages.lengths_B.data_ptr(), queries,
            counts, *map(Tensor.data_ptr, room), out.data_ptr(),
            _Attention(len(tables), heads, pages.kv_heads, dim, tables.stride(0), pages.block_tokens, width),
        )  # fmt: skip
        return out

    def experts(
        self, x_TD: Tensor, ids_TC: Tensor, weights_TC: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor
    ) -> Tensor:
        """The sum of each token's SwiGLU experts by weight, in order of choice: `[T, D]`. An id below 0 is none."""
        (experts, dim, ffn), (tokens, choices) = down_EDF.shape, ids_TC.shape
        x_TD, weights_TC, gate_up, down = map(_plain, (x_TD, weights_TC, gate_up_E2FD, down_EDF))
        ids_TC, out = ids_TC.contiguous(), torch.empty_like(x_TD)
        wide, hidden = x_TD.new_empty(ROWS, 2 * ffn), x_TD.new_empty(ROWS, ffn)
        answers = x_TD.new_empty(tokens * choices, dim)
        order = ids_TC.new_empty(tokens * choices + experts + 1)
        self._library.experts(
            x_TD.data_ptr(), ids_TC.data_ptr(), weights_TC.data_ptr(), gate_up.data_ptr(), down.data_ptr(),
            wide.data_ptr(), hidden.data_ptr(), answers.data_ptr(), order.data_ptr(), out.data_ptr(),
            _Mixture(tokens, choices, experts, dim, ffn),
        )  # fmt: skip
        return out

    def logprobs(self, logits_TV: Tensor, targets_T: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Log-probability of each int64 target under `softmax(logits * scale)`, and its entropy: `[T]` each."""
        logits_TV, targets_T = _plain(logits_TV), targets_T.contiguous()
        (tokens, vocab), (found, entropy) = logits_TV.shape, logits_TV.new_empty(2, len(logits_TV)).unbind()
        room = logits_TV.new_empty(vocab)
        self._library.logprobs(
            logits_TV.data_ptr(), targets_T.data_ptr(), scale, tokens, vocab, room.data_ptr(), found.data_ptr(),
            entropy.data_ptr(),
        )  # fmt: skip
        return found, entropy

    def sample(
        self, logits_BV: Tensor, *, scales_B: Tensor, greedy_B: Tensor | None, uniforms_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `sampling.sample`; the log-probability is that of `logprobs`."""
        logits_BV, scales_B, uniforms_B = map(_plain, (logits_BV, scales_B, uniforms_B))
        (rows, vocab), greedy = logits_BV.shape, None if greedy_B is None else greedy_B.contiguous()
        tokens, found = torch.empty(rows, dtype=torch.int64), logits_BV.new_empty(rows)
        room = logits_BV.new_empty(vocab)
        self._library.sample(
            logits_BV.data_ptr(), scales_B.data_ptr(), None if greedy is None else greedy.data_ptr(),
            uniforms_B.data_ptr(), rows, vocab, room.data_ptr(), tokens.data_ptr(), found.data_ptr(),
        )  # fmt: skip
        return tokens, found


@cache
def built_invariant() -> InvariantKernels | str:
    """The kernels, built once a process; or, for people, why there are none."""
    library = build_library(SOURCE, flags=FLAGS)
    return library if isinstance(library, str) else InvariantKernels(library)


def _scratch(longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the pointers to a sequence's keys and values, and for its scores."""
    keys, values = torch.empty(2, longest + LANES, dtype=torch.int64).unbind()
    return keys, values, torch.empty(longest + LANES)


def _plain(x: Tensor) -> Tensor:
    if x.dtype != torch.float32 or x.is_cuda:
        raise ModelError(f"batch-invariant arithmetic is for float32 on a CPU, not {x.dtype} on {x.device}")
    return x.contiguous()  # nothing is done to what is so
