"""What carriers share: lanes, the names of runs and versions, and the choice a recipe makes."""

import threading
import time
from pathlib import Path

import pytest

from contraflow.config import Weights
from contraflow.errors import CarrierError, ConfigError
from contraflow.types import Version
from contraflow.weights import open_carrier
from contraflow.weights.carrier import check_run_id, derive_run_id, in_lanes, parse_version


def test_lanes_keep_order_run_together_and_stop_at_the_first_failure() -> None:
    meet = threading.Barrier(3, timeout=10)

    def work(index: int) -> int:
        meet.wait()
        return index * index

    assert in_lanes(3, 6, work) == [0, 1, 4, 9, 16, 25]
    assert in_lanes(3, 0, work) == []
    begun: list[int] = []

    def fail(index: int) -> None:
        begun.append(index)
        time.sleep(0.005)  # or lanes could be through with all of them before anyone hears of the first
        raise CarrierError(f"chunk {index}")

    with pytest.raises(CarrierError, match="chunk 0"):
        in_lanes(1, 100, fail)
    assert begun == [0]
    with pytest.raises(CarrierError, match="chunk 0"):
        in_lanes(2, 1000, fail)
    assert len(begun) < 1000


def test_the_recipe_chooses_the_carrier(tmp_path: Path) -> None:
    assert open_carrier(Weights(), tmp_path).kind == "memory"
    assert open_carrier(Weights(carrier="blob"), tmp_path).kind == "blob"
    assert open_carrier(Weights(carrier="blob", url="s3://bucket/prefix"), tmp_path, run_id="r7").kind == "blob"


def test_a_run_id_is_the_same_for_the_same_folder_however_it_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "my run: ü"
    folder.mkdir()
    assert derive_run_id(folder) == derive_run_id(folder / ".." / folder.name)
    assert derive_run_id(folder) != derive_run_id(tmp_path / "my run: ö")
    check_run_id(derive_run_id(folder))


@pytest.mark.parametrize("run_id", ["", "a/b", "..", ".x", "a b", "x" * 65])
def test_a_run_id_that_is_no_name_is_refused(run_id: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run id"):
        open_carrier(Weights(), tmp_path, run_id=run_id)


@pytest.mark.parametrize("text", ["", "1", "1.", "1.2.3", "-1.2", "1.2.weights", "a.b"])
def test_what_is_no_version_is_not_read_as_one(text: str) -> None:
    assert parse_version(text) is None
    assert parse_version("12.345") == Version(12, 345)
