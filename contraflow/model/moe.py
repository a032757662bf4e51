"""The feed-forward half of a layer: a dense gated MLP, or a router, a dispatch and experts as grouped matmuls.

Every token of a DeepSeek-V3 or GLM-4.5 mixture goes to its shared experts too: one more MLP, which no dispatch knows.

Shape letters: T tokens, D width, F hidden width of an MLP or expert, E experts, R rows given to experts.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contraflow.compiled import compiled
from contraflow.dispatch.base import Dispatch, Rows
from contraflow.dispatch.local import LocalDispatch
from contraflow.model.arithmetic import Computing
from contraflow.model.clamped import add_bias, clamped_swiglu
from contraflow.model.families import ModelConfig
from contraflow.model.kinds import FAMILIES
from contraflow.model.ops import cast, computed, kernels_serve, swiglu
from contraflow.model.paged import Kernels
from contraflow.model.router import Router, Tape
from contraflow.model.sigmoid_router import SigmoidRouter

EXPERTS = ("gate_up", "down", "gate_up_bias", "down_bias")  # parameters with a row an expert; biases are gpt-oss's
FEW_ROWS = 32  # of an expert on average, up to which C beats torch on a CPU at every width measured (64 to 1024)
MOST_PAIRS = 32768  # that our kernels take, and were measured with: beyond, a prefill is given to torch's matmuls


class DenseMLP(Computing):
    """SwiGLU (Shazeer 2020) with gate and up fused into one matrix."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str, ffn: int | None = None
    ) -> None:
        super().__init__()
        ffn = config.ffn if ffn is None else ffn
        self.gate_up = nn.Parameter(torch.empty(2 * ffn, config.dim, dtype=dtype, device=device))
        self.down = nn.Parameter(torch.empty(config.dim, ffn, dtype=dtype, device=device))

    def forward(self, x_TD: Tensor, tape: Tape | None) -> Tensor:
        """`[T, D]` -> `[T, D]`; records nothing."""
        do = self.arithmetic
        return do.linear(do.swiglu(do.linear(x_TD, self.gate_up)), self.down)


class MoE(Computing):
    """A mixture of SwiGLU experts behind a dispatch.

    With `fuse`, rows are weighted before an expert's last matmul, which is linear, instead of after it: there it takes
    no pass over memory of its own.
    """

    def __init__(
        self, config: ModelConfig, dispatch: Dispatch[Any], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        experts, ffn, dim = config.experts, config.expert_ffn, config.dim
        family, made = FAMILIES[config.family], dict[str, Any](dtype=dtype, device=device)
        self.dispatch = dispatch
        self.fuse = False
        self.kernels: Kernels | None = None  # of a CPU, for few rows an expert at inference
        self.router = SigmoidRouter(config, device) if family.sigmoid else Router(config, device)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * ffn, dim, **made))
        self.down = nn.Parameter(torch.empty(experts, dim, ffn, **made))
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit
        self.gate_up_bias = nn.Parameter(torch.empty(experts, 2 * ffn, **made)) if family.oss else None
        self.down_bias = nn.Parameter(torch.empty(experts, dim, **made)) if family.oss else None
        self.shared = DenseMLP(config, **made, ffn=config.shared_experts * ffn) if config.shared_experts else None

    def forward(self, x_TD: Tensor, tape: Tape | None) -> Tensor:
        """`[T, D]` -> `[T, D]`, the sum of each token's experts by router weight."""
        ids_TK, weights_TK = self.router(x_TD, tape)
        out_TD = self.arithmetic.mixed(x_TD, ids_TK, weights_TK, (self.gate_up, self.down), self.mixed)
        return out_TD if self.shared is None else out_TD + self.shared(x_TD, None)

    def mixed(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The experts' part: by kernels where they take so few or so many rows, else behind the dispatch."""
        if self.kernels is not None and self.few(x_TD, ids_TK.numel()):
            return self.kernels.experts(x_TD, ids_TK, weights_TK, self.gate_up, self.down)
        if self.whole(x_TD, ids_TK.numel()):
            from contraflow.model import kernels_experts

            return kernels_experts.experts(x_TD, ids_TK, weights_TK, self.gate_up, self.down)
        return self.dispatch.mix(x_TD, ids_TK, weights_TK, self.answers)

    def whole(self, x_TD: Tensor, pairs: int) -> bool:
        """Whether our own kernels do all of the mixture for so many pairs: nothing to send, no bias, no cast."""
        local = self.dispatch
        if not kernels_serve(x_TD) or type(local) is not LocalDispatch or pairs > MOST_PAIRS:
            return False
        lossless = local.capacity is None or local.capacity >= pairs
        return lossless and self.down_bias is None and self.gate_up.dtype == self.down.dtype == x_TD.dtype

    def few(self, x_TD: Tensor, pairs: int) -> bool:
        """Whether a CPU's kernels do all of the mixture for so many pairs: with many, torch's matmuls are as fast."""
        plain = type(self.dispatch) is LocalDispatch and self.dispatch.capacity is None and self.down_bias is None
        same = self.gate_up.dtype == self.down.dtype == x_TD.dtype == torch.float32
        return plain and same and pairs <= FEW_ROWS * len(self.down) and torch.is_inference_mode_enabled()

    def expert_parameters(self) -> dict[str, nn.Parameter]:
        """Those of `EXPERTS` that the family has: what expert parallelism cuts."""
        return {name: weight for name, weight in self.named_parameters(recurse=False) if name in EXPERTS}

    def answers(self, rows: Rows[Any]) -> Tensor:
        """Each row's expert's answer, times the row's weight: `[R, D]`, of the rows' dtype."""
        if not self.fuse or self.down_bias is not None:  # a bias behind the last matmul needs its weight there
            return cast(self.experts(rows.x_RD, rows.ends_E) * rows.weights_R.unsqueeze(1), rows.x_RD.dtype)
        x_RD, ends_E = rows.x_RD, rows.ends_E
        gate_up_RF = F.grouped_mm(x_RD, computed(self.gate_up, x_RD.dtype).mT, offs=ends_E)
        hidden_RF = compiled(weighted_swiglu)(gate_up_RF, rows.weights_R)
        return F.grouped_mm(hidden_RF, computed(self.down, x_RD.dtype).mT, offs=ends_E)

    def experts(self, x_RD: Tensor, ends_E: Tensor) -> Tensor:
        """Each expert over its rows; rows past the last end come out undefined."""
        down = computed(self.down, x_RD.dtype).mT
        gate_up_RF = F.grouped_mm(x_RD, computed(self.gate_up, x_RD.dtype).mT, offs=ends_E)
        if self.gate_up_bias is None or self.down_bias is None:
            return F.grouped_mm(swiglu(gate_up_RF), down, offs=ends_E)
        hidden_RF = clamped_swiglu(add_bias(gate_up_RF, self.gate_up_bias, ends_E), self.alpha, self.limit)
        return add_bias(F.grouped_mm(hidden_RF, down, offs=ends_E), self.down_bias, ends_E)


def weighted_swiglu(gate_up_RF: Tensor, weights_R: Tensor) -> Tensor:
    """`silu(gate) * up * weight` of `[R, 2F]` and fp32 `[R]` -> `[R, F]`, computed in fp32 and rounded once."""
    gate_RF, up_RF = gate_up_RF.float().chunk(2, -1)
    return (F.silu(gate_RF) * up_RF * weights_R.unsqueeze(1)).to(gate_up_RF.dtype)
