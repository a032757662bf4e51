"""A model spread over ranks trains as on one: losses, loads, every gradient, and weights after three updates."""

import itertools
from pathlib import Path

import pytest

from contraflow.config import Parallel
from tests.dispatch import gloo
from tests.parallel.equal import MODELS, alone, difference, make_folder, on_ranks

pytestmark = pytest.mark.timeout(300)  # several processes; on a busy machine they wait for each other
TWO = [Parallel(dp=2), Parallel(dp=2, ep=2), Parallel(tp=2), Parallel(tp=2, ep=2)]
FOUR = [
    Parallel(dp=4),
    Parallel(dp=4, ep=4),
    Parallel(dp=4, ep=2),
    Parallel(dp=2, tp=2),
    Parallel(dp=2, tp=2, ep=2),
    Parallel(dp=2, tp=2, ep=4),
    Parallel(dp=4, ep=4, dispatch="hierarchical", domain_ranks=2),
    Parallel(dp=4, ep=2, dispatch="per_expert"),
]


def check(cases, tmp_path, world, layers=3, routed=False):
    folders = {family: make_folder(family, tmp_path, layers) for family in {family for _, family in cases}}
    wanted = {family: alone(folder, routed) for family, folder in folders.items()}
    by_rank = gloo.run(on_ranks, world, tmp_path, [(p, folders[family]) for p, family in cases], tmp_path, routed)
    for place, (parallel, family) in enumerate(cases):
        want, where = wanted[family], f"{family}, {parallel!r}"
        for seen in (answers[place] for answers in by_rank):
            assert seen.losses == pytest.approx(want.losses, rel=1e-5), where
            assert seen.balances == pytest.approx(want.balances, rel=1e-5), where
            assert seen.norms == pytest.approx(want.norms, rel=1e-5), where
            assert seen.loads == want.loads, where
            assert seen.differing == want.differing, where
        for kind in ("gradient", "weights"):
            found, known = (getattr(one, kind) for one in (by_rank[0][place], want))
            assert found.keys() == known.keys(), where
            for name in known:
                assert difference(found[name], known[name]) <= 1e-5, (where, kind, name)


def fits(parallel: Parallel, family: str) -> bool:
    """Whether the test's model of that family can be spread like this."""
    if family in ("deepseek_v3", "gpt_oss") and parallel.tp > 1:
        return False
    return parallel.ep * parallel.pp == 1 if family == "qwen3" else MODELS[family]["experts"] >= 2 * parallel.ep


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    data, experts, heads, both = TWO
    cases = [(data, "olmoe"), (experts, "qwen3_moe"), (heads, "qwen3"), (heads, "olmoe"), (both, "qwen3_moe")]
    cases += [(experts, "deepseek_v3"), (both, "glm4_moe"), (experts, "gpt_oss")]
    check(cases, tmp_path, 2)


def test_four_ranks_with_dp_tp_and_ep_at_once_train_as_one(tmp_path: Path) -> None:
    check([(Parallel(dp=2, tp=2, ep=4), "olmoe")], tmp_path, 4)


@pytest.mark.slow
def test_two_ranks_train_as_one_whatever_the_family(tmp_path: Path) -> None:
    check([case for case in itertools.product(TWO, MODELS) if fits(*case)], tmp_path, 2)


@pytest.mark.slow
def test_four_ranks_train_as_one(tmp_path: Path) -> None:
    check([case for case in itertools.product(FOUR, MODELS) if fits(*case)], tmp_path, 4)
