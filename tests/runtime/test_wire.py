"""Values survive the wire as they were, and whatever is not a value is refused with a reason."""

from dataclasses import dataclass
from typing import Any

import hypothesis.extra.numpy as arrays
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contraflow.errors import ChannelError
from contraflow.runtime.wire import INLINE_BYTES, decode, encode, nbytes
from contraflow.types import Float32, Int32, Probe, Version

DTYPES = st.sampled_from(["?", "i1", "u2", "<i4", ">i4", "u8", "f2", "f4", ">f8", "c8", "c16"])


@dataclass
class Pair:
    left: Int32
    right: Float32 | None = None


@given(array=arrays.arrays(dtype=DTYPES, shape=arrays.array_shapes(min_dims=0, min_side=0, max_dims=4)))
def test_any_array_comes_back_bit_equal_and_writable(array: npt.NDArray[Any]) -> None:
    back = decode(encode(array), npt.NDArray[Any])
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable
    assert back.flags.c_contiguous


@pytest.mark.parametrize("extra", [0, 1])
def test_arrays_larger_than_the_limit_get_a_frame_of_their_own(extra: int) -> None:
    array = np.arange(INLINE_BYTES + extra, dtype=np.uint8)
    frames = encode([array, array])
    assert len(frames) == 1 + 2 * extra
    for back in decode(frames, list[npt.NDArray[np.uint8]]):
        np.testing.assert_array_equal(back, array)
    assert nbytes(frames) >= 2 * array.nbytes


def test_a_large_array_is_referred_to_and_not_copied() -> None:
    array = np.zeros(INLINE_BYTES, np.float32)
    frames = encode(array)
    assert np.shares_memory(np.frombuffer(frames[1], np.uint8), array)
    buffer = bytearray(frames[1])
    assert np.shares_memory(decode([frames[0], buffer], Float32), np.frombuffer(buffer, np.uint8))


def test_an_array_in_an_unaligned_frame_is_still_aligned() -> None:
    array = np.arange(INLINE_BYTES, dtype=np.float64)
    head, body = encode(array)
    shifted = memoryview(bytearray(b"x" + bytes(body)))[1:]
    back = decode([head, shifted], npt.NDArray[np.float64])
    assert back.flags.aligned
    np.testing.assert_array_equal(back, array)


def test_structs_dataclasses_and_containers_keep_their_types() -> None:
    probe = Probe((np.array([1, 2], np.int32),), (np.array([-0.5], np.float32),), 1e-3)
    back = decode(encode({"a": [probe]}), dict[str, list[Probe]])["a"][0]
    assert back.tolerance == probe.tolerance
    np.testing.assert_array_equal(back.prompts[0], probe.prompts[0])
    pair = decode(encode(Pair(np.array([1], np.int32))), Pair)
    assert pair.right is None
    assert decode(encode((Version(1, 2), None)), tuple[Version, Version | None]) == (Version(1, 2), None)


def test_numpy_scalars_travel_as_plain_numbers() -> None:
    values = decode(encode([np.float32(0.5), np.int64(7), np.bool_(True)]), tuple[float, int, bool])
    assert values == (0.5, 7, True)


def test_an_array_without_an_annotation_is_still_an_array() -> None:
    back = decode(encode({"x": np.ones(3, np.float32)}), dict[str, Any])
    np.testing.assert_array_equal(back["x"], np.ones(3))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), "'object' has no wire format"),
        (torch.zeros(2), "give a numpy array"),
        (np.array([object()]), "dtype object has no wire format"),
        (np.array(["text"]), "dtype <U4 has no wire format"),
        (2**70, "cannot encode a 'int'"),
        ("\ud800", "cannot encode a 'str'"),
    ],
)
def test_what_has_no_wire_format_is_refused_with_a_reason(value: object, reason: str) -> None:
    with pytest.raises(ChannelError, match=reason):
        encode(value)


def test_an_endless_structure_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ChannelError, match="cannot encode"):
        encode(loop)


@pytest.mark.parametrize(
    ("value", "annotation", "reason"),
    [
        (np.zeros(2, np.float64), Float32, "expected an array of float32, got float64"),
        ([1, 2], Int32, "expected an array, got 'list'"),
        (np.zeros(2, np.int32), int, "Expected `int`"),
        ({"left": [1]}, Pair, r"expected an array, got 'list' - at `\$.left`"),
        (None, Int32, "got 'NoneType'"),
        (1, torch.Tensor, "Tensor has no wire format"),
    ],
)
def test_a_value_that_does_not_fit_its_annotation_is_refused(value: object, annotation: Any, reason: str) -> None:
    with pytest.raises(ChannelError, match=reason):
        decode(encode(value), annotation)


def test_torn_arrays_are_refused() -> None:
    frames = encode(np.zeros(INLINE_BYTES, np.float32))
    for torn in (frames[:1], [frames[0], memoryview(frames[1])[:-1]], [frames[0], b""], []):
        with pytest.raises(ChannelError):
            decode(torn, Float32)


@pytest.mark.parametrize("dtype", ["O", "|O8", "<M8", "(2,)i4", "i4,i4", "<f99", "", "<i3"])
def test_a_dtype_that_is_not_plain_bytes_is_refused(dtype: str) -> None:
    head = msgspec.msgpack.encode([dtype, [1], 0])
    frame = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, bytes([len(head)]) + head + bytes(8)))
    with pytest.raises(ChannelError, match="torn array"):
        decode([frame], npt.NDArray[Any])


@settings(max_examples=300)
@given(noise=st.binary(max_size=80), at=st.integers(0, 200), array=st.booleans())
def test_noise_is_refused_and_never_crashes(noise: bytes, at: int, array: bool) -> None:
    whole = bytes(encode(Pair(np.arange(9, dtype=np.int32), np.zeros(3, np.float32)))[0])
    frame = whole[: at % len(whole)] + noise + whole[at % len(whole) + len(noise) :] if array else noise
    try:
        decode([frame, noise], Pair if array else Any)
    except ChannelError:
        return
