"""Which experts a token goes to, and a tape that remembers it.

The router is a softmax over experts in fp32, its top K kept, renormalised or not; `sigmoid_router` is another. The tape
records a forward pass, and may hold the experts that it shall take (routing replay, arXiv 2510.11370): weights are then
the router's own of those experts, and gradients reach it. Neither moves tokens (`dispatch/` does).

Shape letters: T tokens, D width, E experts, K experts per token, M MoE layers.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from contraflow.errors import ModelError
from contraflow.model.arithmetic import Computing
from contraflow.model.families import ModelConfig
from contraflow.model.kinds import FAMILIES
from contraflow.model.ops import cast, kernels_serve


class Given(NamedTuple):
    """Experts that a forward pass shall take, for those of its tokens that have any; the others choose."""

    ids_TMK: Tensor  # uint8 or int16 (the bits of uint16), first choice first; anything where `known_T` is False
    known_T: Tensor  # bool

    def rows(self, first: int, last: int) -> "Given":
        """Of MoE layers `[first, last)` only, for a part of the layers."""
        return Given(self.ids_TMK[:, first:last], self.known_T)

    def layer(self, place: int) -> Tensor:
        """Of one MoE layer: int64 `[T, K]`."""
        ids_TK = self.ids_TMK[:, place].long()
        return ids_TK if self.ids_TMK.dtype == torch.uint8 else ids_TK & 0xFFFF


class Tape(Protocol):
    """What a router asks where its tokens go, and tells what it saw."""

    @property
    def free(self) -> bool:
        """Whether every token goes where the router would send it."""
        ...

    def take(self, choose: Callable[[], Tensor]) -> Tensor:
        """Expert ids `[T, K]` to go to; `choose()` gives the router's own. Called by each router, in layer order."""
        ...

    def record(self, ids_TK: Tensor, logits_TE: Tensor) -> None:
        """Called by each router, in layer order."""
        ...


class RouterTape:
    """The routing of one forward pass, layer by layer; of `given` experts where there are any.

    Invariant: holds one entry per MoE layer of exactly one forward pass; a used tape is refused by the decoder.
    """

    def __init__(self, given: Given | None = None) -> None:
        self._given = given
        self._ids_TK: list[Tensor] = []
        self._logits_TE: list[Tensor] = []
        self._differing_3: list[Tensor] = []

    @property
    def used(self) -> bool:
        return bool(self._ids_TK)

    @property
    def free(self) -> bool:
        """See `Tape.free`."""
        return self._given is None

    def take(self, choose: Callable[[], Tensor]) -> Tensor:
        """See `Tape.take`; notes how many tokens would have gone elsewhere."""
        own_TK = choose()
        if self._given is None:
            return own_TK
        ids_TK = self._given.layer(len(self._ids_TK))
        self._differing_3.append(_differing(own_TK, ids_TK, self._given.known_T))
        return torch.where(self._given.known_T.unsqueeze(1), ids_TK, own_TK)

    def record(self, ids_TK: Tensor, logits_TE: Tensor) -> None:
        """See `Tape.record`."""
        self._ids_TK.append(ids_TK)
        self._logits_TE.append(logits_TE)

    def differing(self) -> Tensor:
        """By layer, int64 `[M, 3]`: tokens that were given experts; those of them that the router would have sent to
        another set of experts; and to another first choice. Zeros where nothing was given."""
        self._need()
        if not self._differing_3:
            return torch.zeros(len(self._ids_TK), 3, dtype=torch.int64, device=self._ids_TK[0].device)
        return torch.stack(self._differing_3)

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
        transformers computes it; K when perfectly balanced. Where experts were given, pairs are those given and
        probabilities the router's own. A sigmoid router's probabilities are its scores divided by
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


class Router(Computing):
    """Softmax top-K over experts; gpt-oss's adds a bias to the logits."""

    def __init__(self, config: ModelConfig, device: torch.device | str) -> None:
        super().__init__()
        self.top_k, self.renormalise = config.top_k, config.renormalise
        self.weight = nn.Parameter(torch.empty(config.experts, config.dim, dtype=torch.float32, device=device))
        biased = FAMILIES[config.family].oss
        self.bias = nn.Parameter(torch.empty_like(self.weight[:, 0])) if biased else None

    def forward(self, x_TD: Tensor, tape: Tape | None) -> tuple[Tensor, Tensor]:
        """`[T, D]` -> expert ids int64 `[T, K]`, best first, and their weights fp32 `[T, K]`."""
        if kernels_serve(x_TD) and self.bias is None and (tape is None or tape.free):
            return self._routed(x_TD, tape)
        do = self.arithmetic
        logits_TE = do.linear(cast(x_TD, torch.float32), self.weight, self.bias)
        scores_TE = logits_TE if self.renormalise else do.softmax(logits_TE)
        if tape is None:
            weights_TK, ids_TK = scores_TE.topk(self.top_k)
        else:  # one way to the weights, whoever chose: a pass and its repetition must keep the same tensors
            ids_TK = tape.take(lambda: scores_TE.detach().topk(self.top_k).indices)
            weights_TK = scores_TE.gather(1, ids_TK)
            tape.record(ids_TK, logits_TE)
        # A softmax over the chosen is the renormalised softmax over all.
        return ids_TK, do.softmax(weights_TK) if self.renormalise else weights_TK

    def _routed(self, x_TD: Tensor, tape: Tape | None) -> tuple[Tensor, Tensor]:
        from contraflow.model import kernels_tokens

        routed = kernels_tokens.route(x_TD, self.weight, self.top_k, renormalise=self.renormalise)
        if tape is not None:
            tape.record(routed.ids_TK, routed.logits_TE)
        return routed.ids_TK, routed.weights_TK


def _differing(own_TK: Tensor, given_TK: Tensor, known_T: Tensor) -> Tensor:
    """See `RouterTape.differing`, of one layer: `[3]`."""
    other_T = own_TK.sort(1).values.ne(given_TK.sort(1).values).any(1)
    first_T = own_TK[:, 0].ne(given_TK[:, 0])
    return torch.stack([known_T, other_T & known_T, first_T & known_T]).sum(1)
