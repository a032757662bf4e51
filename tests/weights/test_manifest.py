"""The plan of a version's bytes is exact, and an unsound or ill-fitting manifest is refused before a byte moves."""

import hashlib

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contraflow.errors import CarrierError
from contraflow.types import Manifest, Probe, Tensor, Version
from contraflow.weights.manifest import (
    ALIGNMENT,
    Expected,
    check_fit,
    check_manifest,
    decode_manifest,
    digest,
    encode_manifest,
    expect,
    layout,
    pieces,
    spans,
    total_bytes,
    views,
)

SIZES = st.lists(st.integers(0, 200), max_size=12)


def tensors_of(sizes: list[int]) -> dict[str, torch.Tensor]:
    return {f"t{i:02d}": torch.zeros(size, dtype=torch.uint8) for i, size in enumerate(sizes)}


def a_manifest(**changes: object) -> Manifest:
    tensors = {"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16)}
    entries = layout(tensors)
    manifest = Manifest(
        version=Version(1, 3),
        parent=Version(1, 2),
        model="abc",
        carrier="memory",
        location="x",
        tensors=entries,
        chunk_bytes=64,
        digests=tuple("0" * 64 for _ in spans(total_bytes(entries), 64)),
        probe=Probe((np.array([1, 2], np.int32),), (np.array([0.1], np.float32),), 1e-3),
    )
    return msgspec.structs.replace(manifest, **changes)


@given(sizes=SIZES)
def test_tensors_are_aligned_in_order_and_apart(sizes: list[int]) -> None:
    end = 0
    for entry, size in zip(layout(tensors_of(sizes)), sizes, strict=True):
        assert entry.offset % ALIGNMENT == 0
        assert end <= entry.offset < end + ALIGNMENT
        assert entry.nbytes == size
        end = entry.offset + entry.nbytes
    assert total_bytes(layout(tensors_of(sizes))) == end


@given(sizes=SIZES, chunk_bytes=st.integers(1, 300))
def test_the_pieces_of_all_chunks_are_every_byte_of_every_tensor_once(sizes: list[int], chunk_bytes: int) -> None:
    entries = layout(tensors_of(sizes))
    seen: list[tuple[int, int]] = []
    for start, end in spans(total_bytes(entries), chunk_bytes):
        for index, lo, hi in pieces(entries, start, end):
            assert start <= lo < hi <= end
            seen += [(index, byte) for byte in range(lo, hi)]
    assert seen == [(i, entry.offset + byte) for i, entry in enumerate(entries) for byte in range(entry.nbytes)]


@given(total=st.integers(0, 1000), chunk_bytes=st.integers(1, 300))
def test_spans_cut_the_bytes_into_whole_chunks_and_a_rest(total: int, chunk_bytes: int) -> None:
    cut = spans(total, chunk_bytes)
    assert [byte for start, end in cut for byte in range(start, end)] == list(range(total))
    assert all(end - start == chunk_bytes for start, end in cut[:-1])


def test_a_dtype_that_no_manifest_may_name_is_refused() -> None:
    with pytest.raises(CarrierError, match=r"'z' is complex64; a version holds float64"):
        layout({"z": torch.zeros(2, dtype=torch.complex64)})


def test_views_share_the_bytes_they_are_cut_from() -> None:
    tensors = {"a": torch.zeros(3), "b": torch.zeros((), dtype=torch.float64), "c": torch.zeros(0, 4)}
    entries = layout(tensors)
    bytes_B = torch.zeros(total_bytes(entries), dtype=torch.uint8)
    cut = views(bytes_B, entries)
    assert {name: (t.shape, t.dtype) for name, t in cut.items()} == {
        name: (t.shape, t.dtype) for name, t in tensors.items()
    }
    cut["a"][1] = 1.0
    assert bytes_B[4:8].tolist() == list(np.float32(1.0).tobytes())


def test_the_digest_is_sha256() -> None:
    data = np.arange(256, dtype=np.uint8)
    assert digest(data) == hashlib.sha256(bytes(range(256))).hexdigest()


def test_a_sound_manifest_passes() -> None:
    check_manifest(a_manifest())
    check_manifest(a_manifest(tensors=(), digests=()))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"chunk_bytes": 0}, "chunk_bytes = 0"),
        ({"digests": ("0" * 64,)}, "1 digests for 2 chunks"),
        ({"tensors": (Tensor("a", (3,), "float31", 0, 12),), "digests": ("",)}, "'float31'; known are"),
        ({"tensors": (Tensor("a", (3,), "float32", 0, 13),), "digests": ("",)}, "says 13 bytes, .* take 12"),
        ({"tensors": (Tensor("a", (-3, -1), "float32", 0, 12),), "digests": ("",)}, "sizes are 0 or more"),
        ({"tensors": (Tensor("a", (3,), "float32", 8, 12),), "digests": ("",)}, "multiple of 64"),
        ({"tensors": (Tensor("a", (3,), "float32", -64, 12),), "digests": ()}, "at least 0"),
        (
            {"tensors": (Tensor("a", (20,), "float32", 0, 80), Tensor("b", (1,), "float32", 64, 4)), "digests": ()},
            "'b' lies at byte 64; .* at least 80",
        ),
        (
            {"tensors": (Tensor("a", (1,), "int8", 0, 1), Tensor("a", (1,), "int8", 64, 1)), "digests": ()},
            "'a' is listed twice",
        ),
        ({"tensors": (Tensor("a", (1 << 60,), "int8", 0, 1 << 60),), "chunk_bytes": 1}, "digests for"),
    ],
)
def test_an_unsound_manifest_is_refused_with_its_version(changes: dict[str, object], says: str) -> None:
    with pytest.raises(CarrierError, match=rf"manifest of 1\.3: .*{says}|manifest of 1\.3: {says}"):
        check_manifest(a_manifest(**changes))


def test_an_engine_takes_its_own_model_and_its_own_tensors_only() -> None:
    mine = {"a": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros(7)}
    check_fit(a_manifest(), expect("abc", mine))  # another dtype is the engine's business
    for expected, says in [
        (expect("xyz", mine), r"version 1\.3 is of model 'abc', the engine runs 'xyz'"),
        (Expected("abc", {"a": (3, 5)}), r"missing none, not known 'b'"),
        (expect("abc", {**mine, "c": torch.zeros(1)}), r"missing 'c', not known none"),
        (Expected("abc", {"a": (5, 3), "b": (7,)}), r"'a' has shape \[3, 5\], the engine's has \[5, 3\]"),
        (Expected("abc", {str(i): () for i in range(9)}), r"'0', '1', '2' and 6 more"),
    ]:
        with pytest.raises(CarrierError, match=says):
            check_fit(a_manifest(), expected)


def test_a_manifest_survives_being_stored() -> None:
    wanted = a_manifest()
    found = decode_manifest(encode_manifest(wanted), "here")
    for name in ("version", "parent", "model", "carrier", "location", "tensors", "chunk_bytes", "digests"):
        assert getattr(found, name) == getattr(wanted, name)
    assert found.probe.prompts[0].dtype == np.int32
    np.testing.assert_array_equal(found.probe.logprobs[0], wanted.probe.logprobs[0])


@given(logprob=st.floats(-100, 0, width=32))
def test_probe_values_survive_being_stored_to_the_last_bit(logprob: float) -> None:
    wanted = np.array([logprob], np.float32)
    manifest = a_manifest(probe=Probe((np.array([0, 1], np.int32),), (wanted,), 1e-3))
    assert decode_manifest(encode_manifest(manifest), "here").probe.logprobs[0].tobytes() == wanted.tobytes()


@given(data=st.data())
def test_no_altered_byte_of_a_stored_manifest_goes_unseen(data: st.DataObject) -> None:
    stored = bytearray(encode_manifest(a_manifest()))
    stored[data.draw(st.integers(0, len(stored) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CarrierError, match="here"):
        decode_manifest(bytes(stored), "here")
