"""Versions laid out as Hugging Face folders, for servers that load weights from a path.

Takes tensors by the decoder's names, gives a folder. In shared memory unless told otherwise: as much memory as the
weights in their own precision, twice while one version replaces another. Does not know servers.
"""

import os
import secrets
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor

from contraflow.errors import CarrierError, ModelError
from contraflow.model.families import ModelConfig
from contraflow.model.folder import copy_companions, write_folder
from contraflow.parallel.pieces import shapes
from contraflow.types import Version
from contraflow.weights.manifest import check_tensors
from contraflow.weights.memory import own, shared_folder, sweep


class Releases:
    """Folders of one engine, inside one that only this process uses and a later run sweeps if it is killed."""

    def __init__(self, config: ModelConfig, source: Path, root: Path | None = None) -> None:
        """`source`: the model folder whose tokenizer files go along. `root`: where; None is this host's memory."""
        self._config, self._source, self._shapes = config, source, shapes(config)
        self._place = (root or shared_folder()) / f"contraflow-served-{secrets.token_hex(8)}"
        self._lock: int | None = None

    def write(self, version: Version, tensors: Mapping[str, Tensor]) -> Path:
        """Lay out a version; the folder is whole when this returns. May run on any thread, one call at a time.

        Raises: CarrierError when a tensor is missing, surplus or misshapen, or there is no room.
        """
        check_tensors(tensors, self._shapes, f"version {version}")
        if self._lock is None:
            self._lock = own(self._place)
            if self._place.parent == shared_folder():
                sweep(shared_folder())  # a folder that other machines see is left: their locks are not seen here
        folder = self._place / f"{version}-{secrets.token_hex(4)}"
        try:
            write_folder(self._config, ((name, tensors[name]) for name in self._shapes), folder)
            copy_companions(self._source, folder)
        except (ModelError, OSError) as fault:
            shutil.rmtree(folder, ignore_errors=True)
            raise CarrierError(f"version {version} cannot be laid out for its servers: {fault}") from fault
        return folder

    def keep(self, folders: Collection[Path]) -> None:
        """Remove all but these."""
        for folder in self._place.iterdir() if self._lock is not None else ():
            if folder not in folders:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove everything. Safe to call twice."""
        if self._lock is not None:
            shutil.rmtree(self._place, ignore_errors=True)
            os.close(self._lock)
            self._lock = None
