"""Batch-invariant arithmetic of a decoder: trainer and engine give a token the same bits, whatever goes with it.

Forward by the kernels of `invariant_cpu`, of fp32 on a CPU; gradients by torch's own forms of the same operations, and
these are not invariant. Refuses models that have parts it does not cover.

Shape letters: as in `arithmetic`; C tokens of a chunk.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from contraflow.errors import ConfigError, ModelError
from contraflow.model import ops
from contraflow.model.arithmetic import Arithmetic, Attending, Triple
from contraflow.model.attention import PackedPlan
from contraflow.model.families import ModelConfig
from contraflow.model.invariant_cpu import InvariantKernels, built_invariant
from contraflow.model.kinds import FAMILIES
from contraflow.model.logprobs import CHUNK_LOGITS, TokenLogprobs
from contraflow.model.paged import Placing
from contraflow.model.rotary import Rotation
from contraflow.model.sinks import Sight


def covered() -> list[str]:
    """Families that all parts of are covered: no latent attention, sigmoid router, sinks or clamped experts."""
    return [name for name, family in FAMILIES.items() if not (family.latent or family.sigmoid or family.oss)]


def open_invariant(config: ModelConfig) -> "Invariant":
    """The arithmetic for a model. Raises: ConfigError where it does not cover it, or no C compiler builds it."""
    if config.family not in covered():
        raise ConfigError(
            f"engine.bitwise = true with a {config.family} model: its attention or experts have no batch-invariant"
            f" form; covered are {', '.join(covered())}; set engine.bitwise = false for this one"
        )
    kernels = built_invariant()
    if isinstance(kernels, str):
        raise ConfigError(
            f"engine.bitwise = true needs kernels in C, and {kernels}; install a C compiler, or set it to false"
        )
    return Invariant(kernels)


class Invariant(Arithmetic):
    """Invariant: of every operation, a row's result is a function of that row (of its sequence up to it) and weights.

    Raises: ModelError for tensors that are not fp32 on a CPU, or a plan whose attention it has no form of.
    """

    def __init__(self, kernels: InvariantKernels) -> None:
        self.kernels = kernels

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `Arithmetic.linear`."""
        if not torch.is_grad_enabled():
            return self.kernels.linear(x, weight, bias)
        out: Tensor = _Linear.apply(self.kernels, x, weight, bias)  # type: ignore[no-untyped-call]
        return out

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """See `Arithmetic.rms_norm`."""
        return _either(
            lambda x, weight: self.kernels.norm(x, weight, eps),
            lambda x, weight: ops.rms_norm(x, weight, eps),
            x_TD,
            weight_D,
        )

    def add_norm(self, x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Arithmetic.add_norm`. A sum of two rounds alike wherever it stands."""
        x_TD = x_TD + delta_TD
        return x_TD, self.rms_norm(x_TD, weight_D, eps)

    def softmax(self, x_TN: Tensor) -> Tensor:
        """See `Arithmetic.softmax`."""
        return _either(self.kernels.softmax, super().softmax, x_TN)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """See `Arithmetic.swiglu`."""
        return _either(self.kernels.swiglu, ops.swiglu, gate_up)

    def rotation(self, positions_T: Tensor, signed_r: Tensor, dtype: torch.dtype, gain: float) -> Rotation:
        """See `Arithmetic.rotation`. torch's cosine rounds otherwise at the end of a tensor than within it."""
        return self.kernels.rotation(positions_T, signed_r, gain)

    def placed(
        self,
        qkv: Tensor,
        turn: Rotation,
        placing: Placing | None,
        kv_heads: int,
        ordinary: Callable[[Tensor], Triple],
    ) -> Triple:
        """See `Arithmetic.placed`."""
        assert placing is not None, "only heads that are cut among ranks have none"
        placed = _either(
            lambda x: self.kernels.heads(x, turn, placing, kv_heads),
            lambda x: torch.cat(ordinary(x), 1),
            qkv,
            read=() if placing.norm is None else (placing.norm,),
        )
        q, k, v = placed.split_with_sizes((placed.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
        return q, k, v

    def attend(self, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, plan: Attending, sight: Sight | None) -> Tensor:
        """See `Arithmetic.attend`."""
        if isinstance(plan, PackedPlan) and sight is None:
            starts_S1 = plan.starts_S1
            return _either(lambda q, k, v: self.kernels.packed(q, k, v, starts_S1), plan.attend, q_THd, k_TGd, v_TGd)
        raise ModelError(f"batch-invariant attention has no form for a {type(plan).__name__} with sight {sight}")

    def mixed(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        experts: tuple[nn.Parameter, nn.Parameter],
        ordinary: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """See `Arithmetic.mixed`."""
        return _either(
            lambda x, weights: self.kernels.experts(x, ids_TK, weights, *experts),
            lambda x, weights: ordinary(x, ids_TK, weights),
            x_TD,
            weights_TK,
            read=experts,
        )

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
        """See `Arithmetic.token_logprobs`; one form, whatever `split` and `fuse` say."""
        size = max(CHUNK_LOGITS // len(head_VD), 1)
        logprobs_T, entropy_T = _Logprobs.apply(hidden_TD, head_VD, targets_T, temperature, size, self.kernels)  # type: ignore[no-untyped-call]
        return logprobs_T, entropy_T

    def sample(
        self, logits_BV: Tensor, *, scales_B: Tensor, greedy_B: Tensor | None, uniforms_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens int64 `[B]` and log-probabilities fp32 `[B]`: see `rollout.sampling.sample`."""
        return self.kernels.sample(logits_BV, scales_B=scales_B, greedy_B=greedy_B, uniforms_B=uniforms_B)


class _Linear(torch.autograd.Function):
    """`x @ weight.T + bias`, of `[T, N]`."""

    @staticmethod
    def forward(ctx: Any, kernels: InvariantKernels, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return kernels.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (_, for_x, for_weight, for_bias) = ctx.saved_tensors, ctx.needs_input_grad
        return (
            None,
            grad @ weight if for_x else None,
            grad.t() @ x if for_weight else None,
            grad.sum(0) if for_bias else None,
        )


class _Either(torch.autograd.Function):
    """The value of one function and, computed when it is asked for, the gradient of another of the same inputs.

    `ordinary` takes the tensors but the last `read`, which are parameters that it reads by itself.
    """

    @staticmethod
    def forward(
        ctx: Any,
        exact: Callable[..., Tensor],
        ordinary: Callable[..., Tensor],
        read: int,
        *tensors: Tensor,
    ) -> Tensor:
        given = len(tensors) - read
        ctx.ordinary, ctx.read = ordinary, tensors[given:]
        ctx.save_for_backward(*tensors[:given])
        return exact(*tensors[:given])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        given = [
            tensor.detach().requires_grad_(needs) for tensor, needs in zip(ctx.saved_tensors, needed, strict=False)
        ]
        with torch.enable_grad():
            out = ctx.ordinary(*given)
        wanted = [tensor for tensor, needs in zip([*given, *ctx.read], needed, strict=True) if needs]
        found = iter(torch.autograd.grad(out, wanted, grad))
        return (None, None, None, *[next(found) if needs else None for needs in needed])


class _Logprobs(TokenLogprobs):
    """Gradients are those of its parent, which computes what it needs anew."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden_TD: Tensor,
        head_VD: Tensor,
        targets_T: Tensor,
        temperature: float,
        size: int,
        kernels: InvariantKernels,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_TD, head_VD, targets_T)
        ctx.temperature, ctx.size = temperature, size
        parts = [
            kernels.logprobs(kernels.linear(hidden_CD, head_VD), targets_C, 1 / temperature)
            for hidden_CD, targets_C in zip(hidden_TD.split(size), targets_T.split(size), strict=True)
        ]
        logprobs_T, entropy_T = (torch.cat(part) for part in zip(*parts, strict=True))
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_logprob_T: Tensor, grad_entropy_T: Tensor) -> tuple[Tensor | None, ...]:
        return (*TokenLogprobs.backward(ctx, grad_logprob_T, grad_entropy_T), None)


def _either(
    exact: Callable[..., Tensor],
    ordinary: Callable[..., Tensor],
    *tensors: Tensor,
    read: tuple[Tensor, ...] = (),
) -> Tensor:
    """See `_Either`; without gradients, `exact` alone."""
    if not torch.is_grad_enabled():
        return exact(*tensors)
    out: Tensor = _Either.apply(exact, ordinary, len(read), *tensors, *read)  # type: ignore[no-untyped-call]
    return out
