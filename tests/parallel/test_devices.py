"""Which GPU a rank takes, and what is said when it is not there; no GPU is needed to know."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contraflow.config import Recipe, check_recipe
from contraflow.errors import ConfigError
from contraflow.parallel.devices import check_device, device_of, enter_device, same_gpu, visible_gpus, worker_setting
from contraflow.system import check_devices


@pytest.mark.parametrize(
    ("setting", "rank", "device"),
    [("cpu", 3, "cpu"), ("cuda", 0, "cuda:0"), ("cuda", 2, "cuda:2"), ("cuda:1", 0, "cuda:1"), ("cuda:5", 3, "cuda:8")],
)
def test_a_rank_takes_the_gpu_of_its_number_behind_the_first(setting: str, rank: int, device: str) -> None:
    assert device_of(setting, rank) == torch.device(device)


@given(
    first=st.integers(0, 6), ranks=st.integers(1, 4), spare=st.integers(0, 6), workers=st.integers(1, 9), data=st.data()
)
def test_workers_take_gpus_in_turn_and_ranks_of_one_worker_never_share(
    first: int, ranks: int, spare: int, workers: int, data: st.DataObject
) -> None:
    visible = first + ranks + spare
    check_device("engine.device", f"cuda:{first}", ranks=ranks, visible=visible)
    taken = []
    for worker in range(workers):
        setting = worker_setting(f"cuda:{first}", ranks=ranks, worker=worker, visible=visible)
        taken.append([device_of(setting, rank).index for rank in range(ranks)])
    flat = [gpu for worker in taken for gpu in worker]
    assert all(first <= gpu < visible for gpu in flat)
    assert all(len(set(worker)) == ranks for worker in taken)
    assert taken[0][0] == first
    if workers * ranks <= visible - first:
        assert len(set(flat)) == len(flat)
    assert worker_setting("cpu", ranks=ranks, worker=workers, visible=0) == "cpu"


@pytest.mark.parametrize(
    ("setting", "ranks", "visible", "says"),
    [
        ("cuda", 1, 0, "train.device = 'cuda' takes GPU 0, numbered from 0: 1 needed, torch sees 0"),
        ("cuda:1", 1, 1, "takes GPU 1, numbered from 0: 2 needed, torch sees 1"),
        ("cuda:1", 4, 4, "takes GPUs 1 to 4, one for each of 4 ranks, numbered from 0: 5 needed, torch sees 4"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_by_name(setting: str, ranks: int, visible: int, says: str) -> None:
    with pytest.raises(ConfigError) as fault:
        check_device("train.device", setting, ranks=ranks, visible=visible)
    assert says in str(fault.value)
    assert "CUDA_VISIBLE_DEVICES" in str(fault.value)
    check_device("train.device", setting, ranks=ranks, visible=visible + 5)
    check_device("train.device", "cpu", ranks=ranks, visible=0)


def test_both_pools_of_a_recipe_are_checked() -> None:
    check_devices(Recipe(), 0)
    spread = {"dp": 2, "ep": 2}
    recipe = check_recipe(
        {"train": {"device": "cuda", "parallel": spread}, "engine": {"device": "cuda:1", "parallel": spread}}
    )
    check_devices(recipe, 3)
    with pytest.raises(ConfigError, match=r"engine\.device = 'cuda:1' takes GPUs 1 to 2"):
        check_devices(recipe, 2)
    with pytest.raises(ConfigError, match=r"train\.device = 'cuda' takes GPUs 0 to 1"):
        check_devices(recipe, 1)


def test_one_process_is_on_one_gpu() -> None:
    def recipe(engine: str) -> Recipe:
        return check_recipe({"runtime": {"kind": "inline"}, "train": {"device": "cuda"}, "engine": {"device": engine}})

    with pytest.raises(ConfigError, match=r"'inline' is one process on one GPU, but train\.device = 'cuda'"):
        check_devices(recipe("cuda:1"), 2)
    for engine in ("cpu", "cuda", "cuda:0"):
        check_devices(recipe(engine), 1)


def test_a_run_on_the_cpu_does_not_touch_a_gpu() -> None:
    assert visible_gpus("cpu", "cpu") == 0
    enter_device(torch.device("cpu"))
    assert not torch.cuda.is_initialized()
    thread = threading.Thread(target=same_gpu())
    thread.start()
    thread.join(10)
    assert not torch.cuda.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_a_worker_that_is_given_a_gpu_it_has_not_says_so() -> None:
    with pytest.raises(ConfigError, match="device cuda:0 cannot be used"):
        enter_device(torch.device("cuda:0"))


@pytest.mark.parametrize(("train", "engine", "workers"), [("cuda", "cuda", 1), ("cuda:1", "cuda:0", 2)])
def test_parts_travel_between_different_gpus(train: str, engine: str, workers: int) -> None:
    def recipe(carrier: str) -> Recipe:
        tree = {"train": {"device": train}, "engine": {"device": engine}, "rollout": {"workers": workers}}
        return check_recipe(tree | {"weights": {"carrier": carrier}})

    check_devices(recipe("memory"), 2)
    with pytest.raises(ConfigError, match=r"both use GPU \d, and NCCL"):
        check_devices(recipe("collective"), 2)
