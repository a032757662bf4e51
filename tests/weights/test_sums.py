"""Digests taken on a device: those of the closed form, and another one for whatever happens to a bucket on its way."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contraflow.weights import sums
from contraflow.weights.sums import ROW, as_text, bucket_sum


def random_bytes(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def by_hand(data: bytes) -> int:
    """The definition in whole numbers of any size."""
    keys = [int(key) for key in np.random.PCG64(sums._SEED).random_raw(2 * ROW)]
    words = np.frombuffer(data + bytes(-len(data) % 4), np.int32).tolist()
    rows = [words[start : start + ROW] for start in range(0, len(words), ROW)]
    level = [sum(word * key for word, key in zip(row, keys, strict=False)) % 2**64 for row in rows]
    halves = np.array(level, np.uint64).view(np.int32).tolist()
    return sum(half * key for half, key in zip(halves, keys[ROW:], strict=False)) % 2**64


@pytest.mark.parametrize("size", [0, 1, 3, 4, 1000, 4 * ROW - 1, 4 * ROW, 4 * ROW + 5, 12 * ROW + 2])
def test_the_digest_is_the_definitions(size: int) -> None:
    data = random_bytes(size)
    assert as_text(bucket_sum(data)[None]) == (f"{by_hand(data.numpy().tobytes()):016x}",)


@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 20), place=st.integers(0, 9 * ROW - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_seen(seed: int, place: int, bit: int) -> None:
    data = random_bytes(9 * ROW, seed)
    before = bucket_sum(data)
    data[place] ^= 1 << bit
    assert bucket_sum(data) != before


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1 << 20),
    places=st.tuples(st.integers(0, 35), st.integers(0, 35)).filter(lambda two: two[0] != two[1]),
    unit=st.sampled_from([4, 64, 4096, ROW]),
)
def test_two_blocks_that_changed_places_are_seen(seed: int, places: tuple[int, int], unit: int) -> None:
    data = random_bytes(36 * unit, seed)
    before = bucket_sum(data)
    a, b = (slice(place * unit, (place + 1) * unit) for place in places)
    data[a], data[b] = data[b].clone(), data[a].clone()
    assert bucket_sum(data) != before


@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 20), start=st.integers(0, 8 * ROW), length=st.integers(16, ROW))
def test_a_zeroed_or_repeated_block_is_seen(seed: int, start: int, length: int) -> None:
    data = random_bytes(9 * ROW, seed)
    before = bucket_sum(data)
    zeroed, stale = data.clone(), data.clone()
    zeroed[start : start + length] = 0
    stale[start : start + length] = random_bytes(length, seed + 1)
    assert before not in (bucket_sum(zeroed), bucket_sum(stale))


def test_a_bucket_beyond_the_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        bucket_sum(torch.empty(1, dtype=torch.uint8).expand(1 << 31))
