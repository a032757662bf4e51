"""The choice of a dispatch follows what was measured, says why, and hides nothing."""

import itertools

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contraflow.dispatch.base import Phase
from contraflow.dispatch.choose import CANDIDATES, CLOSE, Entry, Shape, Table, calibrate, candidates
from contraflow.dispatch.domains import Topology
from contraflow.dispatch.exchange import Links
from contraflow.dispatch.virtual import VirtualWorld
from contraflow.errors import DispatchError

SHAPE = Shape(experts=8, choices=2, dim=16, expert_ffn=8)


def table(*entries: Entry) -> Table:
    return Table(shape=SHAPE, domains=(0, 0, 1, 1), entries=entries)


def entry(kind: str, tokens: int, seconds: float, **more: str) -> Entry:
    return Entry(kind=kind, phase="decode", tokens=tokens, seconds=seconds, **more)


@given(st.lists(st.floats(1e-4, 1.0), min_size=len(CANDIDATES), max_size=len(CANDIDATES)))
def test_nothing_much_faster_is_passed_over(seconds: list[float]) -> None:
    measured = table(*(entry(kind, 64, s) for kind, s in zip(CANDIDATES, seconds, strict=True)))
    chosen = measured.pick("decode", 64)
    assert dict(zip(CANDIDATES, seconds, strict=True))[chosen.kind] <= min(seconds) * (1 + CLOSE)
    assert all(kind in chosen.reason for kind in CANDIDATES)


@pytest.mark.parametrize(("tokens", "expected"), [(0, 1), (1, 1), (5, 1), (9, 64), (64, 64), (4096, 64)])
def test_the_measured_size_nearest_in_ratio_decides(tokens: int, expected: int) -> None:
    measured = table(entry("all_to_all", 1, 0.1), entry("hierarchical", 1, 0.2), entry("all_to_all", 64, 0.4),
                     entry("hierarchical", 64, 0.2))  # fmt: skip
    chosen = measured.pick("decode", tokens)
    assert (chosen.kind, f"at {expected} tokens" in chosen.reason) == (
        "all_to_all" if expected == 1 else "hierarchical",
        True,
    )


def test_of_equals_the_simpler_is_taken() -> None:
    measured = table(entry("hierarchical", 1, 0.100), entry("all_to_all", 1, 0.102))
    assert measured.pick("decode", 1).kind == "all_to_all"


def test_a_form_that_cannot_run_is_told_and_never_chosen() -> None:
    measured = table(entry("hierarchical", 1, 0.0, refused="domains hold [1, 2] ranks"), entry("all_to_all", 1, 9.0))
    assert measured.pick("decode", 1).kind == "all_to_all"
    assert "hierarchical cannot run here: domains hold [1, 2] ranks" in measured.lines()


def test_a_phase_that_was_not_measured_is_an_error() -> None:
    with pytest.raises(DispatchError, match="no usable form for train"):
        table(entry("all_to_all", 1, 0.1)).pick("train", 1)


@pytest.mark.parametrize(
    ("topology", "refused"), [(Topology.even(4, 2), set()), (Topology((0, 0, 0, 1)), {"hierarchical", "overlapped"})]
)
def test_a_calibration_times_every_form_and_is_the_same_on_all_ranks(topology: Topology, refused: set[str]) -> None:
    def work(links: Links) -> Table:
        ticks = itertools.count(0.0)
        sizes: dict[Phase, list[int]] = {"train": [4], "prefill": [8], "decode": [0, 1]}
        return calibrate(links, SHAPE, sizes, clock=lambda: next(ticks), seed=1, repeats=1)

    tables = VirtualWorld(topology).run(work)
    assert all(found == tables[0] for found in tables)
    found = tables[0]
    assert {e.kind for e in found.entries} == set(CANDIDATES) - {"nvlink"}  # not on a CPU, nor where there is training
    assert {e.kind for e in found.entries if e.refused} == refused
    assert not any(e.kind == "overlapped" and not e.refused for e in found.entries if e.phase == "train")
    assert {(e.phase, e.tokens) for e in found.entries} == {("train", 4), ("prefill", 8), ("decode", 0), ("decode", 1)}
    assert msgspec.json.decode(msgspec.json.encode(found), type=Table) == found
    assert len(found.lines()) == 5 + len(refused)


def test_shared_memory_is_tried_on_gpus_of_one_domain_where_nobody_trains() -> None:
    def tried(domain_ranks: int, phases: tuple[Phase, ...], device: str) -> bool:
        found = VirtualWorld(Topology.even(4, domain_ranks)).run(
            lambda links: candidates(links, phases, torch.device(device))
        )
        return "nvlink" in found[0]

    assert tried(4, ("prefill", "decode"), "cuda")
    assert not tried(4, ("prefill", "decode"), "cpu")
    assert not tried(4, ("train", "decode"), "cuda")
    assert not tried(2, ("decode",), "cuda")
