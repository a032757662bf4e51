"""Routings whose values and gradients are known in closed form and exact in bf16 and, block by block, in e4m3.

Tokens are whole numbers up to 7, an expert multiplies by its scale 1 or 2, weights are 1 or 2, and a token has at most
8 experts: every sum is a whole number below 257. A pair that is lost, doubled or misplaced shows in the bits.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.dispatch.mixture import make_case


@dataclass(frozen=True)
class Routing:
    """Tokens by rank, and how they choose. `experts_of` fixes one row of ids for all tokens."""

    name: str
    tokens: tuple[int, ...] = (129, 64)
    experts: int = 8
    choices: int = 3
    dim: int = 256
    absent: float = 0.2
    popular: float = 0.0
    experts_of: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.bfloat16
    wire: str = "same"
    fixed: bool = False
    strided: bool = False

    def grad_experts(self) -> Tensor:
        """The gradient of the experts' scales, from the tokens of all ranks."""
        return torch.stack([Exact.of(self, rank).right()["grad experts"] for rank in range(len(self.tokens))]).sum(0)


@dataclass
class Exact:
    """One rank's part, in float64."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    scale_E: Tensor
    pull: Tensor

    @classmethod
    def of(cls, routing: Routing, rank: int) -> "Exact":
        case = make_case(
            list(routing.tokens), experts=routing.experts, choices=routing.choices, dim=1, seed=3,
            absent=routing.absent, popular=routing.popular,
        )  # fmt: skip
        noise = torch.Generator().manual_seed(rank)
        tokens = routing.tokens[rank]
        x = torch.randint(-7, 8, (tokens, routing.dim), generator=noise).double()
        x[:, ::128] = 7.0  # so that a block's e4m3 scale is 1/64
        ids = case.ids[rank]
        if routing.experts_of is not None:
            ids = torch.tensor([routing.experts_of] * tokens).view(tokens, -1)
        weights = torch.randint(1, 3, ids.shape, generator=noise).double()
        scale_E = 1.0 + torch.arange(routing.experts, dtype=torch.float64) % 2
        pull = torch.randint(-1, 2, x.shape, generator=noise).double()
        return cls(x, ids, weights, scale_E, pull)

    def right(self) -> dict[str, Tensor]:
        """Values and gradients in closed form; that of the scales is this rank's tokens' part."""
        there = self.ids >= 0
        scale_TK = torch.where(there, self.scale_E[self.ids.clamp_min(0)], 0.0)
        factor_T1 = (self.weights * scale_TK).sum(1, keepdim=True)
        along_T1 = (self.x * self.pull).sum(1, keepdim=True)
        grad_scale = torch.zeros_like(self.scale_E).index_add_(
            0, self.ids.clamp_min(0).flatten(), torch.where(there, self.weights * along_T1, 0.0).flatten()
        )
        return {
            "out": self.x * factor_T1,
            "grad x": self.pull * factor_T1,
            "grad weights": scale_TK * along_T1,
            "grad experts": grad_scale,
        }

    def inputs(self, routing: Routing, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens and weights are leaves."""
        x = self.x.to(device, routing.dtype)
        ids = self.ids.to(device)
        if routing.strided:
            x, ids = x.t().contiguous().t(), ids.t().contiguous().t()
        return x.requires_grad_(), ids, self.weights.float().to(device).requires_grad_()


def scaled(dispatch: Any, x: Tensor, ids: Tensor, weights: Tensor, scale_L: Tensor) -> Tensor:
    """Through experts that multiply by their scale; rows past the last end become NaN, and must not matter."""
    rows = dispatch.dispatch(x, ids, weights)
    place_R = torch.arange(rows.x_RD.shape[0], device=x.device)
    expert_R = torch.searchsorted(rows.ends_E.long(), place_R, right=True)
    assert bool(torch.isfinite(rows.x_RD).all()), "rows past the last end must be finite"
    factor_R = rows.weights_R * scale_L[expert_R.clamp_max(len(scale_L) - 1)]
    y_RD = (rows.x_RD.float() * factor_R[:, None]).to(x.dtype)
    return dispatch.combine(torch.where((expert_R < len(scale_L))[:, None], y_RD, torch.nan), rows.handle)


def differences(got: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """What is not the same bit for bit, in words."""
    wrong = []
    for name, tensor in right.items():
        found = got[name].detach().double().cpu()
        if found.shape != tensor.shape:
            wrong.append(f"{name} has shape {list(found.shape)}, not {list(tensor.shape)}")
        elif not torch.equal(found, tensor):
            off = (found != tensor) | found.isnan()
            wrong.append(f"{name}: {int(off.sum())} of {off.numel()} differ, most by {(found - tensor).abs().max():g}")
    return wrong
