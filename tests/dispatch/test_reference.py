"""The reference form sees what the fast ones cannot."""

import pytest
import torch

from contraflow.dispatch.reference import ReferenceDispatch
from contraflow.errors import DispatchError


@pytest.mark.parametrize("stray", [-2, 3])
def test_expert_ids_out_of_range_are_refused(stray: int) -> None:
    with pytest.raises(DispatchError, match=rf"\[{stray}\]"):
        ReferenceDispatch(3).dispatch(torch.ones(1, 2), torch.tensor([[0, stray]]), torch.ones(1, 2))
