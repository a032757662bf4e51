"""The router of DeepSeek-V3 and GLM-4.5: sigmoid scores, chosen among by a bias that no gradient moves.

DeepSeek-V3 (arXiv 2412.19437), equations 12 to 16: a token takes the experts whose score plus bias is largest, within
the groups whose two best such sums are largest together; its weights are the scores without the bias.

Shape letters: T tokens, D width, E experts, G groups, K experts per token.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contraflow.model.families import ModelConfig
from contraflow.model.ops import cast, linear
from contraflow.model.router import Tape


class SigmoidRouter(nn.Module):
    """Invariant: `correction_bias` decides who is chosen and nothing else. It is a parameter so that it travels with
    the weights, and frozen: an engine and a trainer that disagree about it route differently."""

    def __init__(self, config: ModelConfig, device: torch.device | str) -> None:
        super().__init__()
        self.top_k, self.renormalise, self.scale = config.top_k, config.renormalise, config.routed_scale
        self.groups, self.top_groups = config.groups, config.top_groups
        self.weight = nn.Parameter(torch.empty(config.experts, config.dim, dtype=torch.float32, device=device))
        self.correction_bias = nn.Parameter(torch.empty_like(self.weight[:, 0]), requires_grad=False)

    def forward(self, x_TD: Tensor, tape: Tape | None) -> tuple[Tensor, Tensor]:
        """`[T, D]` -> expert ids int64 `[T, K]`, first choice first, and their weights fp32 `[T, K]`."""
        logits_TE = linear(cast(x_TD, torch.float32), self.weight)
        scores_TE = logits_TE.sigmoid()

        def choose() -> Tensor:
            return self._open(scores_TE.detach() + self.correction_bias).topk(self.top_k).indices

        ids_TK = choose() if tape is None else tape.take(choose)
        weights_TK = scores_TE.gather(1, ids_TK)
        if self.renormalise:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        if tape is not None:
            tape.record(ids_TK, F.logsigmoid(logits_TE))  # whose softmax is the scores divided by their sum
        return ids_TK, weights_TK * self.scale

    def _open(self, choice_TE: Tensor) -> Tensor:
        """`choice_TE` with all experts outside the token's best groups at minus infinity."""
        if self.top_groups == self.groups:
            return choice_TE
        choice_TGe = choice_TE.unflatten(1, (self.groups, -1))
        best_TG = choice_TGe.topk(2).values.sum(-1).topk(self.top_groups).indices
        closed_TG = torch.ones(choice_TGe.shape[:2], dtype=torch.bool, device=choice_TE.device).scatter(
            1, best_TG, False
        )
        open_TGe: Tensor = choice_TGe.masked_fill(closed_TG.unsqueeze(-1), -torch.inf)
        return open_TGe.flatten(1)
