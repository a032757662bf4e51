"""The feed-forward half of a layer: a dense gated MLP, or a router, a dispatch and experts as grouped matmuls.

Shape letters: T tokens, D width, F hidden width of an MLP or expert, E experts, R rows given to experts.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contraflow.dispatch.base import Dispatch
from contraflow.model.families import ModelConfig
from contraflow.model.ops import cast, linear
from contraflow.model.router import Router, Tape


class DenseMLP(nn.Module):
    """SwiGLU (Shazeer 2020) with gate and up fused into one matrix."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2 * config.ffn, config.dim, dtype=dtype, device=device))
        self.down = nn.Parameter(torch.empty(config.dim, config.ffn, dtype=dtype, device=device))

    def forward(self, x_TD: Tensor, tape: Tape | None) -> Tensor:
        """`[T, D]` -> `[T, D]`; records nothing."""
        return linear(swiglu(linear(x_TD, self.gate_up)), self.down)


class MoE(nn.Module):
    """A mixture of SwiGLU experts behind a dispatch."""

    def __init__(
        self, config: ModelConfig, dispatch: Dispatch[Any], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        experts, ffn, dim = config.experts, config.expert_ffn, config.dim
        self.dispatch = dispatch
        self.router = Router(config, device)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * ffn, dim, dtype=dtype, device=device))
        self.down = nn.Parameter(torch.empty(experts, dim, ffn, dtype=dtype, device=device))

    def forward(self, x_TD: Tensor, tape: Tape | None) -> Tensor:
        """`[T, D]` -> `[T, D]`, the sum of each token's experts by router weight."""
        ids_TK, weights_TK = self.router(x_TD, tape)
        rows = self.dispatch.dispatch(x_TD, ids_TK, weights_TK)
        answers_RD = self.experts(rows.x_RD, rows.ends_E) * rows.weights_R.unsqueeze(1)
        return self.dispatch.combine(cast(answers_RD, x_TD.dtype), rows.handle)

    def experts(self, x_RD: Tensor, ends_E: Tensor) -> Tensor:
        """Each expert over its rows; rows past the last end come out undefined."""
        hidden_RF = swiglu(F.grouped_mm(x_RD, cast(self.gate_up, x_RD.dtype).mT, offs=ends_E))
        return F.grouped_mm(hidden_RF, cast(self.down, x_RD.dtype).mT, offs=ends_E)


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[..., 2F]` -> `[..., F]`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
