"""One model over the ranks of a mesh: built empty, filled from whole tensors, and given back as whole tensors.

Files and versions hold whole tensors by name, so any mesh reads what any other wrote. Each rank reads no more than its
own part, and rank 0 holds one whole tensor at a time. Does not compute or train.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from contraflow.model.attention import Attention
from contraflow.model.decoder import Decoder
from contraflow.model.families import ModelConfig
from contraflow.model.folder import load_folder, open_folder, read_config
from contraflow.model.moe import MoE
from contraflow.model.names import Part, parts
from contraflow.model.reading import TensorFiles
from contraflow.parallel.data import at_rest, local, shard_rows
from contraflow.parallel.experts import open_experts
from contraflow.parallel.layout import check_fit
from contraflow.parallel.mesh import Mesh
from contraflow.parallel.pieces import Piece, at, pieces, put, shapes, trained
from contraflow.parallel.pipeline import share_layers
from contraflow.parallel.tensor import share_heads


class Spread:
    """A rank's part of a model: `decoder` holds it under the decoder's own names. Without a mesh it is the whole.

    Invariant: what `gather` gives of the pieces that ranks read is the whole tensor, bit for bit.
    """

    def __init__(self, decoder: Decoder, mesh: Mesh | None = None) -> None:
        self.decoder = decoder
        self.config = decoder.config
        self.mesh = mesh

    @property
    def first(self) -> bool:
        """Whether this rank is given whole tensors."""
        return self.mesh is None or self.mesh.first

    def holds(self, name: str) -> bool:
        """Whether the layer of this parameter is on this rank."""
        return self.mesh is None or name in self.pieces

    def tensors(self) -> Iterator[tuple[str, Tensor | None]]:
        """Every whole parameter, on rank 0; None elsewhere. Collective: every rank goes through to the end."""
        at_rest(self.decoder)
        held = {name: local(parameter) for name, parameter in self.decoder.named_parameters()}
        for name in self.shapes:
            yield name, self.gather(name, held.get(name))

    def gather(self, name: str, part: Tensor | None) -> Tensor | None:
        """The whole of what ranks hold pieces of, laid out as parameter `name`; on rank 0, None elsewhere. Collective.

        `part` is None on ranks that hold no piece of it.
        """
        if self.mesh is None:
            return part
        if not self.mesh.first:
            if part is not None and self.pieces[name].counted and part.numel():
                dist.send(part.contiguous(), 0, group=self.mesh.world)
            return None
        whole = torch.empty(self.shapes[name], dtype=torch.float32, device=self.mesh.device)
        for rank, pieces_there in enumerate(self._everywhere):
            piece = pieces_there.get(name)
            if piece is None or not piece.counted or not piece.boxes:
                continue
            if rank > 0:
                part = whole.new_empty(piece.shape)
                dist.recv(part, rank, group=self.mesh.world)
            assert part is not None
            put(whole, piece, part)
        return whole

    def read(self, files: TensorFiles, name: str, there: Sequence[Part]) -> Tensor:
        """This rank's part of what the disk tensors `there` fill, laid out as parameter `name`; fp32, on the CPU."""
        if self.mesh is None:
            return files.read(there, tuple((0, size) for size in self.shapes[name])).float()
        piece = self.pieces[name]
        part = torch.empty(piece.shape)
        for whole_box, box in piece.boxes:
            part[at(box)] = files.read(there, whole_box).float()
        return part

    def counted(self, name: str) -> bool:
        """Whether sums over all ranks take this rank's piece; one of the ranks with the same elements says yes."""
        return self.mesh is None or self.pieces[name].counted

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole parameters, in the decoder's order."""
        return shapes(self.config)

    @cached_property
    def pieces(self) -> dict[str, Piece]:
        """What this rank of a mesh holds."""
        assert self.mesh is not None
        return pieces(self.config, self.mesh.parallel, self.mesh.here, self.shapes)

    @cached_property
    def _everywhere(self) -> list[dict[str, Piece]]:
        assert self.mesh is not None
        return trained(self.config, self.mesh.parallel)


def load_spread(
    folder: Path,
    mesh: Mesh | None,
    *,
    device: torch.device | str = "cpu",
    compute: torch.dtype = torch.float32,
    max_tokens: int | None = None,
) -> Spread:
    """A model folder as fp32 weights to train, this rank's part of it, on the mesh's device (without one, `device`).

    `compute` is the decoder's `compute_dtype`, `max_tokens` as for `cut_decoder`. Raises: ModelError, ConfigError.
    """
    if mesh is None:
        return Spread(load_folder(folder, device=device, compute_dtype=compute))
    spread = empty_spread(read_config(folder), mesh, device=device, compute=compute, max_tokens=max_tokens)
    table = parts(spread.config)
    with open_folder(folder) as files, torch.no_grad():
        for name, parameter in spread.decoder.named_parameters():
            local(parameter).copy_(spread.read(files, name, table[name]))
    return spread


def empty_spread(
    config: ModelConfig,
    mesh: Mesh | None,
    *,
    device: torch.device | str = "cpu",
    compute: torch.dtype = torch.float32,
    max_tokens: int | None = None,
) -> Spread:
    """As `load_spread`, of fp32 weights that are still to be filled. Collective. Raises: ConfigError."""
    if mesh is None:
        return Spread(Decoder(config, dtype=torch.float32, device=device, compute_dtype=compute))
    decoder = cut_decoder(config, mesh, compute=compute, max_tokens=max_tokens)
    shard_rows(decoder, mesh)
    settle(decoder, mesh.device)
    return Spread(decoder, mesh)


def cut_decoder(
    config: ModelConfig,
    mesh: Mesh,
    *,
    dtype: torch.dtype = torch.float32,
    compute: torch.dtype | None = None,
    max_tokens: int | None = None,
    wired: bool = True,
) -> Decoder:
    """A decoder on the meta device with this rank's share of heads, dense width and experts, wired to its mates.

    `dtype` and `compute` are the decoder's `dtype` and `compute_dtype`.
    `max_tokens`: the most that a rank ever feeds at once, the same on all; some dispatches size their buffers by it.
    Not `wired`: its experts are still without a dispatch, which `open_slots` gives them.
    """
    check_fit(config, mesh.parallel)
    decoder = Decoder(config, dtype=dtype, device="meta", compute_dtype=compute)
    share_layers(decoder, mesh.parallel, mesh.here)
    share_heads(decoder, mesh.tp)
    for mixture in (module for module in decoder.modules() if isinstance(module, MoE)):
        for name, whole in mixture.expert_parameters().items():
            part = whole[: len(whole) // mesh.parallel.ep].detach().clone()
            mixture.register_parameter(name, nn.Parameter(part))
    if config.moe_layers and wired:
        decoder.use_dispatch(open_experts(config, mesh, max_tokens=max_tokens))
    return decoder


def settle(model: nn.Module, device: torch.device) -> None:
    """Give a model of the meta device memory, not filled, and compute what is not loaded."""
    model.to_empty(device=device)
    for module in model.modules():
        if isinstance(module, Decoder | Attention):
            module.make_buffers(device)
