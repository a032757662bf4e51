"""The rollout worker beside a real buffer and a real carrier, on the inline runtime, with the scripted engine."""

import asyncio
import itertools
import sys
import time
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from contraflow import config
from contraflow.buffer.service import Buffer, make_buffer
from contraflow.errors import ConfigError, DeadlineExceeded, EngineError, ModelError, TaskError
from contraflow.model.tokenizer import Tokenizer, build_char_tokenizer
from contraflow.rollout.worker import RolloutWorker, make_rollout_worker
from contraflow.runtime.inline import InlineRuntime
from contraflow.types import Probe, StopReason, Ticket, Version
from contraflow.weights import open_carrier
from contraflow.weights.publish import publish

CALL_S = 20.0


class Bench:
    """A buffer, a worker and a publisher that belong together."""

    def __init__(self, runtime, buffer, worker, carrier):
        self.runtime, self.buffer, self.worker = runtime, buffer, worker
        self._carrier = carrier

    def publish(self, n):
        return publish(
            {"w": torch.zeros(3)},
            version=Version(0, n),
            parent=None,
            model="none",
            probe=Probe((), (), 0.0),
            carrier=self._carrier,
            chunk_bytes=1 << 10,
        )

    async def refresh(self, n):
        return await self.worker.call(CALL_S, RolloutWorker.refresh, self.publish(n))

    async def admit(self):
        return await self.buffer.call(CALL_S, Buffer.admit, 1.0)

    async def play(self, ticket):
        return await self.worker.call(CALL_S, RolloutWorker.run_group, ticket)

    async def take(self):
        """The groups of step 0, as the trainer would get them."""
        take = await self.buffer.call(CALL_S, Buffer.take, 0, 1.0)
        return await self.buffer.call(CALL_S, Buffer.fetch, take.groups)

    async def counts(self):
        return await self.buffer.call(CALL_S, Buffer.counts)

    async def report(self):
        return await self.worker.call(CALL_S, RolloutWorker.report)

    async def until(self, doing):
        """Ask what the worker does, each time one turn of the loop later, until it is this."""
        async with asyncio.timeout(CALL_S):
            while (await self.report()).doing != doing:
                pass


@pytest.fixture
def run(tmp_path):
    """Run `scene(bench)` against freshly started workers."""

    @asynccontextmanager
    async def opened(env, reward, rollout, engine, groups, clock):
        folder = next(folders)
        build_char_tokenizer(folder / "model")
        runtime = InlineRuntime(clock)
        section = config.Buffer(groups_per_step=groups, max_age=2, no_signal="keep")
        buffer = await runtime.start("buffer", make_buffer, buffer=section, folder=str(folder), resume_step=None)
        carrier = open_carrier(config.Weights(), folder)
        carrier.claim()
        try:
            worker = await runtime.start(
                "rollout-0",
                make_rollout_worker,
                rollout=rollout,
                engine=engine,
                env=env,
                reward=reward,
                weights=config.Weights(),
                model_folder=str(folder / "model"),
                run_folder=str(folder),
                seed=7,
                buffer=buffer.address,
                stepping="inline",
            )
            yield Bench(runtime, buffer, worker, carrier)
        finally:
            await runtime.close()
            carrier.close()

    folders = (tmp_path / f"run-{count}" for count in itertools.count())

    def run(scene, *, env=None, parts=None, rollout=None, engine=None, groups=4, clock=time.monotonic):
        async def main():
            env_ = env if isinstance(env, config.Env) else config.Env(name=env or "arithmetic", step_deadline_s=0.2)
            reward = config.Reward(parts=parts or {"correct": 1.0})
            rollout_ = config.Rollout(episodes=4, **(rollout or {}))
            engine_ = config.Engine(kind="scripted", **(engine or {}))
            async with opened(env_, reward, rollout_, engine_, groups, clock) as bench:
                return await scene(bench)

        return asyncio.run(main())

    return run


@pytest.fixture
def mine(tmp_path):
    """Write an environment or reward of the test's own; gives the name a recipe would use."""

    def write(body, attribute):
        (tmp_path / "mine.py").write_text(body)
        return f"{tmp_path}/mine.py:{attribute}"

    return write


ENV = """
import asyncio, threading, time
from contraflow.envs.base import Observation
from contraflow.types import Task

class Mine:
    name = "mine"
    bounded = False
    def __init__(self, options): pass
    def task(self, split, index): return Task(key=f"{split}/{index}", prompt="1+1=", reference="2")
    def open(self, task): return self
    def step(self, action): return Observation("", True)
"""


def test_a_group_goes_whole_into_the_buffer_and_the_summary_tells_of_it(run):
    async def scene(bench):
        await bench.refresh(0)
        ticket = await bench.admit()
        summary = await bench.play(ticket)
        assert (await bench.counts()).ready == 1
        return ticket, summary, await bench.take()

    ticket, summary, (group,) = run(scene, groups=1)
    assert group.ticket == ticket == Ticket(group=0, attempt=1, line=0)
    assert group.task.key == "train/0"
    assert len(group.episodes) == 4
    assert len({episode.seed for episode in group.episodes}) == 4
    assert summary.reward == pytest.approx(np.mean([episode.reward for episode in group.episodes]))
    assert summary.tokens == sum(int(episode.trained.sum()) for episode in group.episodes)
    assert (summary.episodes, summary.failed, summary.lagging, summary.stops) == (4, 0, False, {"stop": 4})
    assert group.oldest == Version(0, 0)


def test_another_attempt_plays_the_same_episodes(run):
    async def scene(bench, losses):
        await bench.refresh(0)
        for attempt in range(losses):
            await bench.admit()
            await bench.buffer.call(CALL_S, Buffer.lost, 0, attempt + 1, "worker_died")
        await bench.play(await bench.admit())
        return (await bench.take())[0]

    group, again = (run(lambda bench, n=n: scene(bench, n), groups=1) for n in (0, 1))
    assert again.ticket == Ticket(group=0, attempt=2, line=0)
    assert [episode.seed for episode in group.episodes] == [episode.seed for episode in again.episodes]
    assert [e.tokens.tolist() for e in group.episodes] == [e.tokens.tolist() for e in again.episodes]


def test_nothing_is_played_before_a_version_is_served(run):
    async def scene(bench):
        ticket = await bench.admit()
        for call in (bench.play(ticket), bench.worker.call(CALL_S, RolloutWorker.evaluate, 0, 2)):
            with pytest.raises(EngineError, match="refresh this worker first"):
                await call
        assert (await bench.counts()).running == 1

    run(scene)


def test_an_engine_that_lags_begins_no_group(run):
    async def scene(bench):
        await bench.refresh(0)
        for _ in range(4):
            await bench.play(await bench.admit())
        take = await bench.buffer.call(CALL_S, Buffer.take, 0, 1.0)
        await bench.buffer.call(CALL_S, Buffer.trained, take.step, Version(0, 1))
        await bench.buffer.call(CALL_S, Buffer.served, Version(0, 1))  # by another engine
        ticket = await bench.admit()
        lagging = await bench.play(ticket)
        await bench.refresh(1)
        caught_up = await bench.play(ticket)
        return lagging, caught_up

    lagging, caught_up = run(scene)
    assert (lagging.lagging, lagging.episodes) == (True, 0)
    assert (caught_up.lagging, caught_up.episodes) == (False, 4)


def test_the_reward_rises_with_the_version_and_accuracy_is_that_of_held_out_tasks(run):
    async def scene(bench):
        reports = []
        for n in (0, 40):
            await bench.refresh(n)
            reports.append(await bench.worker.call(CALL_S, RolloutWorker.evaluate, 0, 200))
        again = await bench.worker.call(CALL_S, RolloutWorker.evaluate, 0, 200)
        assert (await bench.counts()).posed == 0
        return (*reports, again)

    first, last, again = run(scene, parts={"format": 1.0})
    assert first.accuracy == pytest.approx(0.25, abs=0.08)
    assert last.accuracy > 0.95
    assert last == again
    assert (first.version, last.version) == (Version(0, 0), Version(0, 40))
    assert (last.first, last.count, last.failed) == (0, 200, 0)
    assert last.parts == {"correct": last.accuracy, "format": 1.0}
    assert last.reward == 1.0


def test_an_evaluation_of_no_tasks_is_empty(run):
    async def scene(bench):
        await bench.refresh(0)
        return await bench.worker.call(CALL_S, RolloutWorker.evaluate, 5, 0)

    report = run(scene)
    assert (report.count, report.accuracy, report.version) == (0, 0.0, Version(0, 0))


@pytest.mark.parametrize(
    ("change", "stop"),
    [
        ("Mine.step = lambda self, action: 1 / 0", StopReason.ENV_ERROR),
        ("Mine.step = lambda self, action: 'nonsense'", StopReason.ENV_ERROR),
        ("Mine.step = lambda self, action: time.sleep(0.5)", StopReason.ENV_ERROR),
        ("Mine.open = lambda self, task: None", StopReason.ENV_ERROR),
        ("Mine.task = lambda self, split, index: 1 / 0", StopReason.ENV_ERROR),
        ("Mine.task = lambda self, split, index: time.sleep(0.5)", StopReason.ENV_ERROR),
        (
            "Mine.task = lambda self, split, index: Task(key='k', prompt='1' * 300, reference='1')",
            StopReason.ENGINE_ERROR,
        ),
    ],
)
def test_a_broken_environment_costs_the_group_and_never_the_worker(run, mine, change, stop):
    async def scene(bench):
        await bench.refresh(0)
        for _ in range(2):
            summary = await bench.play(await bench.admit())
            assert summary.failed == 4
            assert summary.stops == {stop: 4}
        counts, report = await bench.counts(), await bench.report()
        assert counts.dropped == {"no_episodes": 2}
        assert counts.tickets_busy == 0
        assert report.stops == {stop: 8}
        looked = await bench.worker.call(CALL_S, RolloutWorker.evaluate, 0, 3)
        assert (looked.count, looked.failed, looked.accuracy) == (3, 3, 0.0)

    env = config.Env(name=mine(f"{ENV}\n{change}\n", "Mine"), step_deadline_s=0.1)
    run(scene, env=env)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("Mine.step = lambda self, action: 1 / 0", TaskError),
        ("Mine.task = lambda self, split, index: Task(key='k', prompt='1' * 300, reference='1')", EngineError),
    ],
)
def test_when_nothing_works_any_more_the_worker_says_so(run, mine, change, error):
    async def scene(bench):
        await bench.refresh(0)
        for _ in range(63):
            await bench.play(await bench.admit())
        with pytest.raises(error, match="64 groups in a row had not one whole episode; the last failed with: "):
            await bench.play(await bench.admit())

    run(scene, env=config.Env(name=mine(f"{ENV}\n{change}\n", "Mine")))


def test_a_broken_reward_is_counted_and_the_rest_of_the_group_is_kept(run, mine):
    part = mine("def odd(task, transcript): return float('nan') if transcript.answer != task.reference else 1.0", "odd")

    async def scene(bench):
        await bench.refresh(0)
        tickets = [await bench.admit() for _ in range(4)]
        summaries = [await bench.play(ticket) for ticket in tickets]
        return summaries, await bench.take()

    summaries, groups = run(scene, parts={part: 1.0})
    failed = [episode for group in groups for episode in group.episodes if episode.failed]
    assert 0 < len(failed) < 16
    assert {episode.stop for episode in failed} == {StopReason.REWARD_ERROR}
    assert sum(summary.failed for summary in summaries) == len(failed)
    assert {summary.reward for summary in summaries if summary.failed < 4} == {1.0}


def test_a_callers_deadline_ends_the_groups_requests_and_the_worker_goes_on(run, mine):
    slow = "async def step(self, action):\n    await asyncio.sleep(60)\nMine.step = step"

    async def scene(bench):
        await bench.refresh(0)
        ticket = await bench.admit()
        with pytest.raises(DeadlineExceeded, match="run_group"):
            await bench.worker.call(0.1, RolloutWorker.run_group, ticket)
        for _ in range(5):
            await asyncio.sleep(0)
        report = await bench.report()
        assert (report.doing, report.engine.running, report.groups) == ("idle", 0, 0)
        assert (await bench.counts()).running == 1  # the loop tells the buffer that it is lost

    run(scene, env=config.Env(name=mine(f"{ENV}\n{slow}\n", "Mine"), step_deadline_s=50.0))


def test_groups_beyond_the_concurrency_wait_their_turn(run, mine):
    gauge = (
        "playing = most = 0\n"
        "async def step(self, action):\n"
        "    global playing, most\n"
        "    playing += 1\n"
        "    most = max(most, playing)\n"
        "    await asyncio.sleep(0.01)\n"
        "    playing -= 1\n"
        "    return Observation('', True)\n"
        "Mine.step = step\n"
    )

    async def scene(bench):
        await bench.refresh(0)
        tickets = [await bench.admit() for _ in range(6)]
        await asyncio.gather(*(bench.play(ticket) for ticket in tickets))
        assert (await bench.counts()).ready == 6
        return await bench.report()

    name = mine(f"{ENV}\n{gauge}", "Mine")
    report = run(scene, env=config.Env(name=name), rollout={"concurrency": 2})
    assert 1 < sys.modules[name.rpartition(":")[0]].most <= 8
    assert (report.groups, report.stops) == (6, {"stop": 24})


def test_what_the_worker_does_is_told_and_charged(run):
    now = 0.0

    async def scene(bench):
        nonlocal now
        await bench.refresh(0)
        playing = asyncio.ensure_future(bench.play(await bench.admit()))
        await bench.until("play 1")
        now += 5
        looking = asyncio.ensure_future(bench.worker.call(CALL_S, RolloutWorker.evaluate, 0, 50))
        await bench.until("evaluate 1, play 1")
        now += 3
        await asyncio.gather(playing, looking)
        now += 2
        report = await bench.report()
        assert report.doing == "idle"
        assert report.seconds == {"idle": 2, "refresh": 0, "play": 5, "evaluate": 3}
        assert report.engine.version == Version(0, 0)
        assert report.engine.tokens > 0

    run(scene, clock=lambda: now)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"env": "arithmatic"}, ConfigError, "did you mean 'arithmetic'"),
        ({"parts": {"corect": 1.0}}, ConfigError, "did you mean 'correct'"),
        ({"engine": {"routes": True}}, ConfigError, "needs engine.kind = 'native'"),
    ],
)
def test_a_recipe_that_does_not_fit_starts_no_worker(run, change, error, words):
    async def scene(bench):
        raise AssertionError("not reached")

    with pytest.raises(error, match=words):
        run(scene, **change)


def test_a_model_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)


# One episode of a group, the one of the given place, ends when told to; the others end at once.
LATE = """
places = 0
late = asyncio.Event()
async def step(self, action):
    global places
    places += 1
    if places % 4 == 0:
        await late.wait()
    return Observation("", True)
Mine.step = step
"""


def late_env(mine, which="places % 4 == 0"):
    body = LATE.replace("places % 4 == 0", which)
    return config.Env(name=mine(f"{ENV}\n{body}\n", "Mine"), step_deadline_s=60.0)


@pytest.mark.parametrize("overdue", ["repose", "continue", "partial", "drop"])
def test_a_group_beyond_its_deadline_is_posed_again_continued_trained_in_part_or_dropped(run, mine, overdue):
    async def scene(bench):
        await bench.refresh(0)
        summary = await bench.play(await bench.admit())
        counts = await bench.counts()
        return summary, counts, await bench.take() if counts.ready else None

    rollout = {"overdue": overdue, "group_deadline_s": 0.3, "continue_from": 1}
    summary, counts, groups = run(scene, env=late_env(mine), rollout=rollout, groups=1)
    assert summary.cut == 1
    held = (counts.ready, counts.running, counts.dropped)
    if overdue == "repose":  # the loop says so to the buffer
        assert (summary.given_up, *held) == ("deadline", 0, 1, {})
    if overdue == "continue":
        assert (summary.handed_back, *held, counts.waiting) == (True, 0, 0, {}, 1)
    if overdue == "drop":
        assert (summary.given_up, *held) == ("", 0, 0, {"overdue": 1})
    if overdue == "partial":
        assert (summary.given_up, summary.episodes, summary.failed) == ("", 4, 1)
        (group,) = groups
        (cut,) = [episode for episode in group.episodes if episode.failed]
        assert (cut.stop, cut.error) == (StopReason.ABORTED, "not finished within rollout.group_deadline_s = 0.3")
        assert len({episode.seed for episode in group.episodes}) == 4


def test_a_group_with_fewer_than_two_whole_episodes_is_never_trained_in_part(run, mine):
    async def scene(bench):
        await bench.refresh(0)
        summary = await bench.play(await bench.admit())
        assert (summary.given_up, summary.cut) == ("deadline", 3)
        assert (await bench.counts()).running == 1

    run(scene, env=late_env(mine, "places > 1"), rollout={"overdue": "partial", "group_deadline_s": 0.3})


@pytest.mark.parametrize("continue_from", [0, 1])
def test_a_worker_told_to_leave_finishes_what_it_can_and_hands_back_the_rest(run, mine, continue_from):
    async def scene(bench):
        await bench.refresh(0)
        tickets = [await bench.admit() for _ in range(5)]
        plays = [asyncio.ensure_future(bench.play(ticket)) for ticket in tickets]
        await bench.until("play 3")
        began = time.monotonic()
        drained = await bench.worker.call(CALL_S, RolloutWorker.drain, 0.5)
        assert time.monotonic() - began < 5
        summaries = await asyncio.gather(*plays)
        late = await bench.play(await bench.admit())
        return drained, summaries, late, await bench.counts()

    env = late_env(mine, "places in (1, 2)")
    rollout = {"concurrency": 3, "continue_from": continue_from}
    drained, summaries, late, counts = run(scene, env=env, rollout=rollout)
    given_up = [summary.given_up for summary in summaries].count("drained")
    moved = sum(summary.handed_back for summary in summaries)
    assert counts.reposed == ({"handed_back": moved} if continue_from else {})
    assert (given_up == 0) if continue_from else (moved == 0)
    given_up += moved
    unbegun = sum(summary.lagging for summary in summaries)
    assert 1 <= given_up <= 2
    assert (drained.handed_back, drained.finished) == (given_up + unbegun, 5 - given_up - unbegun)
    assert counts.ready == drained.finished
    assert late.lagging


def test_a_refresh_waits_until_an_evaluation_has_its_answers(run):
    async def scene(bench):
        await bench.refresh(0)
        looking = asyncio.ensure_future(bench.worker.call(CALL_S, RolloutWorker.evaluate, 0, 40, 2, 1.0))
        await asyncio.sleep(0)
        refreshing = asyncio.ensure_future(bench.refresh(40))
        return await looking, await refreshing, await bench.worker.call(CALL_S, RolloutWorker.evaluate, 0, 40)

    first, refreshed, last = run(scene)
    assert refreshed.served
    assert (first.version, last.version) == (Version(0, 0), Version(0, 40))
    assert (first.samples, first.passed[2] >= first.passed[1]) == (2, True)
    assert last.accuracy > 0.9 > first.accuracy
