"""Layers over ranks, tokens of a sequence over ranks, activations computed twice: it trains as on one rank."""

import itertools
from pathlib import Path

import pytest

from contraflow.config import Parallel
from tests.parallel.test_equal import check

INTERLEAVED = {"schedule": "interleaved"}
AGAIN = {"recompute": "layer"}
TWO = [
    Parallel(pp=2),
    Parallel(pp=2, **INTERLEAVED),
    Parallel(cp=2),
    Parallel(cp=2, ep=2),
    Parallel(pp=2, **INTERLEAVED, **AGAIN),
    Parallel(cp=2, ep=2, **AGAIN),
    Parallel(dp=2, ep=2, **AGAIN),
    Parallel(dp=2, **AGAIN),
    Parallel(tp=2, ep=2, **AGAIN),
]
FOUR = [
    Parallel(pp=4),
    Parallel(cp=4),
    Parallel(cp=4, ep=4),
    Parallel(cp=4, ep=2),
    Parallel(pp=2, dp=2, ep=2),
    Parallel(pp=2, dp=2, ep=2, **INTERLEAVED, **AGAIN),
    Parallel(pp=2, dp=2, **INTERLEAVED),
    Parallel(pp=2, tp=2, ep=2),
    Parallel(pp=2, cp=2, ep=2, **AGAIN),
    Parallel(cp=2, dp=2, ep=4),
    Parallel(cp=2, dp=2, ep=2, **AGAIN),
    Parallel(cp=2, tp=2, ep=2),
    Parallel(cp=2, tp=2, ep=4, **AGAIN),
]


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    stages, interleaved, context, experts, *_ = TWO
    cases = [(stages, "olmoe"), (interleaved, "qwen3_moe"), (context, "qwen3"), (experts, "olmoe")]
    check(cases, tmp_path, 2, layers=4)


def test_four_ranks_train_as_one_with_activations_computed_twice(tmp_path: Path) -> None:
    pipeline, context = Parallel(pp=2, dp=2, ep=2, **INTERLEAVED, **AGAIN), Parallel(cp=2, dp=2, ep=4, **AGAIN)
    check([(pipeline, "qwen3_moe"), (context, "olmoe")], tmp_path, 4, layers=4)


@pytest.mark.slow
def test_two_ranks_train_as_one_whatever_the_family(tmp_path: Path) -> None:
    check(_fitting(TWO), tmp_path, 2, layers=5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_ranks_train_as_one_whatever_the_family(tmp_path: Path) -> None:
    check(_fitting(FOUR), tmp_path, 4, layers=5)


@pytest.mark.slow
def test_four_ranks_of_two_stages_each_train_as_one(tmp_path: Path) -> None:
    check([(Parallel(pp=4, **INTERLEAVED), "qwen3_moe")], tmp_path, 4, layers=9)


def _fitting(layouts: list[Parallel]) -> list[tuple[Parallel, str]]:
    """Every family on every layout, but experts where there are some, and no tied embedding over stages."""
    every = itertools.product(layouts, ("qwen3_moe", "olmoe", "qwen3"))
    return [(p, f) for p, f in every if f != "qwen3" or p.ep * p.pp == 1]
