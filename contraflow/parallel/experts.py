"""How tokens reach experts on a mesh: the dispatch over ep, and tokens shared out over tp before it.

Takes a model's config and a mesh, gives the `Dispatch` of all its MoE layers. Does not know how tokens travel.
"""

from typing import Any

import torch.distributed as dist

from contraflow.dispatch.base import Dispatch
from contraflow.dispatch.domains import Topology
from contraflow.dispatch.group import GroupLinks
from contraflow.dispatch.local import LocalDispatch
from contraflow.dispatch.open import open_dispatch
from contraflow.dispatch.phased import Phased
from contraflow.dispatch.split import SplitTokens
from contraflow.model.families import ModelConfig
from contraflow.parallel.mesh import Mesh


def open_experts(config: ModelConfig, mesh: Mesh, *, max_tokens: int | None = None) -> Dispatch[Any]:
    """The dispatch that the mesh's settings ask for. Collective over the ranks of a stage. Raises: DispatchError."""
    parallel = mesh.parallel
    dispatch: Dispatch[Any] = LocalDispatch(config.experts)
    if parallel.ep > 1:
        dispatch = open_forms(mesh, links(mesh, mesh.ep), experts=config.experts, max_tokens=max_tokens)
    if parallel.tp > 1:
        dispatch = SplitTokens(dispatch, links(mesh, mesh.tp).exchange(range(parallel.tp)))
    return dispatch


def open_forms(mesh: Mesh, reach: GroupLinks, *, experts: int, max_tokens: int | None) -> Dispatch[Any]:
    """A dispatch to `experts`, of the form that each phase of the mesh has; of one alone, if all have the same."""
    parallel = mesh.parallel
    forms = mesh.forms or {"train": parallel.dispatch}
    opened = {
        kind: open_dispatch(kind, reach, experts=experts, wire=parallel.wire, max_tokens=max_tokens, device=mesh.device)
        for kind in dict.fromkeys(forms.values())
    }
    if len(opened) == 1:
        return opened[forms[next(iter(forms))]]
    return Phased({phase: opened[kind] for phase, kind in forms.items()})


def links(mesh: Mesh, group: dist.ProcessGroup) -> GroupLinks:
    """A group of the mesh as dispatch knows it: its domains, and who is missing when an exchange fails."""
    ranks, size = dist.get_process_group_ranks(group), mesh.parallel.domain_ranks
    topology = Topology.named([str(rank // size) for rank in ranks]) if size else None
    return GroupLinks(
        group, topology=topology, device=mesh.device, store=mesh.store, deadline_s=mesh.parallel.deadline_s
    )
