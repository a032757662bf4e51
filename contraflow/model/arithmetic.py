"""What a decoder computes with: each operation as torch does it. `invariant` has the same with other promises.

Modules hold an `Arithmetic` and ask it; whoever wants another says so to the whole decoder (`Decoder.compute_with`).
Operations that a module has a form of its own for are handed that form. Does not know layers.

Shape letters: T tokens, D width, N outputs, H query heads, G key/value heads, d head dimension, K experts of a token,
V vocabulary.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from contraflow.model import ops, rotary
from contraflow.model.logprobs import token_logprobs
from contraflow.model.paged import Placing
from contraflow.model.rotary import Rotation
from contraflow.model.sinks import Sight

Triple = tuple[Tensor, Tensor, Tensor]


class Attending(Protocol):
    """One layer's plan: see `attention.LayerPlan`."""

    def attend(self, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, sight: Sight | None = None) -> Tensor: ...


class Arithmetic:
    """Torch's own, in any dtype and on any device; differentiable. Rows of another batch may round otherwise."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `ops.linear`."""
        return ops.linear(x, weight, bias)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """See `ops.rms_norm`."""
        return ops.rms_norm(x_TD, weight_D, eps)

    def add_norm(self, x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `ops.add_norm`."""
        return ops.add_norm(x_TD, delta_TD, weight_D, eps)

    def softmax(self, x_TN: Tensor) -> Tensor:
        """Of each row."""
        return x_TN.softmax(-1)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """See `ops.swiglu`."""
        return ops.swiglu(gate_up)

    def rotation(self, positions_T: Tensor, signed_r: Tensor, dtype: torch.dtype, gain: float) -> Rotation:
        """See `rotary.rotation`."""
        return rotary.rotation(positions_T, signed_r, dtype, gain)

    def placed(
        self,
        qkv: Tensor,
        turn: Rotation,
        placing: Placing | None,
        kv_heads: int,
        ordinary: Callable[[Tensor], Triple],
    ) -> Triple:
        """Queries, keys and values from a projection `[T, H + 2 * G, d]`: see `Attention.placed`."""
        return ordinary(qkv)

    def attend(self, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, plan: Attending, sight: Sight | None) -> Tensor:
        """Causal attention of the fed tokens: `[T, H, d]`. Query head h reads key/value head h // (H / G)."""
        return plan.attend(q_THd, k_TGd, v_TGd) if sight is None else plan.attend(q_THd, k_TGd, v_TGd, sight)

    def mixed(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        experts: tuple[nn.Parameter, nn.Parameter],
        ordinary: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """The sum of each token's SwiGLU experts (gate and up in one, down) by weight: `[T, D]`."""
        return ordinary(x_TD, ids_TK, weights_TK)

    def token_logprobs(
        self,
        hidden_TD: Tensor,
        head_VD: Tensor,
        targets_T: Tensor,
        *,
        temperature: float = 1.0,
        split: bool = False,
        fuse: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """See `logprobs.token_logprobs`."""
        return token_logprobs(hidden_TD, head_VD, targets_T, temperature=temperature, split=split, fuse=fuse)


TORCH = Arithmetic()


class Computing(nn.Module):
    """A module that computes with an `Arithmetic`: torch's, until told otherwise."""

    arithmetic: Arithmetic = TORCH
