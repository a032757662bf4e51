"""Routings of published models and of skewed popularity, drawn token by token."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """Experts, choices a token, hidden width; groups and how many of them a token may use (0: no limit)."""

    experts: int
    choices: int
    dim: int
    groups: int = 0
    groups_kept: int = 0


# From the models' public configurations.
MODELS = {
    "DeepSeek-V3": Shape(256, 8, 7168, 8, 4),
    "Qwen3-30B-A3B": Shape(128, 8, 2048),
    "Qwen3-235B-A22B": Shape(128, 8, 4096),
    "GLM-4.5": Shape(160, 8, 5120),
    "Kimi-K2": Shape(384, 8, 7168),
    "gpt-oss-120b": Shape(128, 4, 2880),
}


def draw(shape: Shape, tokens: int, *, seed: int, skew: str = "uniform") -> Tensor:
    """`[T, K]` int64: the K largest of popularity plus Gumbel noise, which is choosing without replacement."""
    noise = torch.Generator().manual_seed(seed)
    popularity_E = torch.zeros(shape.experts)
    if skew == "log-normal":
        popularity_E = torch.randn(shape.experts, generator=noise)
    if skew == "zipf":
        popularity_E = -torch.log1p(torch.randperm(shape.experts, generator=noise).float())
    gumbel_TE = -torch.log(-torch.log(torch.rand(tokens, shape.experts, generator=noise)))
    scores_TE = popularity_E + gumbel_TE
    if shape.groups:
        scores_TE = _limited(scores_TE, shape)
    return scores_TE.topk(shape.choices).indices


def _limited(scores_TE: Tensor, shape: Shape) -> Tensor:
    """A group's score is the sum of its two best; experts outside the best groups are out (DeepSeek-V3)."""
    by_group = scores_TE.view(len(scores_TE), shape.groups, -1)
    best = by_group.topk(2).values.sum(-1).topk(shape.groups_kept).indices
    kept = torch.zeros(by_group.shape[:2], dtype=torch.bool).scatter_(1, best, True)
    return by_group.masked_fill(~kept[..., None], -torch.inf).flatten(1)
