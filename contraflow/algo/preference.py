"""How likely one answer is preferred to another, given a number for each: the Bradley-Terry model.

Takes rewards of pairs, gives a loss. Pure. Shape letter: P pairs.
"""

import torch.nn.functional as F
from torch import Tensor


def bradley_terry_loss(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor) -> Tensor:
    """`-log sigmoid(chosen - rejected - margin)` by pair, `[P]`: how surprising the preferences are (1952).

    The margin, 0 where none is known, asks for more distance between answers that differ more (Llama 2, 2307.09288,
    equation 2).
    """
    return -F.logsigmoid(chosen_P - rejected_P - margin_P)
