"""The section for programs that rewards run: how they are shut off, and what each may use."""

from typing import Annotated, Literal

from pydantic import Field

from contraflow.config.base import Count, Seconds, Section


class Sandbox(Section):
    """How rewards run what a model wrote. A machine that can't give the isolation asked for is refused."""

    isolation: Literal["namespaces", "filters"] = "namespaces"  # filters: for where namespaces are not allowed, weaker
    processes: Count = 2  # programs that run at once, per rollout worker
    cpu_s: Count = 2  # of processor time for one program
    wall_s: Seconds = 8.0  # for one program, waiting included
    total_s: Seconds = 20.0  # for all programs of one answer; cases not reached by then are failed
    memory_mb: Annotated[int, Field(ge=16)] = 256  # of address space beyond the warm interpreter's
    file_kb: Annotated[int, Field(ge=16)] = 1024  # of each file a program writes, of what it prints too
    threads: Count = 32  # of one program
