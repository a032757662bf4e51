"""A worker's method as a wire format: which arguments it takes, which result it gives, by its annotations.

Takes an `async def` with annotated parameters and result; gives frames for a call and values from frames.
Does not run the method or choose the worker.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

import msgspec

from contraflow.errors import ChannelError
from contraflow.runtime import wire
from contraflow.runtime.wire import Frame, Frames

_Kind = inspect.Parameter


class Method:
    """The wire format of one method. Invariant: every parameter and the result have an annotation."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        self._signature = inspect.signature(function)
        hints = _hints(function)
        fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
        for name, parameter in list(self._signature.parameters.items())[1:]:
            if parameter.kind in (_Kind.VAR_POSITIONAL, _Kind.VAR_KEYWORD, _Kind.POSITIONAL_ONLY):
                raise ChannelError(f"{function.__qualname__}: parameter {name!r} must have one value and a name")
            if name not in hints:
                raise ChannelError(f"{function.__qualname__}: parameter {name!r} needs an annotation, its wire format")
            fields.append(
                (name, hints[name]) if parameter.default is _Kind.empty else (name, hints[name], msgspec.UNSET)
            )
        if "return" not in hints:
            raise ChannelError(f"{function.__qualname__}: the result needs an annotation, its wire format")
        self._result = hints["return"]
        self._names = [name for name, *_ in fields]
        kinds = [parameter.kind for parameter in self._signature.parameters.values()]
        self._by_place = kinds.count(_Kind.POSITIONAL_OR_KEYWORD) - 1  # without self
        self._arguments = msgspec.defstruct(self.name, fields, kw_only=True, forbid_unknown_fields=True)

    def pack(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Frame]:
        """Frames of a call. Raises TypeError, as a plain call would, when the arguments do not fit the signature."""
        if not kwargs and len(args) == len(self._names) == self._by_place:  # binding would cost as much as the rest
            return wire.encode(dict(zip(self._names, args, strict=True)))
        bound = self._signature.bind(None, *args, **kwargs).arguments
        return wire.encode({name: bound[name] for name in self._names if name in bound})

    def unpack(self, frames: Frames) -> dict[str, Any]:
        """The arguments by name; those left out take the default of the worker's own method."""
        values: msgspec.Struct = wire.decode(frames, self._arguments)
        return {name: value for name, value in msgspec.structs.asdict(values).items() if value is not msgspec.UNSET}

    def unpack_result(self, frames: Frames) -> Any:
        """The result, checked against the annotation."""
        return wire.decode(frames, self._result)


@functools.lru_cache(maxsize=1024)
def method_of(function: Callable[..., Any]) -> Method:
    """The wire format of a method, made once. Raises: ChannelError when it is not `async def` or lacks annotations."""
    if not inspect.iscoroutinefunction(function):
        raise ChannelError(f"{function.__qualname__} must be 'async def' to be called from elsewhere")
    return Method(function)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except NameError as fault:
        raise ChannelError(f"{function.__qualname__}: an annotation cannot be read at run time: {fault}") from fault
