"""A rank's experts in slots: what lies in them may change with every version, and spare slots hold replicas.

Takes a rank's part of a decoder whose experts lie in order; gives it slots, and a dispatch a layer that knows what lies
where. For engines: a trainer would have to sum the gradients of replicas. Does not decide what lies where.

Shape letters as in `dispatch.placement`.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from contraflow.dispatch.domains import Topology
from contraflow.dispatch.placed import Placed
from contraflow.dispatch.placement import Placement, Sizes, contiguous
from contraflow.dispatch.split import SplitTokens
from contraflow.errors import ConfigError
from contraflow.model.decoder import Decoder
from contraflow.model.families import ModelConfig
from contraflow.model.moe import MoE
from contraflow.parallel.experts import links, open_forms
from contraflow.parallel.mesh import Mesh


class ExpertSlots:
    """The slots of all MoE layers on one rank, and where their tokens go.

    Invariant: a layer's table tells what the slots of all ranks hold, since weights and `tables` are written together.
    """

    def __init__(self, sizes: Sizes, placed: dict[int, Placed[Any]]) -> None:
        """`placed` by layer."""
        self.sizes = sizes
        self._placed = placed

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that have experts: M of them."""
        return tuple(self._placed)

    @property
    def tables(self) -> dict[str, Tensor]:
        """Where tokens are sent, by the names that `tables_of` gives, as it lies in memory."""
        found: dict[str, Tensor] = {}
        for layer, placed in self._placed.items():
            found |= dict(zip(_names(layer), (placed.table.slots_EC, placed.table.replicas_E), strict=True))
        return found

    def take_loads(self, group: dist.ProcessGroup) -> Tensor:
        """Pairs that all ranks of `group` gave each expert since the last call: int64 `[M, E]`. Collective."""
        loads_ME = torch.stack([placed.take_loads() for placed in self._placed.values()])
        dist.all_reduce(loads_ME, group=group)
        return loads_ME


def open_slots(decoder: Decoder, mesh: Mesh, *, spare: int, max_tokens: int | None = None) -> ExpertSlots:
    """Give every MoE layer slots instead of its run of experts, which the first of them hold; `spare` ones are empty.

    Also the dispatch to them; `max_tokens` as for `open_experts`. Collective over the ranks of a stage. Raises:
    DispatchError.
    """
    parallel, reach = mesh.parallel, links(mesh, mesh.ep)
    sizes = slot_sizes(decoder.config, reach.topology, spare=spare)
    first = contiguous(sizes).table(mesh.here.ep)
    inner = open_forms(mesh, reach, experts=sizes.ranks * sizes.slots, max_tokens=max_tokens)
    mates = links(mesh, mesh.tp).exchange(range(parallel.tp)) if parallel.tp > 1 else None
    found: dict[int, Placed[Any]] = {}
    for index, layer in enumerate(decoder.layers):
        if isinstance(layer.mlp, MoE):
            found[index] = placed = Placed(inner, first, turn=mesh.here.ep, device=mesh.device)
            layer.mlp.dispatch = placed if mates is None else SplitTokens(placed, mates)
            for name, run in layer.mlp.expert_parameters().items():
                setattr(layer.mlp, name, _widened(run, sizes.slots))
    return ExpertSlots(sizes, found)


def slot_sizes(config: ModelConfig, topology: Topology, *, spare: int) -> Sizes:
    """Slots for `spare` experts a rank beyond its share, on the ranks that share out the experts."""
    ranks, size = topology.ranks, topology.ranks // topology.count
    even = size * topology.count == ranks and topology == Topology.even(ranks, size)
    most = config.experts - config.experts // ranks
    if spare > most:
        raise ConfigError(
            f"engine.spare_experts = {spare}: a rank holds no expert twice, so it has use for {most} at most, all "
            f"{config.experts} experts less its own {config.experts // ranks}"
        )
    return Sizes(
        experts=config.experts,
        ranks=ranks,
        slots=config.experts // ranks + spare,
        domain_ranks=size if even else ranks,  # domains that are no runs of equal length are taken for one
        groups=config.groups,
    )


def tables_of(placements: Mapping[int, Placement]) -> dict[str, Tensor]:
    """What `ExpertSlots.tables` must become for these placements by layer, on every rank."""
    found: dict[str, Tensor] = {}
    for layer, placement in placements.items():
        table = placement.table(0)  # replicas near and far are used alike, so all ranks send by the same table
        found |= dict(zip(_names(layer), (table.slots_EC, table.replicas_E), strict=True))
    return found


def _names(layer: int) -> tuple[str, str]:
    return f"layers.{layer}.mlp.slots", f"layers.{layer}.mlp.replicas"


def _widened(experts: nn.Parameter, slots: int) -> nn.Parameter:
    wide = experts.new_zeros(slots, *experts.shape[1:])
    wide[: len(experts)] = experts.detach()
    return nn.Parameter(wide)
