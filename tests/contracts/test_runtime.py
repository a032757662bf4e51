"""What every runtime promises, run on each of them: the suite for the seam in contraflow/runtime/base.py."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contraflow import errors
from contraflow.errors import (
    ChannelError,
    ContraflowError,
    DeadlineExceeded,
    ModelError,
    RemoteError,
    TrainingError,
    WorkerDied,
)
from contraflow.runtime import open_runtime
from contraflow.runtime.base import Address
from contraflow.runtime.drill import Drill, make_drill
from contraflow.types import Episode, Group, Span, StopReason, Task, Ticket, Turn, Version
from tests.ray_head import needs_ray

pytestmark = pytest.mark.usefixtures("fork_server")
Scene = Callable[[Any], Awaitable[None]]
Play = Callable[[Scene], None]


@dataclass
class Section:
    kind: str
    threads: int = 1
    hang_s: float = 60.0


@pytest.fixture(params=["inline", "local", pytest.param("ray", marks=[pytest.mark.ray, needs_ray])])
def play(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Run a scene on a fresh runtime of each kind, and close it. Those on Ray join one head in turn."""
    if request.param == "ray":
        request.getfixturevalue("ray_head").point(monkeypatch)

    def run(scene: Scene) -> None:
        async def whole() -> None:
            runtime = open_runtime(Section(request.param), tmp_path)
            try:
                async with asyncio.timeout(60):
                    await scene(runtime)
            finally:
                await runtime.close()

        asyncio.run(whole())

    return run


# Calls


def test_a_call_gives_the_result_of_the_method(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        ref = await runtime.start("drill", make_drill)
        assert await ref.call(5, Drill.add, 3, b=4) == 7
        assert await ref.call(5, Drill.add, 3) == 5
        assert await ref.call(5, Drill.name) == "drill"
        assert ref.address.worker == "drill"

    play(scene)


def test_the_clock_given_to_the_runtime_is_the_clock_of_its_workers(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        ref = await runtime.start("drill", make_drill)
        before = time.monotonic()
        assert before <= await ref.call(5, Drill.clock) <= time.monotonic()

    play(scene)


def test_arrays_keep_their_dtype_shape_and_values(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        ref = await runtime.start("drill", make_drill)
        draw = np.random.default_rng(0)
        shapes: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (5, 7), (70, 3, 101)]
        for shape in shapes:
            for dtype in ("bool", "uint8", "uint16", "int32", "int64", "float16", "float32", "float64", "complex64"):
                sent = np.asarray(draw.random(shape) * 100).astype(dtype)
                got = await ref.call(5, Drill.echo, sent)
                assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
                np.testing.assert_array_equal(got, sent)

    play(scene)


def test_strided_and_transposed_arrays_arrive_with_the_same_values(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        ref = await runtime.start("drill", make_drill)
        whole = np.arange(200_000, dtype=np.float32).reshape(400, 500)
        for sent in (whole.T, whole[::3, ::-2], whole[5:6], whole[:, 7]):
            np.testing.assert_array_equal(await ref.call(5, Drill.echo, sent), sent)

    play(scene)


def test_a_payload_of_a_hundred_megabytes_goes_through(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        ref = await runtime.start("drill", make_drill)
        sent = np.arange(25_000_000, dtype=np.float32)
        got = await ref.call(60, Drill.echo, sent)
        assert got.nbytes == 100_000_000
        assert np.array_equal(got, sent)

    play(scene)


def test_structs_of_the_package_arrive_equal(play: Play) -> None:
    tokens = np.arange(9, dtype=np.int32)
    episode = Episode(
        seed=2**62,
        tokens=tokens,
        trained=tokens > 3,
        logprobs=np.linspace(-2, 0, 9, dtype=np.float32),
        spans=(Span(Version(1, 0), 4, 6), Span(Version(1, 1), 6, 9)),
        turns=(Turn("prompt", 0, 4), Turn("model", 4, 9)),
        stop=StopReason.STOP,
        reward=0.25,
        parts={"correct": 0.25},
        routes=np.arange(8 * 3 * 2, dtype=np.uint8).reshape(8, 3, 2),
    )
    group = Group(
        ticket=Ticket(group=3, attempt=1, line=1),
        task=Task(key="train/3", prompt="12+34=", reference="46", facts={"digits": "2"}),
        episodes=(episode,),
    )

    async def scene(runtime: Any) -> None:
        ref = await runtime.start("drill", make_drill)
        got = await ref.call(5, Drill.group, group)
        assert (got.ticket, got.task) == (group.ticket, group.task)
        (back,) = got.episodes
        for field in ("seed", "spans", "turns", "stop", "reward", "parts", "error"):
            assert getattr(back, field) == getattr(episode, field)
        for field in ("tokens", "trained", "logprobs", "routes"):
            np.testing.assert_array_equal(getattr(back, field), getattr(episode, field))
            assert getattr(back, field).dtype == getattr(episode, field).dtype

    play(scene)


@pytest.mark.parametrize("length", [4, 100_000])
def test_nothing_is_shared_between_caller_and_worker(play: Play, length: int) -> None:
    async def scene(runtime: Any) -> None:
        ref = await runtime.start("drill", make_drill)
        mine = np.ones(length, np.float32)
        result = await ref.call(5, Drill.keep, mine)
        mine[:] = 2
        result[:] = 3  # both belong to the caller, and can be written
        assert (await ref.call(5, Drill.kept))[:4] == [1, 1, 1, 1]

    play(scene)


def test_calls_to_one_worker_run_side_by_side(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        ref = await runtime.start("drill", make_drill)
        begin = time.monotonic()
        results = await asyncio.gather(*[ref.call(20, Drill.wait, 0.3) for _ in range(200)])
        assert results == ["waited"] * 200
        assert time.monotonic() - begin < 5  # 60 s one after the other

    play(scene)


def test_two_thousand_calls_at_once_are_answered_each_with_its_own_result(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        ref = await runtime.start("drill", make_drill)
        results = await asyncio.gather(*[ref.call(30, Drill.add, i, 1) for i in range(2000)])
        assert results == [i + 1 for i in range(2000)]

    play(scene)


# Failures of a call


def test_an_error_of_the_package_arrives_with_its_type_text_and_attributes(play: Play) -> None:
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, ContraflowError)]
    assert len(kinds) > 12

    async def scene(runtime: Any) -> None:
        ref = await runtime.start("drill", make_drill)
        for kind in kinds:
            with pytest.raises(kind, match="too many") as caught:
                await ref.call(5, Drill.fail, kind.__name__, "too many")
            assert type(caught.value) is kind
            assert "in fail" in "".join(caught.value.__notes__)  # the worker's traceback
            expected = {
                WorkerDied: {"worker": "somebody", "detail": "too many"},
                DeadlineExceeded: {"owner": "somebody", "cause": "too many", "seconds": 1.5},
                errors.ServerError: {"server": "somewhere", "kind": "late"},
                RemoteError: {"worker": "somebody", "method": "do", "type": "OSError", "text": "too many"},
            }.get(kind, {})
            assert {name: getattr(caught.value, name) for name in expected} == expected

    play(scene)


def test_any_other_exception_arrives_as_a_remote_error_that_tells_everything(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        ref = await runtime.start("drill", make_drill)
        with pytest.raises(RemoteError) as caught:
            await ref.call(5, Drill.fail, "ValueError", "seven is odd")
        error = caught.value
        assert (error.worker, error.method, error.type, error.text) == ("drill", "fail", "ValueError", "seven is odd")
        assert "in fail" in error.traceback

    play(scene)


def test_a_method_that_cancels_itself_fails_its_call(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        ref = await runtime.start("drill", make_drill)
        with pytest.raises(RemoteError, match="CancelledError"):
            await ref.call(5, Drill.cancel_self)

    play(scene)


def test_arguments_and_results_that_do_not_fit_are_refused(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        ref = await runtime.start("drill", make_drill)
        with pytest.raises(ChannelError, match=r"Expected `int`, got `str` - at `\$.a`"):
            await ref.call(5, Drill.add, "three")
        with pytest.raises(ChannelError, match="array of float32, got float64"):
            await ref.call(5, Drill.keep, np.zeros(3))
        with pytest.raises(ChannelError, match="no wire format"):
            await ref.call(5, Drill.add, object())
        with pytest.raises(TypeError, match=r"keyword argument .c."):
            await ref.call(5, Drill.add, 1, c=3)
        with pytest.raises(ChannelError, match="Expected `int`, got `str`"):
            await ref.call(5, Drill.nonsense)
        with pytest.raises(ChannelError, match="no wire format"):
            await ref.call(5, Drill.unspeakable)
        assert await ref.call(5, Drill.add, 1) == 3

    play(scene)


def test_a_method_the_worker_lacks_is_refused_with_those_it_has(play: Play) -> None:
    class Other:
        async def subtract(self) -> int:
            return 1

        async def _mark(self) -> None: ...

    async def scene(runtime: Any) -> None:
        ref = await runtime.start("drill", make_drill)
        with pytest.raises(ChannelError, match="no method 'subtract'; it has: add"):
            await ref.call(5, Other.subtract)
        with pytest.raises(ChannelError, match="no method '_mark'"):
            await ref.call(5, Other._mark)

    play(scene)


# Deadlines and cancellation


def test_a_call_past_its_deadline_names_caller_worker_and_method(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        ref = await runtime.start("drill", make_drill)
        with pytest.raises(DeadlineExceeded) as caught:
            await ref.call(0.1, Drill.wait, 30)
        assert (caught.value.owner, caught.value.cause, caught.value.seconds) == ("loop", "drill.wait", 0.1)

    play(scene)


def test_a_deadline_between_workers_names_the_worker_that_waited(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        near = await runtime.start("near", make_drill)
        far = await runtime.start("far", make_drill)
        with pytest.raises(DeadlineExceeded) as caught:
            await near.call(10, Drill.relay_wait, far.address, 30, 0.1)
        assert (caught.value.owner, caught.value.cause) == ("near", "far.wait")

    play(scene)


def test_the_method_is_cancelled_when_its_deadline_passes_or_its_caller_is_cancelled(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        ref = await runtime.start("drill", make_drill)
        with pytest.raises(DeadlineExceeded):
            await ref.call(0.1, Drill.wait, 30)
        call = asyncio.ensure_future(ref.call(30, Drill.wait, 30))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await ref.call(5, Drill.cancelled, 2) == 2

    play(scene)


def test_calls_cancelled_at_once_do_no_harm(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        ref = await runtime.start("drill", make_drill)
        for _ in range(20):
            calls = [asyncio.ensure_future(ref.call(30, Drill.wait, 30)) for _ in range(50)]
            await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        assert await ref.call(5, Drill.add, 1) == 3

    play(scene)


def test_cancelling_a_relayed_call_reaches_the_last_worker(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        near = await runtime.start("near", make_drill)
        far = await runtime.start("far", make_drill)
        with pytest.raises(DeadlineExceeded):
            await near.call(0.2, Drill.relay_wait, far.address, 30, 60)
        assert await far.call(5, Drill.cancelled, 1) == 1

    play(scene)


# Workers among themselves


def test_workers_call_each_other_by_address(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        near = await runtime.start("near", make_drill)
        far = await runtime.start("far", make_drill)
        assert await near.call(5, Drill.relay_add, far.address, 40) == 42
        assert await near.call(5, Drill.relay_add, near.address, 1) == 3  # itself

    play(scene)


def test_a_nonsense_address_is_refused(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        near = await runtime.start("near", make_drill)
        with pytest.raises(ChannelError, match="'far'"):
            await near.call(5, Drill.relay_add, Address("far", "nowhere"), 1)

    play(scene)


# Start and stop


def test_start_raises_what_the_factory_raised_and_frees_the_name(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        with pytest.raises(ModelError, match="drill cannot be made"):
            await runtime.start("drill", make_drill, fail="ModelError")
        with pytest.raises(RemoteError, match="drill cannot be made") as caught:
            await runtime.start("drill", make_drill, fail="ValueError")
        assert (caught.value.worker, caught.value.method, caught.value.type) == ("drill", "make_drill", "ValueError")
        ref = await runtime.start("drill", make_drill)
        assert await ref.call(5, Drill.add, 1) == 3

    play(scene)


def test_a_name_in_use_is_refused(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        await runtime.start("drill", make_drill)
        await runtime.start_gang("ranks", 2, make_drill)
        for start in (
            runtime.start("drill", make_drill),
            runtime.start("ranks", make_drill),
            runtime.start("ranks-1", make_drill),
            runtime.start_gang("ranks", 1, make_drill),
            runtime.start_gang("drill", 1, make_drill),
            runtime.start_gang("ranks-0", 1, make_drill),
        ):
            with pytest.raises(ChannelError, match="is alive"):
                await start
        with pytest.raises(ChannelError, match="0 workers"):
            await runtime.start_gang("none", 0, make_drill)

    play(scene)


def test_stop_closes_the_worker_fails_its_calls_and_frees_the_name(play: Play, tmp_path: Path) -> None:
    async def scene(runtime: Any) -> None:
        ref = await runtime.start("drill", make_drill, marker=str(tmp_path / "closed"))
        pending = asyncio.ensure_future(ref.call(30, Drill.wait, 30))
        await asyncio.sleep(0.1)
        await runtime.stop("drill")
        assert (tmp_path / "closed").read_text() == "drill"
        for call in (pending, ref.call(5, Drill.add, 1)):
            with pytest.raises(WorkerDied, match="'drill' died: stopped"):
                await call
        again = await runtime.start("drill", make_drill)
        assert again.address != ref.address
        assert await again.call(5, Drill.add, 1) == 3
        with pytest.raises(WorkerDied):
            await ref.call(5, Drill.add, 1)

    play(scene)


def test_stop_raises_what_close_raised_once_the_worker_is_gone(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        await runtime.start("drill", make_drill, marker="/nowhere/at/all")
        with pytest.raises(RemoteError, match="FileNotFoundError"):
            await runtime.stop("drill")
        ref = await runtime.start("drill", make_drill)
        assert await ref.call(5, Drill.add, 1) == 3

    play(scene)


def test_a_stop_is_not_reported_as_a_death(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        await runtime.start("drill", make_drill)
        await runtime.start_gang("ranks", 2, make_drill)
        await runtime.stop("drill")
        await runtime.stop("ranks")
        await runtime.stop("drill")  # twice is fine
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(runtime.next_death(), 0.3)

    play(scene)


def test_stopping_what_was_never_started_is_refused(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        with pytest.raises(ChannelError, match="nothing named 'ghost'"):
            await runtime.stop("ghost")
        with pytest.raises(ChannelError, match="nothing named 'ghost'"):
            runtime.kill("ghost")

    play(scene)


def test_close_closes_all_workers_and_may_be_called_twice(play: Play, tmp_path: Path) -> None:
    async def scene(runtime: Any) -> None:
        for name in ("one", "two"):
            await runtime.start(name, make_drill, marker=str(tmp_path / name))
        await runtime.close()
        await runtime.close()
        assert [(tmp_path / name).read_text() for name in ("one", "two")] == ["one", "two"]

    play(scene)


# Deaths


def test_a_worker_that_gives_up_is_reported_as_dead_with_its_reason(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        ref = await runtime.start("drill", make_drill)
        with pytest.raises(WorkerDied, match="gave up: there is no point"):
            await ref.call(5, Drill.give_up, "there is no point")
        death = await runtime.next_death()
        assert (death.worker, death.detail) == ("drill", "it gave up: there is no point")

    play(scene)


def test_a_killed_worker_is_named_within_two_seconds_with_what_it_was_doing(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        ref = await runtime.start("drill", make_drill)
        other = await runtime.start("other", make_drill)
        pending = [asyncio.ensure_future(ref.call(30, Drill.wait, 30)) for _ in range(3)]
        await asyncio.sleep(0.2)
        begin = time.monotonic()
        runtime.kill("drill")
        death = await runtime.next_death()
        assert time.monotonic() - begin < 2
        assert isinstance(death, WorkerDied)
        assert death.worker == "drill"
        assert "was running wait x3" in death.detail
        for call in (*pending, ref.call(30, Drill.add, 1)):
            with pytest.raises(WorkerDied, match=r"'drill' died: .*wait x3"):
                await call
        assert time.monotonic() - begin < 2
        assert await other.call(5, Drill.add, 1) == 3

    play(scene)


def test_calls_between_workers_fail_when_the_far_one_dies_or_is_dead(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        near = await runtime.start("near", make_drill)
        far = await runtime.start("far", make_drill)
        pending = asyncio.ensure_future(near.call(30, Drill.relay_wait, far.address, 30, 30))
        await asyncio.sleep(0.2)
        begin = time.monotonic()
        runtime.kill("far")
        with pytest.raises(WorkerDied, match=r"'far' died: .*was running wait"):
            await pending
        starting = time.monotonic()
        late = await runtime.start("late", make_drill)  # born after that death
        begin += time.monotonic() - starting  # a process that imports torch for itself takes seconds
        for caller in (near, late):
            with pytest.raises(WorkerDied, match="'far' died"):
                await caller.call(30, Drill.relay_add, far.address, 1)
        assert time.monotonic() - begin < 2

    play(scene)


def test_the_calls_of_a_dead_worker_are_cancelled(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        near = await runtime.start("near", make_drill)
        far = await runtime.start("far", make_drill)
        pending = asyncio.ensure_future(near.call(30, Drill.relay_wait, far.address, 30, 30))
        await asyncio.sleep(0.2)
        runtime.kill("near")
        with pytest.raises(WorkerDied):
            await pending
        assert await far.call(5, Drill.cancelled, 1) == 1

    play(scene)


def test_a_dead_worker_can_be_started_again(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        await runtime.start("drill", make_drill)
        runtime.kill("drill")
        await runtime.next_death()
        await runtime.stop("drill")  # nothing left to stop
        ref = await runtime.start("drill", make_drill)
        assert await ref.call(5, Drill.add, 1) == 3

    play(scene)


# Gangs


def test_a_collective_call_gives_results_by_rank(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        gang = await runtime.start_gang("ranks", 3, make_drill)
        assert await gang.call(5, Drill.rank) == [0, 1, 2]
        assert await gang.call(5, Drill.name) == ["ranks-0", "ranks-1", "ranks-2"]
        assert await gang.refs[1].call(5, Drill.rank) == 1

    play(scene)


def test_a_gang_of_one_meets_itself_in_torch_distributed(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        gang = await runtime.start_gang("ranks", 1, make_drill)
        assert await gang.call(30, Drill.sum, 2.5) == [2.5]
        await runtime.stop("ranks")

    play(scene)


def test_one_rank_s_error_fails_the_call_and_cancels_the_others_after_a_grace(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        gang = await runtime.start_gang("ranks", 2, make_drill)
        begin = time.monotonic()
        with pytest.raises(TrainingError, match="rank 1 has no gradient"):
            await gang.call(30, Drill.fail_on, 1, 30)
        assert time.monotonic() - begin < 5
        assert await gang.refs[0].call(5, Drill.cancelled, 1) == 1
        assert await gang.call(5, Drill.rank) == [0, 1]  # an error is not a death

    play(scene)


def test_one_rank_s_death_kills_the_gang_once_and_names_the_rank(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        gang = await runtime.start_gang("ranks", 3, make_drill)
        pending = asyncio.ensure_future(gang.call(30, Drill.wait, 30))
        await asyncio.sleep(0.2)
        begin = time.monotonic()
        runtime.kill("ranks-1")
        assert (await runtime.next_death()).worker == "ranks-1"
        for call in (pending, gang.call(5, Drill.rank), gang.refs[0].call(5, Drill.rank)):
            with pytest.raises(WorkerDied, match="'ranks-1' died"):
                await call
        assert time.monotonic() - begin < 2
        again = await runtime.start_gang("ranks", 2, make_drill)
        assert await again.call(5, Drill.rank) == [0, 1]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(runtime.next_death(), 0.3)

    play(scene)


def test_a_gang_with_a_rank_that_cannot_be_made_does_not_start(play: Play) -> None:
    async def scene(runtime: Any) -> None:
        with pytest.raises(ModelError, match="ranks-1 cannot be made"):
            await runtime.start_gang("ranks", 2, make_drill, fail="ModelError", fail_rank=1)
        gang = await runtime.start_gang("ranks", 2, make_drill)
        assert await gang.call(5, Drill.rank) == [0, 1]

    play(scene)
