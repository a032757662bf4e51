"""Ranks that were told different things hear which, whatever order its parts come in."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from contraflow.dispatch.exchange import agree
from contraflow.errors import DispatchError


def links_of(theirs: dict[str, Any]) -> Any:
    """Two ranks of which this is the first; the other says `theirs`."""
    return SimpleNamespace(rank=0, gather=lambda mine: [mine, json.dumps(theirs, sort_keys=True)])


def test_the_key_that_differs_is_named_and_not_one_whose_parts_lie_in_another_order() -> None:
    mine = {"launch": {"nodes": 1, "all_to_all": "auto"}, "rate": 0.001}
    agree(links_of({"rate": 0.001, "launch": {"all_to_all": "auto", "nodes": 1}}), mine)
    with pytest.raises(DispatchError, match=r"disagree on rate: rank 0 has 0.001, rank 1 has 0.002"):
        agree(links_of(mine | {"rate": 0.002}), mine)
    with pytest.raises(DispatchError, match=r"disagree on extra: rank 0 has None, rank 1 has 3"):
        agree(links_of(mine | {"extra": 3}), mine)
