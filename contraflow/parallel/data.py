"""Data parallelism by FSDP2: each rank keeps a share of the rows of every tensor, gathers a layer when it is needed.

Dense weights are sharded over the ranks that hold the same ones (`mesh.dense`), experts over the ranks that hold the
same experts (`mesh.edp`). Losses are shares of the whole update, so gradients are summed over ranks, never averaged.
"""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from contraflow.model.decoder import Layer
from contraflow.model.moe import MoE
from contraflow.parallel.mesh import Mesh


def shard_rows(model: nn.Module, mesh: Mesh) -> None:
    """Shard a model's parameters, layer by layer. What lies outside of layers stays gathered after a forward pass,
    since the head is used after it. An axis of one rank shards nothing."""
    parallel = mesh.parallel
    alike = parallel.ep == 1 and parallel.tp == 1  # experts and dense weights have the same copies
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    experts = set[nn.Parameter]()
    for layer in layers:
        if isinstance(layer.mlp, MoE) and not alike:
            experts |= set(layer.mlp.expert_parameters().values())
            if mesh.edp.size() > 1:  # FSDP does not look inside what it has sharded, so what is inside goes first
                for dense in layer.mlp.children():
                    _shard(dense, mesh.dense)
                dense_weights = set(layer.mlp.parameters()) - experts
                _shard(layer.mlp, mesh.edp, ignored=dense_weights)
        _shard(layer, mesh.dense, ignored=experts)
    _shard(model, mesh.dense, ignored=experts)


def at_rest(model: nn.Module) -> None:
    """Let go of what a forward pass gathered and no backward pass followed: parameters are this rank's rows again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(parameter: Tensor) -> Tensor:
    """What of a parameter (or its gradient) lies on this rank: the very memory, without its history."""
    held = parameter.detach()
    return held.to_local() if isinstance(held, DTensor) else held


def _shard(module: nn.Module, mesh: DeviceMesh, ignored: Iterable[nn.Parameter] = ()) -> None:
    if mesh.size() == 1:
        return
    sharded = fully_shard(module, mesh=mesh, ignored_params=set(ignored))
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no other sum, and NCCL's is then the same
