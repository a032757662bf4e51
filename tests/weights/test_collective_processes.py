"""A version between real processes over gloo: it arrives whole, and an engine that is killed breaks nothing else."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.weights.carried import (
    Trainer,
    an_engine_killed_in_mid_transfer_is_named_and_its_successor_served,
    versions_arrive_and_damage_is_named,
)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(tmp_path, torch.device("cpu"), ("cpu", "cpu"), "cpu")
    yield made
    made.close()


@pytest.mark.slow  # the other test has the first half of it
def test_versions_arrive_and_damage_is_named(trainer: Trainer) -> None:
    versions_arrive_and_damage_is_named(trainer)


def test_an_engine_killed_in_mid_transfer_is_named_and_its_successor_served(trainer: Trainer) -> None:
    an_engine_killed_in_mid_transfer_is_named_and_its_successor_served(trainer)
