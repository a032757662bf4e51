"""Where workers live: `inline` (this process, deterministic), `local` (a process per worker on this machine) or `ray`
(a process per worker on any machine of a Ray cluster)."""

import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

from contraflow.errors import ConfigError
from contraflow.runtime.base import Runtime
from contraflow.telemetry import Clock


class RuntimeSection(Protocol):
    """The recipe's section `runtime`, as far as it is read here."""

    @property
    def kind(self) -> str: ...

    @property
    def threads(self) -> int: ...

    @property
    def hang_s(self) -> float: ...


def open_runtime(
    section: RuntimeSection,
    folder: Path,
    *,
    clock: Clock = time.monotonic,
    preload: Sequence[str] = (),
    gpu_pools: Collection[str] = (),
) -> Runtime:
    """The runtime a recipe asks for. `folder` is the run's; `preload` names modules that worker processes need.

    `gpu_pools`: those of which each worker wants a GPU of a cluster.
    """
    if section.kind == "inline":
        import torch

        from contraflow.runtime.inline import InlineRuntime

        torch.set_num_threads(section.threads)  # this process is where the workers live
        return InlineRuntime(clock)
    if section.kind == "local":
        from contraflow.runtime.local import LocalRuntime

        return LocalRuntime(folder, threads=section.threads, hang_s=section.hang_s, clock=clock, preload=preload)
    if section.kind == "ray":
        return _open_ray(section, folder, clock, gpu_pools)
    raise ConfigError(f"runtime.kind = {section.kind!r}: allowed are 'local', 'inline' and 'ray'")


def _open_ray(section: RuntimeSection, folder: Path, clock: Clock, gpu_pools: Collection[str]) -> Runtime:
    """On the Ray at RAY_ADDRESS, or on one that it starts. Raises ConfigError where there can be none."""
    # Read when Ray is imported, and handed on to a Ray that is started here.
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # its own 30 s are too few on a busy machine
    os.environ.setdefault("RAY_worker_niceness", "0")  # its own 15 lets anything else on the machine go first
    try:
        from contraflow.runtime.ray import RayCluster
    except ModuleNotFoundError as fault:
        if fault.name != "ray":
            raise
        raise ConfigError("runtime.kind = 'ray': Ray is not installed here; pip install 'contraflow[ray]'") from None
    if not hasattr(os, "pidfd_open"):
        raise ConfigError("runtime.kind = 'ray' needs Linux, whose pidfd tells when a process ends; use 'local'")
    from contraflow.runtime.remote import RemoteRuntime

    cluster = RayCluster(os.environ.get("RAY_ADDRESS", ""))
    return RemoteRuntime(
        cluster, folder, threads=section.threads, hang_s=section.hang_s, clock=clock, gpu_pools=gpu_pools
    )
