"""What the suites of spread dispatch share: routings, a mixture of linear experts, and the same computed densely."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contraflow.dispatch.base import Dispatch


@dataclass
class Case:
    """What each rank brings: T tokens, their experts and weights; and the experts' matrices, the same on all."""

    experts: int
    x: list[Tensor]  # [T, D]
    ids: list[Tensor]  # [T, K]
    weights: list[Tensor]  # [T, K]
    matrices: Tensor  # [E, D, D]


def make_case(
    tokens: list[int], *, experts: int, choices: int, dim: int, seed: int, dtype: torch.dtype = torch.float32,
    absent: float = 0.2, popular: float = 0.0,
) -> Case:  # fmt: skip
    """Distinct experts a token, as a router gives; a share `absent` of pairs is -1. Higher `popular`: more skew."""
    noise = torch.Generator().manual_seed(seed)
    xs, ids, weights = [], [], []
    for count in tokens:
        scores = torch.rand(count, experts, generator=noise) - popular * torch.arange(experts) / experts
        chosen = scores.topk(choices).indices
        ids.append(torch.where(torch.rand(count, choices, generator=noise) < absent, -1, chosen))
        xs.append(torch.randn(count, dim, generator=noise).to(dtype))
        weights.append(torch.rand(count, choices, generator=noise))
    matrices = torch.randn(experts, dim, dim, generator=noise).to(dtype)
    return Case(experts, xs, ids, weights, matrices)


def through(dispatch: Dispatch[Any], x: Tensor, ids: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
    """A mixture whose expert e of this rank multiplies by `matrices[e]`; rows past the last end become NaN."""
    rows = dispatch.dispatch(x, ids, weights)
    ends = rows.ends_E.tolist()
    parts = [rows.x_RD[a:b] @ m for a, b, m in zip([0, *ends], ends, matrices, strict=False)]
    answers = torch.cat([*parts, rows.x_RD[ends[-1] :] * torch.nan])
    return dispatch.combine((answers * rows.weights_R[:, None]).to(x.dtype), rows.handle)


def dense(x: Tensor, ids: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
    """The same by way of every expert for every token, in float64, on one rank that holds all."""
    all_TED = torch.einsum("td,edf->tef", x.double(), matrices.double())
    choice_TKE = (ids[..., None] == torch.arange(len(matrices))).double()
    return torch.einsum("tk,tke,tef->tf", weights.double(), choice_TKE, all_TED)


@dataclass
class Seen:
    """Values and gradients of one rank."""

    out: Tensor
    grad_x: Tensor
    grad_weights: Tensor
    grad_matrices: Tensor  # of all experts; zero for those of other ranks


def run_rank(dispatch: Dispatch[Any], case: Case, rank: int, ranks: int) -> Seen:
    """One rank's part of the case through a dispatch over `ranks` ranks."""
    held = case.experts // ranks
    own = slice(rank * held, (rank + 1) * held)
    matrices = case.matrices.clone().requires_grad_()
    x, weights = case.x[rank].clone().requires_grad_(), case.weights[rank].clone().requires_grad_()
    out = through(dispatch, x, case.ids[rank], weights, matrices[own])
    grads = torch.autograd.grad(out, (x, weights, matrices), pull_of(out), allow_unused=True, materialize_grads=True)
    return Seen(out.detach(), *grads)


def wanted(case: Case) -> list[Seen]:
    """The same for every rank from one process in float64; `grad_matrices` is the sum over ranks."""
    matrices = case.matrices.double().requires_grad_()
    found, total = [], torch.zeros_like(matrices)
    for x, ids, weights in zip(case.x, case.ids, case.weights, strict=True):
        leaf_x, leaf_w = x.double().requires_grad_(), weights.double().requires_grad_()
        out = dense(leaf_x, ids, leaf_w, matrices)
        grads = torch.autograd.grad(out, (leaf_x, leaf_w, matrices), pull_of(out.to(x.dtype)).double())
        found.append(Seen(out.detach(), grads[0], grads[1], grads[2]))
        total += grads[2]
    for seen in found:
        seen.grad_matrices = total
    return found


def pull_of(out: Tensor) -> Tensor:
    """A gradient to start from, the same for equal shapes."""
    return torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)


def check(case: Case, got: list[Seen], *, rtol: float, atol: float) -> None:
    """Every rank's values and gradients are those of the dense sum; those of experts add up over ranks."""
    expected = wanted(case)
    for rank, (seen, right) in enumerate(zip(got, expected, strict=True)):
        for name in ("out", "grad_x", "grad_weights"):
            torch.testing.assert_close(
                getattr(seen, name).double(), getattr(right, name), rtol=rtol, atol=atol,
                msg=lambda text, name=name, rank=rank: f"{name} of rank {rank}: {text}",
            )  # fmt: skip
    total = torch.stack([seen.grad_matrices.double() for seen in got]).sum(0)
    torch.testing.assert_close(total, expected[0].grad_matrices, rtol=rtol, atol=atol)
