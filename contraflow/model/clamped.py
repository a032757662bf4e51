"""gpt-oss's experts: biases, and a SwiGLU whose gate and up are clamped and lie side by side.

As published with its weights (arXiv 2508.10925, section 2.2, and the reference code beside it).

Shape letters: R rows given to experts, D width, F hidden width of an expert, E experts.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from contraflow.model.ops import cast


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """`(up + 1) * gate * sigmoid(alpha * gate)` of clamped `[..., 2F]`, gates at even places -> `[..., F]`."""
    gate, up = gate_up.unflatten(-1, (-1, 2)).unbind(-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    out: Tensor = (up + 1) * gate * (alpha * gate).sigmoid()
    return out


def add_bias(x_RF: Tensor, bias_EF: Tensor, ends_E: Tensor) -> Tensor:
    """Each row plus its expert's bias. Rows past the last end, which hold anything, neither get nor move one."""
    rows_R = torch.arange(x_RF.shape[0], dtype=ends_E.dtype, device=x_RF.device)
    expert_R = torch.searchsorted(ends_E, rows_R, right=True)
    # An embedding, since its gradient is summed in the same order every time.
    return x_RF + F.embedding(expert_R, F.pad(cast(bias_EF, x_RF.dtype), (0, 0, 0, 1)))
