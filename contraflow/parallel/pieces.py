"""The piece of each tensor that lies on one rank, after every axis has cut: tp and ep by layout, then FSDP by rows.

Pure: a function of the model, the mesh and the rank. Serves whoever moves tensors between ranks and whole ones, to
load, save or publish. Does not touch processes or files.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from contraflow.config import Parallel
from contraflow.model.decoder import Decoder
from contraflow.model.families import ModelConfig
from contraflow.model.moe import EXPERTS
from contraflow.model.reading import Box, Range
from contraflow.parallel.layout import Place, Shard, place, shards

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """`boxes` says which box of the whole tensor lies in which box of the rank's own, of shape `shape`.

    `counted` is true on one of the ranks that hold the same elements: sums over ranks and gathers take its piece.
    """

    whole: Shape
    shape: Shape
    boxes: tuple[tuple[Box, Box], ...]
    counted: bool


def shapes(config: ModelConfig) -> dict[str, Shape]:
    """Decoder tensor name -> shape of the whole."""
    return {name: tuple(weight.shape) for name, weight in Decoder(config, device="meta").named_parameters()}


def dtypes(config: ModelConfig, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Decoder tensor name -> dtype in a decoder of `dtype`, whose router and head stay fp32; in the decoder's order."""
    decoder = Decoder(config, dtype=dtype, device="meta")
    return {name: weight.dtype for name, weight in decoder.named_parameters()}


def pieces(config: ModelConfig, parallel: Parallel, here: Place, whole: Mapping[str, Shape]) -> dict[str, Piece]:
    """Decoder tensor name -> what the rank holds of it, in the decoder's order; `whole` is `shapes(config)`.

    Invariant: over all ranks, every element of every tensor is in exactly one counted piece. Raises ConfigError when
    sizes do not divide.
    """
    found = {}
    for name, shard in shards(config, parallel, here).items():
        experts = is_expert(config, name)
        copies = parallel.stage_ranks // parallel.ep if experts else parallel.dp * parallel.cp
        index = here.edp if experts else here.dp * parallel.cp + here.cp
        counted = experts or shard is not None or here.tp == 0
        found[name] = _piece(whole[name], shard, copies, index, counted)
    return found


def trained(config: ModelConfig, parallel: Parallel) -> list[dict[str, Piece]]:
    """`pieces` of every rank of a trainer, in order."""
    whole = shapes(config)
    return [pieces(config, parallel, place(rank, parallel), whole) for rank in range(parallel.ranks)]


def served(config: ModelConfig, parallel: Parallel) -> list[dict[str, Piece]]:
    """The same of an engine: no axis cuts rows once more, so ranks may hold the same elements.

    Experts lie in order, as without `engine.replace_every`.
    """
    whole = shapes(config)
    held = [shards(config, parallel, place(rank, parallel)) for rank in range(parallel.ranks)]
    return [{name: _piece(whole[name], shard, 1, 0, True) for name, shard in rank.items()} for rank in held]


def is_expert(config: ModelConfig, name: str) -> bool:
    """Whether the tensor belongs to the experts of a layer: cut by ep, copied over edp."""
    if not name.startswith("layers.") or not name.endswith(tuple(f".mlp.{part}" for part in EXPERTS)):
        return False
    return int(name.split(".")[1]) in config.moe_layers


def take(whole: Tensor, piece: Piece) -> Tensor:
    """The rank's part of a whole tensor, a copy."""
    part = whole.new_empty(piece.shape)
    for there, here in piece.boxes:
        part[at(here)] = whole[at(there)]
    return part


def put(whole: Tensor, piece: Piece, part: Tensor) -> None:
    """Write a rank's part to its place in the whole."""
    for there, here in piece.boxes:
        whole[at(there)] = part[at(here)]


def at(box: Box) -> tuple[slice, ...]:
    """A box as an index."""
    return tuple(slice(start, end) for start, end in box)


def chunk(size: int, parts: int, index: int) -> Range:
    """Part `index` of `range(size)` as FSDP (and `torch.chunk`) cuts it: the last ones may be short or empty."""
    each = math.ceil(size / parts)
    return min(index * each, size), min((index + 1) * each, size)


def _piece(whole: Shape, shard: Shard | None, copies: int, index: int, counted: bool) -> Piece:
    shape = list(whole)
    dim, ranges = (0, ((0, whole[0]),)) if shard is None else (shard.dim, shard.ranges)
    shape[dim] = sum(end - start for start, end in ranges)
    low, high = chunk(shape[0], copies, index)
    shape[0] = high - low
    boxes, begin = [], 0
    for start, end in ranges:
        there, here = [(0, n) for n in whole], [(0, n) for n in shape]
        if dim == 0:  # what of this range is among the rank's rows
            lo, hi = max(low, begin), min(high, begin + end - start)
            there[0], here[0] = (start + lo - begin, start + hi - begin), (lo - low, hi - low)
        else:
            there[0] = (low, high)
            there[dim], here[dim] = (start, end), (begin, begin + end - start)
        if all(hi > lo for lo, hi in here):
            boxes.append((tuple(there), tuple(here)))
        begin += end - start
    return Piece(whole, tuple(shape), tuple(boxes), counted)
