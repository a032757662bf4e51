"""Values and bytes: msgpack by type annotation, numpy arrays as typed buffers.

Takes a value, gives frames: the first is msgpack, the others are the raw bytes of large arrays, so those are never
copied through the encoder. Decoding checks the value, and each array's dtype, against an annotation. No pickle.
Does not send anything, and knows nothing of methods or errors of workers.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar, get_args, get_origin

import msgspec
import numpy as np

from contraflow.errors import ChannelError

Frame: TypeAlias = bytes | bytearray | memoryview
Frames: TypeAlias = Sequence[Frame]
T = TypeVar("T")

INLINE_BYTES = 16384  # smaller arrays travel inside the msgpack frame: a frame of their own costs more than the copy
_ARRAY = 1  # msgpack extension code of an array
_KINDS = "biufc"  # bool, int, uint, float, complex: dtypes that are nothing but their bytes
_DTYPE = re.compile(rf"[<>|][{_KINDS}]\d{{1,2}}")


class _ArrayHead(msgspec.Struct, array_like=True, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    frame: int  # index of the frame that holds the bytes; 0 when they follow this head


def encode(value: object) -> list[Frame]:
    """Frames of a value. Large arrays are referred to, not copied: send or copy them before they change.

    Raises: ChannelError for a type that has no wire format.
    """
    frames: list[Frame] = [b""]

    def hook(item: object) -> object:
        if isinstance(item, np.ndarray):
            return _pack_array(item, frames)
        if isinstance(item, np.generic) and item.dtype.kind in _KINDS:
            return item.item()
        raise ChannelError(f"{type(item).__qualname__!r} has no wire format; {_advice(item)}")

    try:
        frames[0] = msgspec.msgpack.encode(value, enc_hook=hook)
    except (TypeError, OverflowError, ValueError, RecursionError) as fault:
        raise ChannelError(f"cannot encode a {type(value).__qualname__!r}: {fault}") from fault
    return frames


def decode(frames: Frames, annotation: type[T] | Any) -> T:
    """The value that `encode` took, checked against its annotation.

    Arrays are C-contiguous and belong to the receiver: small ones are copies, large ones views of their frame.
    Raises: ChannelError saying where the value does not fit.
    """
    if not frames:
        raise ChannelError("a message without frames holds no value")

    def extension(code: int, data: memoryview) -> object:
        if code != _ARRAY:
            raise ChannelError(f"unknown msgpack extension {code}; known: {_ARRAY} (array)")
        return _unpack_array(data, frames)

    try:
        value: T = msgspec.msgpack.decode(frames[0], type=annotation, dec_hook=_check_array, ext_hook=extension)
    except (msgspec.MsgspecError, TypeError, RecursionError) as fault:
        raise ChannelError(f"cannot decode {_name(annotation)}: {fault}") from fault
    return value


def nbytes(frames: Frames) -> int:
    """Size of a message in bytes."""
    return sum(memoryview(frame).nbytes for frame in frames)


def _pack_array(array: np.ndarray[Any, Any], frames: list[Frame]) -> msgspec.msgpack.Ext:
    if array.dtype.kind not in _KINDS:
        raise ChannelError(f"an array of dtype {array.dtype} has no wire format; allowed: bool, int, float, complex")
    large = array.nbytes > INLINE_BYTES
    head = msgspec.msgpack.encode(_ArrayHead(array.dtype.str, array.shape, len(frames) if large else 0))
    if not large:
        return msgspec.msgpack.Ext(_ARRAY, bytes([len(head)]) + head + array.tobytes())
    frames.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return msgspec.msgpack.Ext(_ARRAY, bytes([len(head)]) + head)


def _unpack_array(data: memoryview, frames: Frames) -> np.ndarray[Any, Any]:
    cut = 1 + data[0] if len(data) else 1
    try:
        head = msgspec.msgpack.decode(data[1:cut], type=_ArrayHead)
        if not _DTYPE.fullmatch(head.dtype) or head.frame < 0:
            raise ValueError(f"dtype {head.dtype!r} in frame {head.frame}")
        dtype = np.dtype(head.dtype)
        raw = memoryview(frames[head.frame]) if head.frame else memoryview(bytearray(data[cut:]))
    except (msgspec.MsgspecError, TypeError, ValueError, IndexError) as fault:
        raise ChannelError(f"a torn array: {fault}") from fault
    if min(head.shape, default=0) < 0 or raw.nbytes != math.prod(head.shape) * dtype.itemsize:
        raise ChannelError(f"a torn array: {raw.nbytes} bytes for shape {head.shape} of {head.dtype}")
    array = np.frombuffer(raw, dtype=dtype).reshape(head.shape)
    return array if array.flags.aligned else array.copy()


def _check_array(annotation: Any, value: object) -> object:
    """msgspec asks here about every type it does not know: arrays pass if their dtype is the annotated one."""
    if (get_origin(annotation) or annotation) is not np.ndarray:
        raise ChannelError(f"{_name(annotation)} has no wire format; {_advice(None)}")
    if not isinstance(value, np.ndarray):
        raise ValueError(f"expected an array, got {type(value).__qualname__!r}")
    wanted = _scalar(annotation)
    if wanted and not issubclass(value.dtype.type, wanted):
        raise ValueError(f"expected an array of {wanted.__name__}, got {value.dtype}")
    return value


def _scalar(annotation: Any) -> type[np.generic] | None:
    """The dtype of `NDArray[np.float32]` and the like; None when any will do."""
    dtype = get_args(annotation)[1:]
    scalar = get_args(dtype[0]) if dtype else ()
    if scalar and isinstance(scalar[0], type) and issubclass(scalar[0], np.generic):  # Any is a class too
        return scalar[0]
    return None


def _advice(item: object) -> str:
    if type(item).__module__.partition(".")[0] == "torch":
        return "give a numpy array (tensor.numpy())"
    return "use numbers, text, lists, dicts, msgspec structs, dataclasses and numpy arrays"


def _name(annotation: Any) -> str:
    return annotation.__qualname__ if isinstance(annotation, type) else str(annotation)
