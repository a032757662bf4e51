"""Which experts a token goes to, and a tape that remembers it.

The router is a softmax over experts in fp32, its top K kept, renormalised or not; `sigmoid_router` is another. The tape
records a forward pass and computes nothing until asked. Neither moves tokens (`dispatch/` does).

Shape letters: T tokens, D width, E experts, K experts per token, M MoE layers.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from contraflow.errors import ModelError
from contraflow.model.families import ModelConfig
from contraflow.model.kinds import FAMILIES
from contraflow.model.ops import cast, kernels_serve, linear


class Tape(Protocol):
    """What a router tells its choices to, and what may have them already."""

    def chosen(self) -> Tensor | None:
        """Expert ids `[T, K]` to take instead of choosing; None to choose."""
        ...

    def record(self, ids_TK: Tensor, logits_TE: Tensor) -> None:
        """Called by each router, in layer order."""
        ...


class RouterTape:
    """The routing of one forward pass, layer by layer.

    Invariant: holds one entry per MoE layer of exactly one forward pass; a used tape is refused by the decoder.
    """

    def __init__(self) -> None:
        self._ids_TK: list[Tensor] = []
        self._logits_TE: list[Tensor] = []

    @property
    def used(self) -> bool:
        return bool(self._ids_TK)

    def chosen(self) -> None:
        """See `Tape.chosen`: it only listens."""

    def record(self, ids_TK: Tensor, logits_TE: Tensor) -> None:
        """See `Tape.record`."""
        self._ids_TK.append(ids_TK)
        self._logits_TE.append(logits_TE)

    def routes(self) -> Tensor:
        """Chosen experts, best first: `[T, M, K]`, uint8 up to 256 experts and uint16 above."""
        self._need()
        small = self._logits_TE[0].shape[1] <= 256
        return torch.stack(self._ids_TK, 1).to(torch.uint8 if small else torch.uint16)

    def loads(self) -> Tensor:
        """Tokens each expert was given: `[M, E]` int64."""
        self._need()
        experts = self._logits_TE[0].shape[1]
        ids = torch.stack([ids_TK.reshape(-1) for ids_TK in self._ids_TK])
        return torch.zeros(len(ids), experts, dtype=torch.int64, device=ids.device).scatter_add_(
            1, ids, torch.ones_like(ids)
        )

    def balance_loss(self, *, loads_ME: Tensor | None = None, tokens: int | None = None) -> Tensor:
        """Load-balancing loss, fp32 `[]`: E * sum over experts of (pairs given / tokens) * (mean probability).

        Equations 4 to 6 of the Switch Transformer (Fedus et al. 2021), over the tokens of all MoE layers together, as
        transformers computes it; K when perfectly balanced. A sigmoid router's probabilities are its scores divided by
        their sum (DeepSeek-V3, arXiv 2412.19437, equation 19). It is of this forward pass: the losses of micro-batches
        do not add up to that of their union, unless each is given the union's `loads_ME` and number of `tokens` fed. So
        do those of parts of the layers: `loads_ME` is then of all layers.
        """
        self._need()
        logits_NE = torch.cat(self._logits_TE)
        layers, experts = len(self._logits_TE if loads_ME is None else loads_ME), logits_NE.shape[1]
        count = max(logits_NE.shape[0] if tokens is None else layers * tokens, 1)
        share_E = (self.loads() if loads_ME is None else loads_ME).sum(0) / count
        probability_E = torch.softmax(logits_NE, -1).sum(0) / count
        return experts * (share_E * probability_E).sum()

    def _need(self) -> None:
        if not self._ids_TK:
            raise ModelError("the router tape is empty: no forward pass recorded on it, or the model has no experts")


class Router(nn.Module):
    """Softmax top-K over experts; gpt-oss's adds a bias to the logits."""

    def __init__(self, config: ModelConfig, device: torch.device | str) -> None:
        super().__init__()
        self.top_k, self.renormalise = config.top_k, config.renormalise
        self.weight = nn.Parameter(torch.empty(config.experts, config.dim, dtype=torch.float32, device=device))
        biased = FAMILIES[config.family].oss
        self.bias = nn.Parameter(torch.empty_like(self.weight[:, 0])) if biased else None

    def forward(self, x_TD: Tensor, tape: Tape | None) -> tuple[Tensor, Tensor]:
        """`[T, D]` -> expert ids int64 `[T, K]`, best first, and their weights fp32 `[T, K]`."""
        if kernels_serve(x_TD) and self.bias is None and (tape is None or tape.chosen() is None):
            return self._routed(x_TD, tape)
        logits_TE = linear(cast(x_TD, torch.float32), self.weight, self.bias)
        scores_TE = logits_TE if self.renormalise else logits_TE.softmax(-1)
        if tape is None:
            weights_TK, ids_TK = scores_TE.topk(self.top_k)
        else:  # one way to the weights, whoever chose: a pass and its repetition must keep the same tensors
            chosen_TK = tape.chosen()
            ids_TK = scores_TE.detach().topk(self.top_k).indices if chosen_TK is None else chosen_TK
            weights_TK = scores_TE.gather(1, ids_TK)
            tape.record(ids_TK, logits_TE)
        # A softmax over the chosen is the renormalised softmax over all.
        return ids_TK, weights_TK.softmax(-1) if self.renormalise else weights_TK

    def _routed(self, x_TD: Tensor, tape: Tape | None) -> tuple[Tensor, Tensor]:
        from contraflow.model import kernels_tokens

        routed = kernels_tokens.route(x_TD, self.weight, self.top_k, renormalise=self.renormalise)
        if tape is not None:
            tape.record(routed.ids_TK, routed.logits_TE)
        return routed.ids_TK, routed.weights_TK
