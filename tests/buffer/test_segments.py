"""Payloads come back bit for bit, or it is said why not; a full disk and another format are errors in words."""

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contraflow.buffer.segments import FOLDER, Place, Segments, damage, read_group, sweep
from contraflow.errors import LedgerError, PayloadError
from contraflow.types import Episode, Group, Span, StopReason, Task, Ticket, Turn, Version

MakeGroup = Callable[..., Group]


def random_group(seed: int, *, episodes: int, tokens: int, layers: int = 0, kind: type = np.uint8) -> Group:
    draw = np.random.default_rng(seed)
    made = [
        Episode(
            seed=int(draw.integers(2**62)),
            tokens=draw.integers(0, 2**31 - 1, tokens, dtype=np.int32),
            trained=draw.random(tokens) < 0.5,
            logprobs=-draw.random(tokens, dtype=np.float32),
            spans=(Span(Version(1, 3), 0, tokens),),
            turns=(Turn("prompt", 0, tokens),),
            stop=StopReason.LENGTH,
            reward=float(draw.normal()),
            parts={"exact": 0.1, "Форма": float("-inf")},
            error="",
            routes=draw.integers(0, 255, (max(tokens - 1, 0), layers, 8)).astype(kind) if layers else None,
        )
        for _ in range(episodes)
    ]
    task = Task(key="train/7", prompt="1+1=\0", reference="2", facts={"a": "b"})
    return Group(ticket=Ticket(group=7, attempt=2, line=1), task=task, episodes=tuple(made))


def same(a: Group, b: Group) -> None:
    assert (a.ticket, a.task, len(a.episodes)) == (b.ticket, b.task, len(b.episodes))
    for x, y in zip(a.episodes, b.episodes, strict=True):
        for name in Episode.__struct_fields__:
            left, right = getattr(x, name), getattr(y, name)
            if isinstance(left, np.ndarray):
                assert (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
            else:
                assert left == right, name


@pytest.mark.parametrize(
    ("episodes", "tokens", "layers", "kind"),
    [(0, 0, 0, np.uint8), (1, 0, 0, np.uint8), (1, 1, 48, np.uint8), (3, 17, 3, np.uint16), (8, 5000, 48, np.uint8)],
)
def test_a_group_comes_back_bit_for_bit(tmp_path: Path, episodes: int, tokens: int, layers: int, kind: type) -> None:
    groups = [random_group(i, episodes=episodes, tokens=tokens, layers=layers, kind=kind) for i in range(3)]
    segments = Segments(tmp_path, line=0, segment_bytes=1 << 20, threaded=tokens > 1)
    places = segments.write(groups[:2]) + segments.write(groups[2:])
    segments.close()
    for place, group in reversed(list(zip(places, groups, strict=True))):
        assert damage(tmp_path, place) == ""
        same(read_group(tmp_path, place), group)


@given(st.data())
def test_a_flipped_bit_or_a_missing_end_is_named_and_touches_no_other(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("segments")
    groups = [random_group(i, episodes=1, tokens=9) for i in range(3)]
    segments = Segments(folder, line=0, segment_bytes=1 << 20)
    first, second, third = segments.write(groups)
    segments.close()
    path = folder / FOLDER / second.segment
    whole = bytearray(path.read_bytes())
    at = second.start + data.draw(st.integers(0, second.length - 1))
    if data.draw(st.booleans()):
        path.write_bytes(whole[:at])
        assert "truncated" in damage(folder, second)
        assert "truncated" in damage(folder, third)
    else:
        whole[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(whole)
        with pytest.raises(PayloadError, match=rf"{second.segment} was altered: the {second.length} bytes"):
            read_group(folder, second)
        same(read_group(folder, third), groups[2])
    same(read_group(folder, first), groups[0])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "line-0-000000" in damage(tmp_path, Place("line-0-000000", 0, 1, b""))


def test_a_full_file_is_followed_by_another_and_orphans_are_swept(tmp_path: Path) -> None:
    segments = Segments(tmp_path, line=4, segment_bytes=100)
    places = [segments.write([random_group(i, episodes=1, tokens=30)])[0] for i in range(3)]
    segments.close()
    assert [place.segment for place in places] == ["line-4-000000", "line-4-000001", "line-4-000002"]
    sweep(tmp_path, frozenset({"line-4-000001"}))
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["line-4-000001"]
    assert damage(tmp_path, places[1]) == ""


@pytest.mark.parametrize("whole", [True, False])
def test_a_newer_format_is_refused_and_a_damaged_header_alone_is_not(tmp_path: Path, whole: bool) -> None:
    segments = Segments(tmp_path, line=0, segment_bytes=1 << 20)
    (place,) = segments.write([random_group(0, episodes=1, tokens=3)])
    segments.close()
    path = tmp_path / FOLDER / place.segment
    raw = bytearray(path.read_bytes())
    struct.pack_into("<I", raw, 17, 9)
    if whole:
        struct.pack_into("<I", raw, 21, zlib.crc32(raw[:21]))
    path.write_bytes(raw)
    if whole:
        with pytest.raises(LedgerError, match="has format 9; this version of contraflow reads format 1"):
            damage(tmp_path, place)
    else:
        assert damage(tmp_path, place) == ""


def test_a_disk_that_fails_is_a_typed_error_and_the_next_write_overwrites_what_was_left(tmp_path: Path) -> None:
    segments = Segments(tmp_path, line=0, segment_bytes=1 << 20)
    (first,) = segments.write([random_group(0, episodes=1, tokens=3)])
    kept = segments._file
    segments._file = os.open(tmp_path / FOLDER / first.segment, os.O_RDONLY)
    with pytest.raises(LedgerError, match="cannot be written"):
        segments.write([random_group(1, episodes=1, tokens=3)])
    os.close(segments._file)
    segments._file = kept
    (second,) = segments.write([random_group(2, episodes=1, tokens=3)])
    segments.close()
    assert second.start == first.start + first.length
    assert damage(tmp_path, first) == damage(tmp_path, second) == ""
