"""What holds only on one machine is refused where there are several, before a worker starts."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from contraflow.buffer.accounts import accounts
from contraflow.buffer.ledger import FILE
from contraflow.config import Recipe, check_recipe
from contraflow.errors import CheckpointError, ConfigError
from contraflow.machines import check_machines, gpu_pools
from contraflow.run import run_recipe
from contraflow.runtime.base import Host, Ref
from contraflow.runtime.inline import InlineRuntime
from contraflow.runtime.warden import Warden
from tests.test_loop import Silent, Ticks, recipe_of


class Elsewhere(Warden):
    """The warden of a machine that has another disk and another memory; `has`: what its own disk has."""

    def __init__(self, folder: Path, has: Sequence[str]) -> None:
        super().__init__(folder)
        self._has = has

    async def sees(self, path: str) -> bool:
        return path in self._has


def make_warden(host: Host, *, folder: str, has: Sequence[str] | None) -> Warden:
    return Warden(Path(folder)) if has is None else Elsewhere(Path(folder), has)


class Machine:
    def __init__(self, host: str, warden: Ref[Warden], offers: Mapping[str, float]) -> None:
        self.host, self.warden, self.offers = host, warden, offers


class Cluster:
    """Machines as a runtime gives them; workers live here."""

    def __init__(self, machines: list[Machine], runtime: InlineRuntime) -> None:
        self._machines = machines
        self.start, self.stop = runtime.start, runtime.stop

    async def machines(self) -> Any:
        return self._machines


def check(
    folder: Path, settings: dict[str, Any], *, far: Sequence[str] = (), resume: bool = False, homes: int = 1
) -> None:
    """With this machine and others for the buffer, `homes` of them, which have the files `far`."""

    async def scene() -> None:
        runtime = InlineRuntime()
        try:
            here = await runtime.start("here", make_warden, folder=str(folder / "w1"), has=None)
            there = await runtime.start("there", make_warden, folder=str(folder / "w2"), has=list(far))
            machines = [
                Machine("10.0.0.1", here, {"contraflow_train": 8.0}),
                *[Machine(f"10.0.0.{2 + n}", there, {"contraflow_buffer": 8.0}) for n in range(homes)],
            ]
            await check_machines(check_recipe(settings), folder, Cluster(machines, runtime), resume=resume)
        finally:
            await runtime.close()

    asyncio.run(scene())


APART = {"weights": {"carrier": "blob", "url": "s3://b/w"}, "train": {"checkpoint_url": "s3://b/c"}}


def test_one_machine_may_have_all_that_is_its_own(tmp_path: Path) -> None:
    async def scene() -> None:
        runtime = InlineRuntime()
        here = await runtime.start("here", make_warden, folder=str(tmp_path / "w"), has=None)
        cluster = Cluster([Machine("10.0.0.1", here, {"CPU": 2.0})], runtime)
        await check_machines(Recipe(), tmp_path / "run", cluster, resume=False)
        assert list((tmp_path / "run").iterdir()) == []  # the mark it looked for is gone
        await runtime.close()

    asyncio.run(scene())


def test_a_recipe_that_keeps_everything_where_all_reach_it_passes(tmp_path: Path) -> None:
    check(tmp_path / "run", APART)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"weights": {"carrier": "memory"}},
            "weights.carrier = 'memory' stays on one machine, and 10.0.0.2 is another",
        ),
        ({"weights": {"carrier": "blob"}}, "weights.carrier = 'blob' without weights.url writes to RUN/weights"),
        ({"train": {}}, "train.checkpoint_url is not set, so cuts go to RUN/checkpoints"),
    ],
)
def test_what_stays_on_one_machine_is_named_with_what_to_use(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match="this run is over 2 machines") as caught:
        check(tmp_path / "run", {**APART, **change})
    assert said in str(caught.value)
    assert str(caught.value).count(";") == 0  # that one thing only


def test_a_resumed_run_needs_its_ledger_wherever_the_buffer_may_live(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no ledger in .*run on 10.0.0.2, 10.0.0.3, where the buffer may live"):
        check(tmp_path / "run", APART, resume=True, homes=2)
    check(tmp_path / "run", APART, far=[str(tmp_path / "run" / FILE)], resume=True, homes=2)


def test_the_ledger_is_brought_from_the_newest_cut_to_the_one_machine_that_the_buffer_lives_on(
    tiny_moe: Path, tmp_path: Path
) -> None:
    cuts = {"checkpoint_url": str(tmp_path / "cuts"), "checkpoint_every": 2}
    recipe = recipe_of(tiny_moe, run={"steps": 2, "eval_tasks": 0}, buffer={"max_age": 0}, train=cuts)
    run_recipe(recipe, tmp_path / "run", resume=False, clock=Ticks(), view=Silent())
    with pytest.raises(CheckpointError, match="holds no whole cut to bring a ledger from"):
        check(tmp_path / "far", {**APART, "train": {"checkpoint_url": str(tmp_path / "other")}}, resume=True)
    check(tmp_path / "far", {**APART, "train": cuts}, resume=True)
    assert accounts(tmp_path / "far").trained == accounts(tmp_path / "run").trained == 2 * 4


def test_pools_with_a_gpu_are_those_whose_device_is_one() -> None:
    assert gpu_pools(Recipe()) == ()
    settings = {"train": {"device": "cuda"}, "engine": {"device": "cuda"}}
    assert gpu_pools(check_recipe(settings)) == ("train", "rollout")
