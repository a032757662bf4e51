"""Repetition: how much of an answer is n-grams that it has had before, which nears 1 when a model runs in circles.

Takes the tokens of one answer, gives a share. Pure. Shape letters: N tokens, n of an n-gram.
"""

from typing import Any

import numpy as np

NGRAM = 4  # tokens; rep-4 of Welleck et al. 2019 (arXiv 1908.04319, section 6.1)


def repeated_share(tokens_N: np.ndarray[Any, np.dtype[Any]], n: int = NGRAM) -> float:
    """`1 - distinct n-grams / n-grams`, in [0, 1); 0 of fewer than n tokens."""
    count = tokens_N.size - n + 1
    if count < 1:
        return 0.0
    grams_Nn = np.lib.stride_tricks.sliding_window_view(np.ascontiguousarray(tokens_N), n)
    return 1.0 - len(np.unique(grams_Nn, axis=0)) / count
