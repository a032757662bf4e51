"""Where workers may live: pools by name, and bundles that fill machines."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contraflow.errors import ClusterError
from contraflow.runtime.pools import Berths, plan_berths, pool_of

P5EN = {"CPU": 192.0, "GPU": 8.0, "contraflow_train": 8.0}
ROLL = {"CPU": 192.0, "GPU": 8.0, "contraflow_rollout": 8.0}
HEAD = {"contraflow_control": 16.0}


def test_a_worker_s_pool_is_known_by_its_name() -> None:
    names = {"buffer": "buffer", "trainer": "train", "trainer-3": "train", "rollout-0": "rollout", "rollout-1-2": ""}
    assert {name: pool_of(name) for name in names} == names
    assert pool_of("reward-model") == "reward"
    assert (pool_of("drill"), pool_of("trainer-x")) == ("", "")


def test_workers_that_fit_share_one_machine_and_others_fill_whole_ones() -> None:
    machines = [HEAD, P5EN, P5EN, ROLL]
    one = plan_berths("trainer", 8, machines, ["train", "rollout"])
    assert one == Berths(({"contraflow_train": 8.0, "GPU": 8.0},), 8, spread=False)
    two = plan_berths("trainer", 16, machines, ["train"])
    assert two == Berths(({"contraflow_train": 8.0, "GPU": 8.0},) * 2, 8, spread=True)
    assert [two.bundle_of(rank) for rank in (0, 7, 8, 15)] == [0, 0, 1, 1]
    assert two.one == {"contraflow_train": 1.0, "GPU": 1.0}


def test_on_a_cluster_without_pools_workers_live_wherever_a_processor_is() -> None:
    berths = plan_berths("rollout-0", 1, [{"CPU": 4.0}], ())
    assert list(berths.bundles[0]) == ["CPU"]
    assert berths.bundles[0]["CPU"] < 0.01
    assert plan_berths("rollout-0", 1, [{"CPU": 4.0, "GPU": 2.0}], ["rollout"]).bundles == ({"GPU": 1.0},)


@pytest.mark.parametrize(("size", "room"), [(12, 8), (9, 8)])
def test_ranks_that_leave_machines_half_full_are_refused(size: int, room: int) -> None:
    said = re.escape(f"no place for {size} workers of 'trainer'") + f".* has room for {room}"
    with pytest.raises(ClusterError, match=said):
        plan_berths("trainer", size, [P5EN, P5EN], ["train"])


def test_a_pool_of_gpus_on_machines_without_is_refused() -> None:
    with pytest.raises(ClusterError, match="has room for 0"):
        plan_berths("trainer", 1, [{"contraflow_train": 8.0}], ["train"])


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 48))
def test_every_rank_has_one_place_and_no_machine_is_overfull(room: int, count: int, size: int) -> None:
    machines = [{"contraflow_train": float(room)}] * count
    if size > room and size % room:
        with pytest.raises(ClusterError):
            plan_berths("trainer", size, machines, ())
        return
    berths = plan_berths("trainer", size, machines, ())
    of = [berths.bundle_of(rank) for rank in range(size)]
    assert of == sorted(of)
    assert max(of) == len(berths.bundles) - 1
    for bundle, offered in enumerate(berths.bundles):
        assert of.count(bundle) * berths.one["contraflow_train"] == offered["contraflow_train"] <= room
