"""`token_logprobs` for hidden states in bf16, at the speed of bf16 matrix units and nearly the precision of fp32.

Each fp32 weight of the head is taken as the sum of two bf16 numbers, 16 bits of its 24, and both are multiplied with
the hidden states in one product: a bf16 times a bf16 is exact in fp32, where they are added up. So a logit is off by
2^-16 of its terms at most, where TF32 would be off by 2^-11. The gradients of logits are rounded to bf16, by 2^-8 at
most, before they are multiplied, as those of all other matmuls in bf16 compute are.

Shape letters: T tokens, D width, V vocabulary, C tokens of a chunk.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contraflow.compiled import compiled

CHUNK_LOGITS = 1 << 27  # logits held at once: half a GiB, so that adding up the head's gradient is a small part of all


class Stats(NamedTuple):
    """fp32 `[C]` each, of `softmax(logits / temperature)`: log-probability of the target, entropy, log of the sum."""

    logprob_C: Tensor
    entropy_C: Tensor
    lse_C: Tensor


def stats(logits_CV: Tensor, targets_C: Tensor, temperature: float) -> Stats:
    """What is kept of a chunk's logits."""
    scaled_CV = logits_CV if temperature == 1.0 else logits_CV / temperature
    lse_C = scaled_CV.logsumexp(-1)
    all_CV = scaled_CV - lse_C[:, None]
    logprob_C = all_CV.gather(1, targets_C[:, None])[:, 0]
    return Stats(logprob_C, -(all_CV.exp() * all_CV).sum(-1), lse_C)


def pull(
    logits_CV: Tensor, targets_C: Tensor, of: Stats, by_logprob_C: Tensor, by_entropy_C: Tensor, temperature: float
) -> Tensor:
    """Gradient of the logits, bf16 `[C, V]`: d logprob = onehot - p;  d entropy = -p (log p + entropy)."""
    scaled_CV = logits_CV if temperature == 1.0 else logits_CV / temperature
    all_CV = scaled_CV - of.lse_C[:, None]
    drawn_CV = all_CV.exp() * (by_logprob_C[:, None] + by_entropy_C[:, None] * (all_CV + of.entropy_C[:, None]))
    hit_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == targets_C[:, None]
    return ((torch.where(hit_CV, by_logprob_C[:, None], 0.0) - drawn_CV) / temperature).bfloat16()


class SplitLogprobs(torch.autograd.Function):
    """Log-probabilities and entropies, fp32 `[T]` each, from hidden bf16 `[T, D]` and head fp32 `[V, D]`.

    With `fuse`, what is done to logits is compiled: one kernel that reads them, where there were ten.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, head_VD: Tensor, targets_T: Tensor, temperature: float, size: int, fuse: bool
    ) -> tuple[Tensor, Tensor]:
        halves_V2D = halves(head_VD)
        kept = [hidden_TD.new_empty(hidden_TD.shape[0], dtype=torch.float32) for _ in range(3)]
        for here in _chunks(hidden_TD.shape[0], size):
            found = compiled(stats, fuse)(split_logits(hidden_TD[here], halves_V2D), targets_T[here], temperature)
            for whole_T, part_C in zip(kept, found, strict=True):
                whole_T[here] = part_C
        ctx.save_for_backward(hidden_TD, halves_V2D, targets_T, *kept)
        ctx.temperature, ctx.size, ctx.fuse = temperature, size, fuse
        return kept[0], kept[1]

    @staticmethod
    def backward(ctx: Any, by_logprob_T: Tensor, by_entropy_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, halves_V2D, targets_T, *kept = ctx.saved_tensors
        high_VD = halves_V2D[:, : hidden_TD.shape[1]]
        grad_hidden_TD = torch.empty_like(hidden_TD)
        grad_head_VD = torch.zeros_like(high_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for here in _chunks(hidden_TD.shape[0], ctx.size):
            grad_CV = compiled(pull, ctx.fuse)(
                split_logits(hidden_TD[here], halves_V2D),
                targets_T[here],
                Stats(*(whole_T[here] for whole_T in kept)),
                by_logprob_T[here],
                by_entropy_T[here],
                ctx.temperature,
            )
            grad_hidden_TD[here] = grad_CV @ high_VD
            if grad_head_VD is not None:
                grad_head_VD += _product(grad_CV.t(), hidden_TD[here])
        return grad_hidden_TD, grad_head_VD, None, None, None, None


def _chunks(tokens: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` tokens whose sizes differ by at most one."""
    count = -(-tokens // size)
    return (slice(tokens * i // count, tokens * (i + 1) // count) for i in range(count))


@torch.no_grad()
def halves(head_VD: Tensor, out: Tensor | None = None) -> Tensor:
    """bf16 `[V, 2D]`: the fp32 weights rounded, and what that lost; written to `out`, if given."""
    width = head_VD.shape[1]
    out = head_VD.new_empty(head_VD.shape[0], 2 * width, dtype=torch.bfloat16) if out is None else out
    high_VD, low_VD = out.split(width, 1)
    high_VD.copy_(head_VD)
    low_VD.copy_(head_VD - high_VD)
    return out


def split_logits(hidden_CD: Tensor, halves_V2D: Tensor) -> Tensor:
    """fp32 `[C, V]` from hidden states in bf16 and what `halves` gave."""
    return _product(torch.cat([hidden_CD, hidden_CD], 1), halves_V2D.t())


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of two bf16 matrices, added up and given in fp32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
