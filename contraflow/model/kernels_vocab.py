"""A first look at logits over a large vocabulary, in one Triton kernel that reads them once.

Takes fp32 logits on a GPU, gives of each part of the vocabulary its largest logit and its mass, which is all that a
draw needs to know of the parts that it does not fall in. Draws nothing; imported when first needed.

Shape letters: B rows, V vocabulary, C parts of it.
"""

import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-1e30)
PARTS = 16  # that one program looks at


def survey(logits_BV: Tensor, scales_B: Tensor, part: int) -> tuple[Tensor, Tensor]:
    """fp32 `[B, C]` each, of parts of `part` tokens, a power of two: the largest logit, and the sum of
    `exp((logit - largest) * scale)`, in which NaN shows.
    """
    rows, vocab = logits_BV.shape
    parts = triton.cdiv(vocab, part)
    tops_BC, masses_BC = (logits_BV.new_empty(rows, parts) for _ in range(2))
    if rows:
        _survey[(triton.cdiv(parts, PARTS), rows)](
            logits_BV.contiguous(), scales_B, tops_BC, masses_BC, vocab, parts, part, PARTS, num_warps=4
        )
    return tops_BC, masses_BC


@triton.jit
def _survey(logits_BV, scales_B, tops_BC, masses_BC, vocab, parts, PART: tl.constexpr, PARTS: tl.constexpr):
    row = tl.program_id(1)
    part_C = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    token_CP = part_C[:, None] * PART + tl.arange(0, PART)[None, :]
    at_CP = logits_BV + row.to(tl.int64) * vocab + token_CP
    logits_CP = tl.load(at_CP, mask=token_CP < vocab, other=float("-inf"))
    tops_C = tl.max(logits_CP, 1)
    # Finite, so that a part of nothing has mass 0.
    over_CP = (logits_CP - tl.maximum(tops_C, LOWEST)[:, None]) * tl.load(scales_B + row)
    place_C = row.to(tl.int64) * parts + part_C
    tl.store(tops_BC + place_C, tops_C, mask=part_C < parts)
    tl.store(masses_BC + place_C, tl.sum(tl.exp(over_CP), 1), mask=part_C < parts)
