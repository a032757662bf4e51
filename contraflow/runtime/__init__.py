"""Where workers live: `inline` (this process, deterministic) or `local` (a process per worker on this machine)."""

import time
from collections.abc import Sequence
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
    section: RuntimeSection, folder: Path, *, clock: Clock = time.monotonic, preload: Sequence[str] = ()
) -> Runtime:
    """The runtime a recipe asks for. `folder` is the run's; `preload` names modules that worker processes need."""
    if section.kind == "inline":
        import torch

        from contraflow.runtime.inline import InlineRuntime

        torch.set_num_threads(section.threads)  # this process is where the workers live
        return InlineRuntime(clock)
    if section.kind == "local":
        from contraflow.runtime.local import LocalRuntime

        return LocalRuntime(folder, threads=section.threads, hang_s=section.hang_s, clock=clock, preload=preload)
    raise ConfigError(f"runtime.kind = {section.kind!r}: allowed are 'local' and 'inline'")
