"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values made from a small latent.

Keys and values are made in full before `attend`, so that packed and paged attention need to know nothing of it. The
cache therefore holds whole heads, values padded to the width of keys, and not the latent, which would be
`heads * 2 * head_dim / (kv_rank + rope_dim)` times smaller.

Shape letters: T tokens, D width, H heads, d query and key head dimension, v value dimension, r dimensions that turn.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contraflow.errors import ModelError
from contraflow.model.attention import LayerPlan, attend
from contraflow.model.families import ModelConfig
from contraflow.model.kinds import Yarn
from contraflow.model.ops import linear, rms_norm
from contraflow.model.rotary import Rotation, rotate

LATENT_EPS = 1e-6  # of the latents' norms, whatever the model's other norms have


class LatentAttention(nn.Module):
    """Queries (through a latent of their own, or not) and a latent of keys and values, made in one matmul, `down`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        if config.latent is None:
            raise ModelError(f"a {config.family} model has no latent attention")
        shape, made = config.latent, dict[str, Any](dtype=dtype, device=device)
        self.heads, self.head_dim, self.shape = config.heads, config.head_dim, shape
        queries = config.heads * config.head_dim
        self.sizes = [shape.q_rank or queries, shape.kv_rank, shape.rope_dim]
        # Scores are scaled by 1/sqrt(d) wherever they are computed; queries carry what comes on top.
        self.gain = config.rope_scaling.score_gain if isinstance(config.rope_scaling, Yarn) else 1.0
        self.down = nn.Parameter(torch.empty(sum(self.sizes), config.dim, **made))
        self.down_bias = nn.Parameter(torch.empty(sum(self.sizes), **made)) if config.attention_bias else None
        self.q_norm = nn.Parameter(torch.empty(shape.q_rank, **made)) if shape.q_rank else None
        self.q_up = nn.Parameter(torch.empty(queries, shape.q_rank, **made)) if shape.q_rank else None
        self.kv_norm = nn.Parameter(torch.empty(shape.kv_rank, **made))
        both = config.heads * (shape.nope_dim + shape.value_dim)
        self.kv_up = nn.Parameter(torch.empty(both, shape.kv_rank, **made))
        self.out = nn.Parameter(torch.empty(config.dim, config.heads * shape.value_dim, **made))
        self.out_bias = nn.Parameter(torch.empty(config.dim, **made)) if config.attention_bias else None

    def forward(self, x_TD: Tensor, turn: Rotation, plan: LayerPlan) -> Tensor:
        """`[T, D]` -> `[T, D]`; `turn` holds the tokens' positions."""
        nope, value = self.shape.nope_dim, self.shape.value_dim
        q, latent, k_Tr = linear(x_TD, self.down, self.down_bias).split_with_sizes(self.sizes, 1)
        if self.q_norm is not None and self.q_up is not None:
            q = linear(rms_norm(q, self.q_norm, LATENT_EPS), self.q_up)
        kv = linear(rms_norm(latent, self.kv_norm, LATENT_EPS), self.kv_up).view(-1, self.heads, nope + value)
        k_still, v_THv = kv.split_with_sizes((nope, value), -1)
        q_still, q_THr = q.view(-1, self.heads, self.head_dim).split_with_sizes((nope, self.shape.rope_dim), -1)
        q_THr, k_T1r = rotate(self._halves(torch.cat((q_THr, k_Tr.unsqueeze(1)), 1)), turn).split_with_sizes(
            (self.heads, 1), 1
        )
        q_THd = torch.cat((q_still, q_THr), -1) * self.gain
        k_THd = torch.cat((k_still, k_T1r.expand(-1, self.heads, -1)), -1)
        o_THd = attend(q_THd, k_THd, F.pad(v_THv, (0, self.head_dim - value)), plan)
        return linear(o_THd[..., :value].flatten(1), self.out, self.out_bias)

    def _halves(self, x: Tensor) -> Tensor:
        """Pairs that are neighbours on disk, half of the dimensions apart as `rotate` wants them."""
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self.shape.interleaved else x
