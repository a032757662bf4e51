"""The decoder's smallest pieces: weights cast at use, the root-mean-square norm, and who is served by own kernels.

On a CPU, small models spend their time in calling kernels, so the norm is written in as few as torch allows and has
its own backward; on a GPU and in half precision torch's norm is used. Shape letters: T tokens, D the normed width.
"""

from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

HALF = (torch.bfloat16, torch.float16)


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`; itself when it is already (asking costs a tenth of a call of `to`)."""
    return weight if weight.dtype == dtype else weight.to(dtype)


def computed(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`, from the copy that `copies.compute_copies` holds, if it holds one."""
    if weight.dtype == dtype:
        return weight
    copy = getattr(weight, "compute_copy", None)
    if copy is None:
        return weight.to(dtype)
    out: Tensor = _Copied.apply(weight, copy)  # type: ignore[no-untyped-call]
    return out


class _Copied(torch.autograd.Function):
    """The copy. Its gradient goes straight to the weight's, when there is one: no cast of it is ever written."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor) -> Tensor:
        ctx.weight = weight
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        if ctx.weight.grad is None:
            return grad.to(ctx.weight.dtype), None
        ctx.weight.grad.add_(grad)
        return None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` in x's dtype."""
    return F.linear(x, computed(weight, x.dtype), None if bias is None else cast(bias, x.dtype))


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[..., 2F]` -> `[..., F]`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def kernels_serve(x: Tensor) -> bool:
    """Whether `x` goes through our own kernels: in half precision, on a GPU that Triton knows, in inference mode.

    Not under `no_grad`: a pass that is repeated for its gradient must round as its repetition does.
    """
    return x.is_cuda and x.dtype in HALF and torch.is_inference_mode_enabled() and have_triton()


@cache
def have_triton() -> bool:
    """Whether Triton is installed, as it is beside torch for CUDA."""
    return find_spec("triton") is not None


def add_norm(x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x + delta`, and its `rms_norm`."""
    if kernels_serve(x_TD):
        from contraflow.model import kernels_tokens

        return kernels_tokens.add_norm(x_TD, delta_TD, weight_D, eps)
    x_TD = x_TD + delta_TD
    return x_TD, rms_norm(x_TD, weight_D, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang and Sennrich 2019).

    `weight` is `[D]`, or has further dimensions that broadcast over those of `x`.
    """
    if torch.compiler.is_compiling():
        # Spelled out: compiled by torch 2.11, F.rms_norm gives its weight a gradient that is wrong (by 8 times, on an
        # H200, for 16k rows of 2048), and with it the norm of all gradients.
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)
    if x.is_cuda or x.dtype != torch.float32:
        weight = cast(weight, x.dtype)
        if weight.ndim == 1:
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.rms_norm(x, x.shape[-1:], None, eps) * weight
    weight = cast(weight, x.dtype)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        out: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
        return out
    return (x * _scale(x, eps)).mul_(weight)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = _scale(x, eps)
        unit = x * scale
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, scale, weight = ctx.saved_tensors
        pull = grad * weight
        along = torch.linalg.vecdot(pull, unit).unsqueeze(-1)
        grad_x = torch.addcmul(pull, unit, along, value=-1 / unit.shape[-1]).mul_(scale)
        return grad_x, (grad * unit).sum_to_size(weight.shape), None


def _scale(x: Tensor, eps: float) -> Tensor:
    """`1 / sqrt(mean(x^2) + eps)`, `[..., 1]`."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_constant(eps), length, length, value=1 / x.shape[-1]).rsqrt_()


@lru_cache
def _constant(value: float) -> Tensor:
    return torch.tensor(value)
