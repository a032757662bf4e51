"""A method's annotations are its wire format, and a method without one is refused by name."""

from collections.abc import Awaitable
from typing import Any, Protocol

import numpy as np
import pytest

from contraflow.errors import ChannelError
from contraflow.runtime.method import Method, method_of
from contraflow.runtime.wire import encode
from contraflow.types import Float32


class Worker:
    async def scale(self, x: Float32, by: float = 2.0, *, name: str = "") -> Float32:
        return x * np.float32(by)

    async def many(self, *xs: int) -> int:
        return len(xs)

    async def only_by_place(self, x: int, /) -> int:
        return x

    async def bare(self, x) -> int:  # type: ignore[no-untyped-def]
        return int(x)

    async def silent(self, x: int):  # type: ignore[no-untyped-def]
        return x

    async def unknown(self, x: "Nowhere") -> int:  # type: ignore[name-defined]  # noqa: F821
        return 0

    def plain(self) -> int:
        return 0


class Seam(Protocol):
    async def scale(self, x: Float32, by: float) -> Float32: ...

    def later(self) -> Awaitable[int]: ...


def test_arguments_come_back_by_name_and_those_left_out_stay_out() -> None:
    method = method_of(Worker.scale)
    values = method.unpack(method.pack([np.ones(2, np.float32)], {"name": "n"}))
    assert sorted(values) == ["name", "x"]
    np.testing.assert_array_equal(values["x"], np.ones(2))


def test_a_protocol_s_method_can_stand_for_the_worker_s() -> None:
    frames = method_of(Seam.scale).pack([np.ones(2, np.float32), 3.0], {})
    assert method_of(Worker.scale).unpack(frames)["by"] == 3.0


def test_arguments_that_do_not_fit_the_signature_raise_as_a_plain_call_would() -> None:
    method = method_of(Worker.scale)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        method.pack([], {})
    with pytest.raises(TypeError, match="too many positional arguments"):
        method.pack([1, 2, 3], {})


def test_a_missing_or_unknown_argument_on_the_wire_is_refused() -> None:
    method = method_of(Worker.scale)
    for sent, reason in (({"by": 1.0}, "missing required field `x`"), ({"zoom": 1, "by": 1.0}, "zoom")):
        with pytest.raises(ChannelError, match=reason):
            method.unpack(encode(sent))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (Worker.many, "parameter 'xs' must have one value and a name"),
        (Worker.only_by_place, "parameter 'x' must have one value"),
        (Worker.bare, "parameter 'x' needs an annotation"),
        (Worker.silent, "the result needs an annotation"),
        (Worker.unknown, "cannot be read at run time: name 'Nowhere'"),
        (Worker.plain, "plain must be 'async def'"),
        (Seam.later, "later must be 'async def'"),
    ],
)
def test_a_method_without_a_wire_format_is_refused_by_name(function: Any, reason: str) -> None:
    with pytest.raises(ChannelError, match=reason):
        method_of(function)


def test_the_wire_format_of_a_method_is_made_once() -> None:
    assert method_of(Worker.scale) is method_of(Worker.scale)
    assert isinstance(method_of(Worker.scale), Method)
