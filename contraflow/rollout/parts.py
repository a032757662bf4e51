"""A version's whole tensors on the leader become each rank's parts, over the process group.

Takes whole tensors by name (leader) and what a rank holds; gives the rank's new parts. Does not load or prove them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from contraflow.config import Parallel
from contraflow.dispatch.placement import Placement, place_experts
from contraflow.model.families import ModelConfig
from contraflow.model.moe import EXPERTS
from contraflow.parallel.layout import cut, place, shards
from contraflow.parallel.mesh import Mesh
from contraflow.parallel.slots import tables_of

Cutter = Callable[[int, str], Tensor]  # a rank and a tensor's name -> the rank's part of it
BUCKET_BYTES = 16 << 20  # of one rank's parts that travel together: a message for each tensor would cost more
_ALIGNMENT = 16


def cutter(
    whole: Mapping[str, Tensor], config: ModelConfig, parallel: Parallel, placements: Sequence[Placement] = ()
) -> Cutter:
    """Cuts whole tensors, which must be those of the model, for each rank.

    `placements`, one a layer with experts, say what the ranks' slots hold, and come along as tables; without them
    experts lie in order. So every replica of an expert is of this version, and none is sent tokens by an older table.
    """
    places = [place(rank, parallel) for rank in range(parallel.ranks)]
    cuts = [shards(config, parallel, there) for there in places]
    laid = dict(zip(config.moe_layers, placements, strict=bool(placements)))
    tables = tables_of(laid)
    slots = {f"layers.{layer}.mlp.{name}": placement for layer, placement in laid.items() for name in EXPERTS}

    def part(rank: int, name: str) -> Tensor:
        if name in tables:
            return tables[name]
        if name in slots:
            return place_experts(whole[name], slots[name], places[rank].ep)
        return cut(whole[name], cuts[rank][name])

    return part


def share_parts(part: Cutter | None, held: Mapping[str, Tensor], *, mesh: Mesh) -> dict[str, Tensor]:
    """New tensors of the names, shapes, dtypes and device of `held`, this rank's parts. Collective over the mesh.

    `part` is given by rank 0 and is None elsewhere.
    """
    ranks = range(mesh.parallel.ranks)
    parts: dict[str, Tensor] = {}
    for names in _buckets(held):
        received = _empty(held, names)
        sent = None
        if part is not None:
            sent = [_packed(part, rank, held, names) for rank in ranks]
        dist.scatter(received, sent, group=mesh.world, group_src=0)
        parts |= _unpacked(received, held, names)
    return parts


def _buckets(held: Mapping[str, Tensor]) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in held.items():
        if names and size + _room(tensor) > BUCKET_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += _room(tensor)
    yield names


def _packed(part: Cutter, rank: int, held: Mapping[str, Tensor], names: list[str]) -> Tensor:
    """The bytes of one rank's parts of these tensors, on the device of what is held."""
    packed = _empty(held, names)
    for name, target in _unpacked(packed, held, names).items():
        target.copy_(part(rank, name))
    return packed


def _empty(held: Mapping[str, Tensor], names: list[str]) -> Tensor:
    return torch.empty(sum(_room(held[name]) for name in names), dtype=torch.uint8, device=held[names[0]].device)


def _unpacked(data_B: Tensor, held: Mapping[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """Views of packed bytes, tensor by tensor."""
    views, at = {}, 0
    for name in names:
        like = held[name]
        views[name] = data_B[at : at + like.nbytes].view(like.dtype).view(like.shape)
        at += _room(like)
    return views


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
