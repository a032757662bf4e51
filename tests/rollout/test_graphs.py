"""Which sizes of a pass are captured and when; a capture here notes what it is asked for."""

from collections.abc import Callable

import pytest

from contraflow.rollout.graphs import SPARE_BYTES, Graphs

ROWS = 64


class Rig:
    """A pass that notes its size, a capture that runs nothing, and a device with so much memory left."""

    def __init__(self, *, free: int = SPARE_BYTES, most: int = 9) -> None:
        self.ran: list[int] = []
        self.captured: list[int] = []
        self.replayed: list[int] = []
        self.left = free
        self.graphs = Graphs(self.ran.append, rows=ROWS, capture=self.capture, free=lambda: self.left, most=most)

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        call()
        rows = self.ran.pop()
        self.captured.append(rows)
        return lambda: self.replayed.append(rows)


def test_a_size_runs_as_it_is_once_and_is_replayed_from_then_on() -> None:
    rig = Rig()
    for rows in (ROWS, 8, 8, 4, 8, ROWS, 4):
        rig.graphs.run(rows)
    assert rig.ran == rig.captured == [ROWS, 8, 4]
    assert rig.replayed == [8, 8, ROWS, 4]
    assert rig.graphs.told == "3 CUDA graphs"


def test_the_first_pass_has_the_most_rows_so_that_smaller_ones_find_memory() -> None:
    rig = Rig()
    rig.graphs.run(2)
    rig.graphs.run(2)
    rig.graphs.run(2)
    assert rig.captured == [ROWS, 2]
    assert rig.replayed == [2]


def test_without_memory_to_spare_nothing_more_is_captured_and_it_says_so() -> None:
    rig = Rig()
    rig.graphs.run(ROWS)
    rig.left = SPARE_BYTES - 1
    for _ in range(3):
        rig.graphs.run(8)
    rig.left = SPARE_BYTES
    rig.graphs.run(4)
    rig.graphs.run(ROWS)
    assert rig.ran == [ROWS, 8, 8, 8, 4]
    assert (rig.captured, rig.replayed) == ([ROWS], [ROWS])
    assert rig.graphs.told == "1 CUDA graphs; other sizes eager: 2047 MiB of device memory are free, 2048 must stay so"


def test_a_device_that_is_full_from_the_start_runs_what_is_asked_for() -> None:
    rig = Rig(free=0)
    for _ in range(3):
        rig.graphs.run(8)
    assert rig.ran[1:] == [8, 8]
    assert not rig.captured


@pytest.mark.parametrize("most", [1, 3])
def test_no_more_graphs_are_held_than_agreed(most: int) -> None:
    rig = Rig(most=most)
    for rows in (ROWS, 1, 2, 4, 8):
        rig.graphs.run(rows)
    assert len(rig.captured) == most
    assert rig.graphs.told.endswith(f"{most} sizes are captured")
