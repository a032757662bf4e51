"""Moves weight versions from the trainer to engines, each with a manifest and two proofs that it arrived."""

import os
from pathlib import Path

from contraflow.blobs import open_blobs
from contraflow.config import Weights
from contraflow.weights.blob import BlobCarrier
from contraflow.weights.carrier import Carrier, check_run_id, derive_run_id
from contraflow.weights.delta_carrier import DeltaCarrier
from contraflow.weights.memory import MemoryCarrier, shared_folder

MOST_LANES = 8  # hashing chunks side by side: beyond this, memory and not the hash sets the pace


def open_carrier(section: Weights, run_folder: Path, *, run_id: str | None = None) -> Carrier:
    """The carrier a recipe asks for. Publisher and readers of a run must give the same `run_id`.

    `run_id` keeps apart the runs that share a machine or a bucket; left out, it is derived from the folder's full path.

    >>> carrier = open_carrier(recipe.weights, run_folder)
    """
    name = check_run_id(derive_run_id(run_folder) if run_id is None else run_id)
    inner: Carrier
    if section.carrier == "memory":
        inner = MemoryCarrier(shared_folder(), name, lanes=min(os.cpu_count() or 1, MOST_LANES))
    else:
        inner = BlobCarrier(open_blobs(section.url or str(run_folder / "weights")), name)
    return inner if section.full_every == 1 else DeltaCarrier(inner, section.full_every)
