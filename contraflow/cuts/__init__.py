"""Cuts of a run as blobs: whole or unseen, verified when read, committed by the newest start of the run alone.

`space` has the cuts of a place, `lines` who may write there, `patience` calls to a store that fails now and then.
"""

from contraflow.cuts.space import (
    EARLIER,
    LANES,
    NAME,
    CutId,
    CutManifest,
    CutSpace,
    Newest,
    Part,
    cut_name,
    in_lanes,
    open_cuts,
    place,
)

__all__ = [
    "EARLIER",
    "LANES",
    "NAME",
    "CutId",
    "CutManifest",
    "CutSpace",
    "Newest",
    "Part",
    "cut_name",
    "in_lanes",
    "open_cuts",
    "place",
]
