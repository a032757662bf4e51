"""Boxes of whole tensors, read from safetensors files without reading the rest of them.

Takes where each disk tensor lies, gives any box of a tensor that several of them fill. Does not know models or ranks.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from contraflow.errors import ModelError
from contraflow.model.names import Part

Range = tuple[int, int]  # from, up to
Box = tuple[Range, ...]  # one range per dimension


class TensorFiles:
    """Open safetensors files. A context manager: handles close with it."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        """`files`: disk tensor name -> the file it is in."""
        self._files = files
        self._opened: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()
        self._opened.clear()

    def read(self, parts: Sequence[Part], box: Box) -> Tensor:
        """`whole[box]` of the tensor that `parts` fill, in the dtype of the files.

        Raises: ModelError when a disk tensor is missing, of another shape, or its file is not whole.
        """
        out: Tensor | None = None
        for part in parts:
            area = _area(part)
            lap = tuple((max(a, b), min(c, d)) for (a, c), (b, d) in zip(area, box, strict=True))
            if any(end <= start for start, end in lap):
                continue
            found = self._slice(part, [(start - a, end - a) for (start, end), (a, _) in zip(lap, area, strict=True)])
            found = found.reshape([end - start for start, end in lap])
            if lap == box:
                return found
            if out is None:
                out = found.new_empty([end - start for start, end in box])
            out[tuple(slice(start - b, end - b) for (start, end), (b, _) in zip(lap, box, strict=True))] = found
        if out is None:
            raise ModelError(f"no tensor of {[part.name for part in parts[:2]]}... reaches into {box}")
        return out

    def _slice(self, part: Part, box: Sequence[Range]) -> Tensor:
        file = self._files.get(part.name)
        if file is None:
            raise ModelError(f"tensor {part.name!r} is missing")
        fixed = sum(isinstance(index, int) for index in part.index)  # dimensions of the whole that the part has not
        try:
            if file not in self._opened:
                self._opened[file] = self._stack.enter_context(safe_open(file, framework="pt"))
            there = self._opened[file].get_slice(part.name)
            if tuple(there.get_shape()) != part.shape:
                raise ModelError(f"{file}: tensor {part.name!r} is {there.get_shape()}, but must be {list(part.shape)}")
            slices = [slice(start, end) for start, end in box[fixed:]]
            if part.turned:
                slices[-2:] = slices[-1], slices[-2]
            found: Tensor = there[tuple(slices)] if slices else self._opened[file].get_tensor(part.name)
        except (OSError, SafetensorError) as fault:
            raise ModelError(f"{file}: tensor {part.name!r} cannot be read: {fault}") from None
        if not found.dtype.is_floating_point or found.dtype.itemsize < 2:
            raise ModelError(f"{file}: tensor {part.name!r} is {found.dtype}, which weights cannot be")
        return found.mT if part.turned else found


def _area(part: Part) -> Box:
    """The box of the whole that a part fills."""
    area: list[Range] = []
    rest = list(part.inside)
    for index in part.index:
        if isinstance(index, int):
            area.append((index, index + 1))
        else:
            area.append((index.start, index.stop))
            rest.pop(0)
    return (*area, *((0, size) for size in rest))
