"""Log-probabilities of given tokens, and entropies, straight from hidden states: the logits of all tokens never exist.

Works through chunks of tokens and computes their logits again in the backward pass, so memory is that of one chunk.

Shape letters: T tokens, D width, V vocabulary, C tokens of a chunk.
"""

from typing import Any

import torch
from torch import Tensor

from contraflow.errors import ModelError
from contraflow.model import splithead

CHUNK_LOGITS = 1 << 24  # logits held at once when no chunk is given: 64 MiB


def token_logprobs(
    hidden_TD: Tensor,
    head_VD: Tensor,
    targets_T: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    split: bool = False,
    fuse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under `softmax(hidden @ head.T / temperature)`, and that softmax's entropy (nats).

    Args: `hidden_TD` any float dtype, used in fp32; `head_VD` fp32; `targets_T` int64; `chunk` tokens at a time;
    `split`, for hidden states in bf16, computes as `splithead` says instead of in fp32, and `fuse` compiles that.
    Gives: two fp32 `[T]`, differentiable in `hidden_TD` and `head_VD`.
    Raises: ModelError when shapes do not fit, or the temperature is not above 0.
    """
    if hidden_TD.ndim != 2 or targets_T.shape != hidden_TD.shape[:1] or head_VD.shape[1:] != hidden_TD.shape[1:]:
        raise ModelError(
            f"hidden {list(hidden_TD.shape)}, head {list(head_VD.shape)} and targets {list(targets_T.shape)} "
            "must be [T, D], [V, D] and [T]"
        )
    if not temperature > 0:
        raise ModelError(f"temperature {temperature} must be above 0; greedy log-probabilities are those of 1")
    if split:
        if hidden_TD.dtype != torch.bfloat16:
            raise ModelError(f"hidden states are {hidden_TD.dtype}: only bfloat16 ones meet a head in two halves")
        size = chunk or max(splithead.CHUNK_LOGITS // head_VD.shape[0], 1)
        logprobs_T, entropy_T = splithead.SplitLogprobs.apply(hidden_TD, head_VD, targets_T, temperature, size, fuse)  # type: ignore[no-untyped-call]
        return logprobs_T, entropy_T
    size = chunk or max(CHUNK_LOGITS // head_VD.shape[0], 1)
    logprobs_T, entropy_T = TokenLogprobs.apply(hidden_TD, head_VD, targets_T, temperature, size)  # type: ignore[no-untyped-call]
    return logprobs_T, entropy_T


class TokenLogprobs(torch.autograd.Function):
    """See `token_logprobs`, `size` tokens at a time."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, head_VD: Tensor, targets_T: Tensor, temperature: float, size: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_TD, head_VD, targets_T)
        ctx.temperature, ctx.size = temperature, size
        logprobs_T = hidden_TD.new_empty(hidden_TD.shape[0], dtype=torch.float32)
        entropy_T = torch.empty_like(logprobs_T)
        for start in range(0, hidden_TD.shape[0], size):
            here = slice(start, start + size)
            all_CV = _log_softmax(hidden_TD[here], head_VD, temperature)
            logprobs_T[here] = all_CV.gather(1, targets_T[here, None])[:, 0]
            entropy_T[here] = -(all_CV.exp() * all_CV).sum(-1)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_logprob_T: Tensor, grad_entropy_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, head_VD, targets_T = ctx.saved_tensors
        grad_hidden_TD, grad_head_VD = torch.empty_like(hidden_TD), torch.zeros_like(head_VD)
        for start in range(0, hidden_TD.shape[0], ctx.size):
            here = slice(start, start + ctx.size)
            all_CV = _log_softmax(hidden_TD[here], head_VD, ctx.temperature)
            chances_CV = all_CV.exp()
            # d logprob / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)
            by_logprob, by_entropy = grad_logprob_T[here, None], grad_entropy_T[here, None]
            entropy_C1 = -(chances_CV * all_CV).sum(-1, keepdim=True)
            grad_CV = chances_CV.mul_(all_CV.add_(entropy_C1).mul_(by_entropy).add_(by_logprob)).neg_()
            grad_CV.scatter_add_(1, targets_T[here, None], by_logprob).div_(ctx.temperature)
            grad_hidden_TD[here] = grad_CV @ head_VD
            grad_head_VD.addmm_(grad_CV.t(), hidden_TD[here].float())
        return grad_hidden_TD, grad_head_VD, None, None, None


def _log_softmax(hidden_CD: Tensor, head_VD: Tensor, temperature: float) -> Tensor:
    logits_CV = hidden_CD.float() @ head_VD.t()
    return torch.log_softmax(logits_CV if temperature == 1.0 else logits_CV / temperature, -1)
