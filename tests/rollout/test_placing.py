"""When experts are placed anew: every few refreshes that were accepted, from all that was measured in between."""

import pytest
import torch

from contraflow.dispatch.placement import Sizes, contiguous, imbalance, place
from contraflow.rollout.placing import Placer

SIZES = Sizes(experts=4, ranks=2, slots=3, domain_ranks=2)
HOT = torch.tensor([[90, 5, 4, 1], [1, 2, 3, 94]])
NOTHING = torch.zeros(2, 4, dtype=torch.int64)


def test_experts_lie_in_order_until_something_was_measured() -> None:
    placer = Placer(SIZES, 2, every=1)
    for _ in range(3):
        proposed = placer.propose(NOTHING)
        assert proposed is placer.served
        placer.accept(proposed)
    assert [p.experts_P.tolist() for p in placer.served] == [contiguous(SIZES).experts_P.tolist()] * 2
    assert placer.placed == 0


def test_every_third_refresh_places_by_all_that_was_measured_since_the_last_time() -> None:
    placer, moved = Placer(SIZES, 2, every=3), []
    for refresh in range(9):
        proposed = placer.propose(HOT if refresh < 6 else HOT.flip(1))
        moved.append(proposed is not placer.served)
        if moved[-1]:
            wanted = place(3 * (HOT if refresh < 6 else HOT.flip(1)), SIZES)
            assert [p.experts_P.tolist() for p in proposed] == [p.experts_P.tolist() for p in wanted]
        placer.accept(proposed)
    assert moved == [False, False, True] * 3
    assert placer.placed == 3


def test_a_version_that_is_refused_leaves_everything_as_it_was_and_the_next_one_is_placed_instead() -> None:
    placer = Placer(SIZES, 2, every=1)
    before = placer.served
    refused = placer.propose(HOT)
    assert placer.served is before
    again = placer.propose(HOT)
    assert [p.experts_P.tolist() for p in again] == [p.experts_P.tolist() for p in refused]
    placer.accept(again)
    assert placer.served is again
    assert placer.placed == 1


def test_imbalance_is_told_before_and_after_on_the_same_loads() -> None:
    placer = Placer(SIZES, 2, every=1)
    placer.accept(placer.propose(HOT))
    before = sum(imbalance(loads, contiguous(SIZES)) for loads in HOT) / 2
    after = sum(imbalance(loads, of) for loads, of in zip(HOT, placer.served, strict=True)) / 2
    assert (placer.imbalance, placer.promised) == (pytest.approx(before), pytest.approx(after))
    assert placer.in_order == placer.imbalance
    placer.accept(placer.propose(HOT))
    assert (placer.in_order, placer.imbalance) == (pytest.approx(before), pytest.approx(after))
    assert before > 1.9
    assert after < 1.1
