"""Opens the dispatch that was asked for: one place that knows all forms by name.

Takes links to the ranks that share out the experts; gives a `Dispatch`. Which form is best is `choose.py`'s.
"""

from typing import Any

import torch

from contraflow.dispatch.base import Dispatch
from contraflow.dispatch.deepep import DeepEPDispatch
from contraflow.dispatch.deepep_decode import DeepEPDecode
from contraflow.dispatch.exchange import Links
from contraflow.dispatch.local import LocalDispatch
from contraflow.dispatch.nvlink import NvlinkDispatch
from contraflow.dispatch.overlap import OverlapDispatch
from contraflow.dispatch.spread import SpreadDispatch
from contraflow.dispatch.wire import Wire
from contraflow.errors import DispatchError

KINDS = ("per_expert", "all_to_all", "hierarchical", "overlapped", "nvlink", "deepep", "deepep_decode")


def open_dispatch(
    kind: str,
    links: Links | None,
    *,
    experts: int,
    wire: Wire = "same",
    max_tokens: int | None = None,
    capacity: int | None = None,
    device: torch.device | str = "cpu",
) -> Dispatch[Any]:
    """The dispatch `kind` over `links`; local, whatever was asked for, when there is nobody to exchange with.

    Collective: every rank asks for the same. `auto` is hierarchical over several domains and all_to_all within one.
    Raises: DispatchError.
    """
    if links is None or links.topology.ranks == 1:
        return LocalDispatch(experts)
    if kind == "auto":
        kind = "hierarchical" if links.topology.count > 1 and links.topology.even_sized else "all_to_all"
    if kind not in KINDS:
        raise DispatchError(f"dispatch {kind!r} is not known; known are auto, {', '.join(KINDS)}")
    if kind == "deepep_decode":
        return DeepEPDecode(links, experts=experts, wire=wire, max_tokens=max_tokens)
    if kind in ("nvlink", "deepep"):
        if capacity is not None and max_tokens is not None and capacity < max_tokens:
            raise DispatchError(
                f"capacity {capacity} is below max_tokens {max_tokens}, but {kind} makes room for all tokens of a "
                "rank; leave capacity out for the exact form, or give max_tokens"
            )
        made = NvlinkDispatch if kind == "nvlink" else DeepEPDispatch
        return made(links, experts=experts, wire=wire, max_tokens=max_tokens, fixed=capacity is not None)
    spread = SpreadDispatch(
        links,
        experts=experts,
        kind="hierarchical" if kind == "overlapped" else kind,
        wire=wire,
        max_tokens=max_tokens,
        capacity=capacity,
        device=device,
    )
    return OverlapDispatch(spread) if kind == "overlapped" else spread
