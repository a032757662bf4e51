"""A dispatch that changes its form by phase is, in every phase, the form of that phase."""

import pytest
import torch

from contraflow.dispatch.base import Phase
from contraflow.dispatch.domains import Topology, Traffic
from contraflow.dispatch.exchange import Links
from contraflow.dispatch.open import open_dispatch
from contraflow.dispatch.phased import Phased
from contraflow.dispatch.split import SplitTokens
from contraflow.dispatch.virtual import VirtualWorld
from tests.dispatch.mixture import Seen, check, make_case, run_rank

PHASES: dict[Phase, str] = {"prefill": "per_expert", "decode": "hierarchical"}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("wrapped", [False, True])
def test_each_phase_is_carried_by_its_form(phase: Phase, wrapped: bool) -> None:
    case = make_case([6, 4, 9, 2], experts=8, choices=3, dim=8, seed=4)

    def work(links: Links) -> tuple[Seen, Traffic, Traffic]:
        forms = {name: open_dispatch(kind, links, experts=8) for name, kind in PHASES.items()}
        dispatch = Phased(forms)
        whole = SplitTokens(dispatch, links.exchange([links.rank])) if wrapped else dispatch
        whole.enter(phase)
        links.traffic.take()
        seen = run_rank(whole, case, links.rank, 4)
        counted = links.traffic.take()
        run_rank(forms[phase], case, links.rank, 4)
        return seen, counted, links.traffic.take()

    found = VirtualWorld(Topology.even(4, 2)).run(work)
    check(case, [seen for seen, _, _ in found], rtol=1e-5, atol=2e-5)
    assert all(counted == alone for _, counted, alone in found)


def test_rows_come_home_the_way_they_went_out_whatever_phase_it_is_then() -> None:
    def work(links: Links) -> torch.Tensor:
        dispatch = Phased({name: open_dispatch(kind, links, experts=2) for name, kind in PHASES.items()})
        rows = dispatch.dispatch(torch.ones(3, 4), torch.tensor([[0, 1]] * 3), torch.ones(3, 2))
        dispatch.enter("decode")
        return dispatch.combine(rows.x_RD, rows.handle)

    for out in VirtualWorld(Topology.even(2, 1)).run(work):
        assert torch.equal(out, torch.full((3, 4), 2.0))
