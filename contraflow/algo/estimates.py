"""What a number of sampled answers says about a model: pass@k and means, with intervals by the bootstrap over tasks.

Takes counts and scores per task, gives estimates; every draw comes from the seed that is passed in. Pure; no model.
Shape letters: N tasks, M measures of each, R resamples.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from contraflow.errors import ConfigError

Float64 = np.ndarray[Any, np.dtype[np.float64]]
LEVEL = 0.95  # share of resamples inside an interval
RESAMPLES = 4000
_CELLS = 1 << 22  # values drawn at a time


class Interval(NamedTuple):
    """A mean over tasks, and the middle `LEVEL` of the means of resampled tasks."""

    mean: float
    low: float
    high: float

    def told(self) -> str:
        """For people."""
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def pass_at_k(right_N: Sequence[int], *, samples: int, k: int) -> Float64:
    """Probability that one of `k` answers is right, per task, float64 `[N]`: unbiased from `samples` >= k answers.

    `1 - C(samples - right, k) / C(samples, k)` as a product (Chen et al. 2021, "Evaluating Large Language Models
    Trained on Code", equation 1). Raises ConfigError when k or a count does not fit `samples`.
    """
    right = np.asarray(right_N, np.int64)
    if not 1 <= k <= samples:
        raise ConfigError(f"pass@{k} of {samples} samples a task: k has to be in [1, {samples}]")
    if right.size and (right.min() < 0 or right.max() > samples):
        raise ConfigError(f"between {right.min()} and {right.max()} right answers of {samples} samples a task")
    wrong_N1 = (samples - right)[:, None]
    drawn_k = np.arange(k)
    left_Nk = np.clip((wrong_N1 - drawn_k) / (samples - drawn_k), 0.0, None)
    return np.asarray(1.0 - left_Nk.prod(1), np.float64)


def intervals(values_NM: Float64, *, seed: int) -> list[Interval]:
    """Mean of each measure over tasks, with its percentile bootstrap interval (Efron 1979).

    Tasks are drawn whole: their measures stay together, and so do the samples behind them. One task tells nothing of
    its spread: the interval is then the value itself. Raises ConfigError when there is no task.
    """
    means_RM = _resampled(values_NM, seed)
    tail = 100 * (1 - LEVEL) / 2
    low_M, high_M = np.percentile(means_RM, [tail, 100 - tail], axis=0)
    return [Interval(*map(float, three)) for three in zip(values_NM.mean(0), low_M, high_M, strict=True)]


def paired(before_NM: Float64, after_NM: Float64, *, seed: int) -> list[Interval]:
    """Mean difference `after - before` of each measure on the same tasks, with its interval: tasks are drawn in pairs.

    What tasks differ in cancels, so it is narrower than the two intervals apart. Raises ConfigError when the two are
    not of the same tasks and measures.
    """
    if before_NM.shape != after_NM.shape:
        raise ConfigError(f"{before_NM.shape} and {after_NM.shape} (tasks, measures) cannot be compared in pairs")
    return intervals(after_NM - before_NM, seed=seed)


def _resampled(values_NM: Float64, seed: int) -> Float64:
    """Means `[R, M]` of resampled tasks."""
    count, measures = values_NM.shape
    if not count:
        raise ConfigError("an estimate needs at least one task")
    draws = np.random.default_rng(seed % 2**64)
    means_RM = np.empty((RESAMPLES, measures))
    chunk = max(1, _CELLS // (count * max(1, measures)))
    for start in range(0, RESAMPLES, chunk):
        rows = min(chunk, RESAMPLES - start)
        means_RM[start : start + rows] = values_NM[draws.integers(0, count, (rows, count))].mean(1)
    return means_RM
