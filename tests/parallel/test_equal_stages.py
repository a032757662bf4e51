"""Layers over ranks, tokens of a sequence over ranks, activations computed twice: it trains as on one rank."""

import itertools
from pathlib import Path

import pytest

from contraflow.config import Parallel
from tests.parallel.equal import MODELS
from tests.parallel.test_equal import check, fits

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
@pytest.mark.timeout(600)
def test_two_ranks_train_as_one_whatever_the_family(tmp_path: Path) -> None:
    check([case for case in itertools.product(TWO, MODELS) if fits(*case)], tmp_path, 2, layers=5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_ranks_train_as_one_whatever_the_family(tmp_path: Path) -> None:
    check([case for case in itertools.product(FOUR, MODELS) if fits(*case)], tmp_path, 4, layers=5)


@pytest.mark.slow
def test_four_ranks_of_two_stages_each_train_as_one(tmp_path: Path) -> None:
    check([(Parallel(pp=4, **INTERLEAVED), "qwen3_moe")], tmp_path, 4, layers=9)
