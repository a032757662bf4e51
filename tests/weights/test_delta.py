"""A change applied to what it was made from gives every bit of the new chunk, in few bytes when little changed."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from contraflow.errors import CarrierError
from contraflow.weights.delta import HEAD, apply, encode


def as_bytes(values: Tensor) -> Tensor:
    return values.contiguous().reshape(-1).view(torch.uint8)


def assert_restored(old_B: Tensor, new_B: Tensor) -> int:
    """The length of the change, after it proved to be one."""
    before, kept = old_B.clone(), new_B.clone()
    change_B = encode(old_B, new_B)
    assert torch.equal(old_B, before)
    assert torch.equal(new_B, kept)
    assert change_B.dtype == torch.uint8
    assert len(change_B) <= len(new_B) + 1
    apply(before, change_B)
    assert torch.equal(before, new_B)
    return len(change_B)


def random_pair(length: int, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Random bytes, and the same with about `share` of the 16-bit words drawn anew."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, length, dtype=np.uint8)
    fresh = np.repeat(rng.random(-(-length // 2)) < share, 2)[:length]
    new = np.where(fresh, rng.integers(0, 256, length, dtype=np.uint8), old)
    return torch.from_numpy(old), torch.from_numpy(new)


@given(
    length=st.one_of(st.integers(0, 40), st.integers(0, 5000)),
    share=st.sampled_from([0.0, 0.0005, 0.01, 0.1, 0.2, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_two_chunks_of_one_length_are_restored_bit_for_bit(length: int, share: float, seed: int) -> None:
    assert_restored(*random_pair(length, share, seed))


@given(st.lists(st.tuples(st.integers(0, 65535), st.integers(0, 65535)), max_size=40))
def test_any_bf16_bit_patterns_are_restored(pairs: list[tuple[int, int]]) -> None:
    words = np.array(pairs, dtype=np.uint16).reshape(-1, 2)
    old, new = (torch.from_numpy(words[:, side].copy().view(np.uint8)) for side in (0, 1))
    assert_restored(old, new)


def test_nan_payloads_and_negative_zeros_are_restored() -> None:
    old = torch.tensor([0x0000, 0x7FC0, 0x7F80, 0x7F81], dtype=torch.int32).to(torch.int16)
    new = torch.tensor([-0x8000, 0x7FC1, 0x7F80, 0x7FFF], dtype=torch.int32).to(torch.int16)
    assert assert_restored(as_bytes(old), as_bytes(new)) > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool])
def test_every_dtype_is_restored(dtype: torch.dtype) -> None:
    noise = torch.Generator().manual_seed(1)
    old = torch.randn(1001, generator=noise)
    new = old + torch.where(torch.rand(1001, generator=noise) < 0.1, 0.01, 0.0)
    assert_restored(as_bytes(old.to(dtype)), as_bytes(new.to(dtype)))


def test_nothing_changed_takes_no_byte() -> None:
    chunk_B = torch.arange(100, dtype=torch.uint8)
    assert assert_restored(chunk_B, chunk_B.clone()) == 0
    assert assert_restored(torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)) == 0


def test_one_changed_element_takes_a_header_and_its_place_in_the_largest_gaps() -> None:
    old = torch.zeros(100_000, dtype=torch.bfloat16)
    new = old.clone()
    new[99_999] = 1.0
    skips, index, word = 99_999 // 255, 1, 2
    assert assert_restored(as_bytes(old), as_bytes(new)) == HEAD.size + skips + index + word


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 1000])
def test_gaps_around_the_size_of_an_index_entry_are_restored(gap: int) -> None:
    old = torch.zeros(6000, dtype=torch.int16)
    new = old.clone()
    new[gap :: gap + 1] = 3
    assert_restored(as_bytes(old), as_bytes(new))


def test_one_percent_of_small_steps_takes_a_fortieth_of_the_chunk() -> None:
    noise = torch.Generator().manual_seed(2)
    old = torch.randn(1 << 19, generator=noise).to(torch.bfloat16)
    near = old.view(torch.int16) + (torch.rand(1 << 19, generator=noise) < 0.01).to(torch.int16)
    assert assert_restored(as_bytes(old), as_bytes(near)) < (1 << 20) / 40


def test_half_of_all_changed_by_small_steps_takes_a_bitmap_and_a_byte_each() -> None:
    noise = torch.Generator().manual_seed(3)
    old = torch.randint(-9, 9, (80_000,), generator=noise, dtype=torch.int16)
    changed = torch.rand(80_000, generator=noise) < 0.5
    assert assert_restored(as_bytes(old), as_bytes(old + changed)) == HEAD.size + 10_000 + int(changed.sum())


def test_fp32_weights_of_which_every_low_half_changed_take_a_bitmap_and_that_half() -> None:
    old = torch.linspace(0.01, 0.02, 8000).view(torch.int32)
    noise = torch.Generator().manual_seed(6)
    new = (old & -0x10000) | torch.randint(0, 1 << 16, (8000,), generator=noise, dtype=torch.int32)
    halves = int(((old ^ new) != 0).sum())
    assert assert_restored(as_bytes(old), as_bytes(new)) == HEAD.size + 16_000 // 8 + 2 * halves


def test_a_few_wide_steps_among_many_small_ones_take_two_bytes_more_each() -> None:
    old = torch.zeros(8000, dtype=torch.int16)
    new = torch.ones(8000, dtype=torch.int16)
    new[::100] = 1000
    assert assert_restored(as_bytes(old), as_bytes(new)) == HEAD.size + 1000 + 8000 + 2 * 80


@pytest.mark.parametrize("length", [1, 2, 3, 7, 1000, 1001])
def test_a_chunk_of_which_all_changed_takes_itself_and_one_byte(length: int) -> None:
    noise = torch.Generator().manual_seed(4)
    old = torch.randint(0, 256, (length,), generator=noise, dtype=torch.uint8)
    new = old ^ 0x55
    assert assert_restored(old, new) == length + 1


def test_chunks_that_begin_at_an_odd_byte_are_restored_in_place() -> None:
    old, new = random_pair(2001, 0.05, 5)
    room = torch.zeros(2003, dtype=torch.uint8)
    for length in (1000, 1001):
        place = room[1 : 1 + length]
        place.copy_(old[:length])
        change_B = encode(old[1 : 1 + length], new[1 : 1 + length])
        place.copy_(old[1 : 1 + length])
        apply(place, change_B)
        assert torch.equal(place, new[1 : 1 + length])
        assert not room[0]
        assert not room[1 + length :].any()


@given(
    share=st.sampled_from([0.01, 0.3, 1.0]),
    cut=st.integers(0, 2**16),
    flip=st.integers(0, 255),
    at=st.integers(0, 2**16),
    seed=st.integers(0, 999),
)
def test_a_torn_change_is_refused_or_gives_bytes_of_the_right_length(
    share: float, cut: int, flip: int, at: int, seed: int
) -> None:
    old, new = random_pair(500, share, seed)
    torn = encode(old, new).clone()
    if len(torn):
        torn[at % len(torn)] ^= flip
        torn = torn[: len(torn) - cut % len(torn)]
    room = torch.zeros(520, dtype=torch.uint8)
    place = room[10:510]
    place.copy_(old)
    try:
        apply(place, torn)
    except CarrierError:
        assert torch.equal(place, old)
    assert not room[:10].any()
    assert not room[510:].any()


@pytest.mark.parametrize("change", [b"\x00", b"\x01", b"\x07" + bytes(20), b"\x02" + b"\xff" * 30, b"\x01" + bytes(8)])
def test_what_is_no_change_is_refused(change: bytes) -> None:
    with pytest.raises(CarrierError, match=rf"change of {len(change)} bytes to a chunk of 64 is torn"):
        apply(torch.zeros(64, dtype=torch.uint8), torch.tensor(list(change), dtype=torch.uint8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")
@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.3, 1.0])
def test_a_gpu_encodes_and_applies_the_same_bytes_as_a_cpu(share: float) -> None:
    old, new = random_pair(100_001, share, 6)
    change_B = encode(old.cuda(), new.cuda())
    assert torch.equal(change_B.cpu(), encode(old, new))
    place = old.cuda()
    apply(place, change_B)
    assert torch.equal(place.cpu(), new)
