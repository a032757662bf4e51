"""The ranks of one model as process groups: who sums, gathers and exchanges with whom.

Takes a rendezvous and the wanted sizes, gives a `Mesh`. Does not know the model or what is exchanged.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from contraflow.config import Parallel
from contraflow.dispatch.base import Phase
from contraflow.dispatch.group import Store
from contraflow.errors import ConfigError
from contraflow.parallel.layout import Place, place


@dataclass(frozen=True)
class Mesh:
    """The groups of one rank. Each group holds the ranks that differ in that coordinate alone.

    `dense` is dp and cp together: what holds the same dense weights and other tokens. `edp` is what holds the same
    experts. Both are device meshes, for FSDP. The order of ranks in a group is that of the coordinate.
    """

    parallel: Parallel
    here: Place
    device: torch.device
    world: dist.ProcessGroup
    dense: DeviceMesh
    edp: DeviceMesh
    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    ep: dist.ProcessGroup
    pp: dist.ProcessGroup
    stage: dist.ProcessGroup  # all ranks of the same pipeline stage
    store: Store  # what all ranks can read and write
    forms: Mapping[Phase, str] = field(default_factory=dict)  # of dispatch, by phase; none: what the settings ask for

    @property
    def first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.here.rank == 0


@contextmanager
def open_mesh(parallel: Parallel, *, rank: int, init_method: str, device: torch.device | str = "cpu") -> Iterator[Mesh]:
    """Join the ranks' process group and make the groups of the mesh; leave it on the way out.

    A GPU must be the current one of this thread. It is not given to the process group as its own: torch 2.11 would then
    split groups off the first one, and in a process that had a mesh before that is a segmentation fault.

    `init_method` as torch.distributed takes it, the same on all ranks. Raises ConfigError for a rank that has no place.
    """
    device = torch.device(device)
    here = place(rank, parallel)
    if dist.is_initialized():
        raise ConfigError("this process is in a process group already; a process has one mesh")
    store, _, _ = next(rendezvous(init_method, rank, parallel.ranks))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("groups", store),
        rank=rank,
        world_size=parallel.ranks,
        timeout=timedelta(seconds=1.25 * parallel.deadline_s),  # ours is the shorter, and names who is missing
    )
    try:
        yield _mesh(parallel, here, device, store)
    finally:
        dist.destroy_process_group()


def _mesh(parallel: Parallel, here: Place, device: torch.device, store: Store) -> Mesh:
    ranks = torch.arange(parallel.ranks)
    places = [place(rank, parallel) for rank in ranks.tolist()]
    stage = ranks.view(parallel.pp, -1)
    by_axis = stage.view(parallel.pp, parallel.dp * parallel.cp, parallel.tp)
    by_expert = stage.view(parallel.pp, -1, parallel.ep)
    axes = DeviceMesh(device.type, by_axis, mesh_dim_names=("pp", "dense", "tp"))
    experts = DeviceMesh(device.type, by_expert, mesh_dim_names=("stage", "edp", "ep"))
    cp = dist.new_subgroups_by_enumeration(
        _apart([(p.pp, p.dp, p.tp) for p in places]),
    )[0]
    whole_stage = dist.new_subgroups_by_enumeration(stage.tolist())[0]
    world = dist.group.WORLD
    assert world is not None
    return Mesh(
        parallel=parallel,
        here=here,
        device=device,
        world=world,
        dense=axes["dense"],
        edp=experts["edp"],
        tp=axes.get_group("tp"),
        cp=cp,
        ep=experts.get_group("ep"),
        pp=axes.get_group("pp"),
        stage=whole_stage,
        store=store,
    )


def _apart(keys: list[tuple[int, ...]]) -> list[list[int]]:
    """Ranks by key, in order of rank."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, key in enumerate(keys):
        groups.setdefault(key, []).append(rank)
    return list(groups.values())
