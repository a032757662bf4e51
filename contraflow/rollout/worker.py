"""The rollout worker: turns a ticket into a scored group in the buffer, and looks at held-out tasks.

Takes tickets and manifests by call; puts groups into the buffer itself, worker to worker, and answers with summaries.
Knows tokens, versions and rewards; no algorithm, no trainer. Whatever breaks inside an episode stays inside its group.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from contraflow import config
from contraflow.buffer.service import Buffer
from contraflow.envs.draws import derive_seed
from contraflow.envs.registry import make_env
from contraflow.errors import EngineError, PayloadError
from contraflow.model.tokenizer import Tokenizer
from contraflow.rewards.model import Asked
from contraflow.rewards.registry import open_mix
from contraflow.rollout.engine import Remembers
from contraflow.rollout.episode import Limits, Stage, broken_episode
from contraflow.rollout.examine import Exam, examine, judge
from contraflow.rollout.group import play_group
from contraflow.rollout.guard import make_guard
from contraflow.rollout.handover import part_of
from contraflow.rollout.harvest import Harvest
from contraflow.rollout.open_engine import open_engine, open_served_engine
from contraflow.rollout.open_table import open_table
from contraflow.rollout.pupil import Pupil
from contraflow.rollout.refresh import ChunkFetcher, Refresher, RefreshReport
from contraflow.rollout.report import Drained, EvalReport, GroupSummary, RolloutReport, summarise
from contraflow.rollout.shift import Moves, Shift, Shifts
from contraflow.rollout.wanted import is_wanted
from contraflow.runtime.base import Address, Host, Ref, Rendezvous
from contraflow.telemetry import Account, Clock
from contraflow.types import Group, Manifest, StopReason, Task, Ticket, Version
from contraflow.weights import open_carrier

_BUFFER_S = 30.0  # deadline of a call to the buffer, which answers at once unless its disk is stuck
_FEWEST = 2  # whole episodes of a group: fewer have nobody to be compared with
_CAUSES = (
    "rest",
    "refresh",
    "evaluate",
    "drain",
    "play",
)  # what the worker is charged for when it does several; else "idle"

if TYPE_CHECKING:
    from contraflow.rollout.intake import PartFetcher, Route
    from contraflow.rollout.native import NativeEngine
    from contraflow.rollout.rank import EngineRank


class RolloutWorker:
    """Plays groups of episodes on one engine.

    Invariants: a group is put into the buffer whole or not at all; cancelling `run_group` or `evaluate` ends their
    requests in the engine; at most `rollout.concurrency` groups are played at a time, the rest wait their turn.
    """

    def __init__(
        self,
        stage: Stage,
        refresher: Refresher,
        buffer: Ref[Buffer],
        *,
        rollout: config.Rollout,
        seed: int,
        clock: Clock,
        pupil: Pupil | None = None,
        parts: "PartFetcher | None" = None,
    ) -> None:
        """`parts`: what the refresher fetches with, if each rank of the engine is sent its own part."""
        self._parts = parts
        self._stage = stage
        self._refresher = refresher
        self._buffer = buffer
        self._rollout = rollout
        self._seed = seed
        self._pupil = pupil
        self._account = Account(clock, "idle")
        self._active: Counter[str] = Counter()
        self._slots = asyncio.Semaphore(rollout.concurrency)
        self._shifts = Shifts(Moves.of(rollout))
        self._harvest = Harvest()
        self._looks = 0
        self._steady = asyncio.Lock()  # held by whoever needs the version to stay, or changes it

    async def run_group(self, ticket: Ticket) -> GroupSummary:
        """Play the G episodes of a ticket, score them, put them into the buffer.

        An engine that lags begins nothing. Raises: EngineError before a first refresh; what the buffer raises; what
        `Harvest` raises.
        """
        shift = self._shifts.begin()
        try:
            async with shift.limit, self._slots:
                if not shift.start(self._rollout.group_deadline_s):
                    shift.handed_back = True
                    return GroupSummary(ticket=ticket, lagging=True)
                with self._doing("play"):
                    if not await is_wanted(ticket, self._stage, self._buffer, deadline_s=_BUFFER_S):
                        shift.settle()
                        return GroupSummary(ticket=ticket)
                    version = self._serving()
                    try:
                        left = await self._buffer.call(_BUFFER_S, Buffer.started, ticket.group, ticket.attempt, version)
                    except EngineError:  # the buffer knows of an engine that serves a newer version
                        return GroupSummary(ticket=ticket, lagging=True)
                    except PayloadError as fault:
                        return GroupSummary(ticket=ticket, given_up=f"damaged: {fault}")
                    seeds = self._seeds(ticket.group)
                    group = await play_group(ticket, self._stage, shift, seeds=seeds, left=left, told=self._told)
                    shift.settle()
                    return shift.told(await self._deliver(group))
        except TimeoutError:
            if not shift.limit.expired():
                raise
            shift.settle()
            return shift.told(await self._overdue(ticket, shift))
        finally:
            self._shifts.end(shift)

    async def drain(self, grace_s: float) -> Drained:
        """Begin no group any more; end, at the latest after `grace_s`, those that are played.

        What is not finished by then answers its `run_group` as given up. Returns once none is left.
        """
        with self._doing("drain"):
            return await self._shifts.leave(grace_s)

    async def halt(self) -> Drained:
        """End every group now and begin none until `set_out`: what is there of them is handed back."""
        with self._doing("drain"):
            return await self._shifts.halt()

    async def set_out(self) -> None:
        """Begin groups again after `halt`, on an engine that computes as if it had just been started."""
        engine = self._stage.engine
        if isinstance(engine, Remembers):
            await engine.forget()
        self._shifts.go_on()

    async def evaluate(self, first: int, count: int, samples: int = 1, temperature: float = 0.0) -> EvalReport:
        """Answer test tasks `first` ... `first + count - 1`, greedily once each, or sampled `samples` times.

        One version answers all of them: a refresh that comes meanwhile waits. Raises: EngineError.
        """
        async with self._steady:
            with self._doing("evaluate"):
                version = self._serving()
                self._looks += 1
                at_once = self._rollout.concurrency * self._rollout.episodes
                exam = Exam(
                    first=first,
                    count=count,
                    samples=samples,
                    temperature=temperature,
                    seed=self._seed,
                    at_once=at_once,
                )
                answers = await examine(exam, self._stage, key=f"look-{self._looks}", told=self._told)
                return judge(answers, exam, serving=version)

    async def lead(self, mates: tuple[Address, ...]) -> None:
        """Learn where the other ranks of this worker's engine answer: before the first `refresh`."""
        if self._parts is not None:
            self._parts.meet(mates)

    async def meet_scorer(self, address: Address) -> None:
        """Learn where the reward model answers, after it was started again."""
        if self._stage.asked is not None:
            self._stage.asked.meet(address)

    async def refresh(self, manifest: Manifest) -> RefreshReport:
        """Bring the engine to a version. Raises: CarrierError, DeadlineExceeded; it then serves what it served."""
        async with self._steady:
            with self._doing("refresh"):
                return await self._refresher.refresh(manifest)

    async def rest(self) -> int:
        """Leave the device to the trainer until `wake`; gives the bytes freed. What is asked meanwhile waits."""
        with self._doing("rest"):
            return await self._native.rest()

    async def wake(self) -> None:
        """Go on."""
        with self._doing("rest"):
            await self._native.wake()

    async def report(self) -> RolloutReport:
        """Counters, accounts and what is being done, at any time."""
        doing = ", ".join(f"{cause} {self._active[cause]}" for cause in _CAUSES if self._active[cause])
        return RolloutReport(
            doing=doing or "idle",
            seconds=self._account.seconds(),
            engine=self._stage.engine.report(),
            groups=self._harvest.groups,
            stops=dict(self._harvest.stops),
            lost_threads=self._stage.guard.lost_threads,
            sessions=dict(self._stage.table.desk.counts) if self._stage.table is not None else {},
        )

    async def close(self) -> None:
        """Stop the engine, then let go of the weights it served."""
        if self._stage.table is not None:
            await self._stage.table.close()
        await self._stage.engine.close()
        self._refresher.close()
        if self._parts is not None:
            self._parts.close()
        self._stage.guard.close()

    @property
    def _native(self) -> "NativeEngine":
        from contraflow.rollout.native import NativeEngine

        engine = self._stage.engine
        if not isinstance(engine, NativeEngine):
            raise EngineError(f"{type(engine).__name__} cannot give its memory away; set engine.offload = 'none'")
        return engine

    def _serving(self) -> Version:
        version = self._stage.engine.version
        if version is None:
            raise EngineError("no weights are served yet; refresh this worker first")
        return version

    async def _deliver(self, group: Group) -> GroupSummary:
        await self._buffer.call(_BUFFER_S, Buffer.put, group)
        self._harvest.add(group)
        return summarise(group)

    async def _overdue(self, ticket: Ticket, shift: Shift) -> GroupSummary:
        """What becomes of a group that was not whole in time: by `rollout.overdue`, unless the worker leaves."""
        policy, deadline_s = self._rollout.overdue, self._rollout.group_deadline_s
        if shift.drained and not shift.began:
            shift.handed_back = True
            return GroupSummary(ticket=ticket, lagging=True)
        played = [(draft.seed, shift.episode(place)) for place, (draft, _) in enumerate(shift.places)]
        cut = sum(episode is None for _, episode in played) if played else self._rollout.episodes
        if shift.drained or policy == "continue":
            shift.handed_back = cut > 0
            return await self._hand_back(ticket, shift, cut)
        if policy == "drop":
            await self._buffer.call(_BUFFER_S, Buffer.drop, ticket.group, ticket.attempt, "overdue")
            return GroupSummary(ticket=ticket, cut=cut)
        whole = [episode for _, episode in played if episode is not None and not episode.failed]
        if policy == "repose" or len(whole) < _FEWEST or shift.task is None:
            return GroupSummary(ticket=ticket, given_up="deadline", cut=cut)
        late = EngineError(f"not finished within rollout.group_deadline_s = {deadline_s:g}")
        episodes = [episode or broken_episode(seed, late, StopReason.ABORTED) for seed, episode in played]
        group = Group(ticket=ticket, task=shift.task, episodes=tuple(episodes))
        return msgspec.structs.replace(await self._deliver(group), cut=cut)

    async def _hand_back(self, ticket: Ticket, shift: Shift, cut: int) -> GroupSummary:
        """Let another worker go on with a group from what is there of it, if that is worth it; deliver a whole one."""
        episodes = [shift.so_far(place) for place in range(len(shift.places))]
        if shift.task is not None and not cut:
            return await self._deliver(Group(ticket=ticket, task=shift.task, episodes=tuple(episodes)))
        least = self._rollout.continue_from
        part = None if shift.task is None else part_of(ticket, shift.task, episodes, least=least)
        late = 0 if shift.drained else cut
        if part is None:
            return GroupSummary(ticket=ticket, given_up="drained" if shift.drained else "deadline", cut=late)
        await self._buffer.call(_BUFFER_S, Buffer.hand_back, part)
        return GroupSummary(ticket=ticket, handed_back=True, cut=late)

    def _seeds(self, group: int) -> list[int]:
        return [derive_seed(self._seed, "episode", group, place) for place in range(self._rollout.episodes)]

    @contextmanager
    def _told(self, group: str, task: Task) -> Iterator[None]:
        """While a group is played, the scripted engine's pupil knows the answer. Nobody else is told."""
        if self._pupil is None:
            yield
            return
        self._pupil.learn(group, self._stage.tokenizer.encode(task.reference))
        try:
            yield
        finally:
            self._pupil.forget(group)

    @contextmanager
    def _doing(self, cause: str) -> Iterator[None]:
        self._count(cause, +1)
        try:
            yield
        finally:
            self._count(cause, -1)

    def _count(self, cause: str, step: int) -> None:
        self._active[cause] += step
        self._account.switch(next((cause for cause in _CAUSES if self._active[cause]), "idle"))


def make_rollout_worker(  # noqa: PLR0913 - the sections of a recipe that are this worker's, each by its name
    host: Host,
    *,
    rollout: config.Rollout,
    engine: config.Engine,
    env: config.Env,
    reward: config.Reward,
    weights: config.Weights,
    model_folder: str,
    run_folder: str,
    seed: int,
    buffer: Address,
    stepping: Literal["thread", "inline"] = "thread",
    rendezvous: Rendezvous | None = None,
    route: "Route | None" = None,
    scorer: Address | None = None,
    kind_by: str = "",
) -> RolloutWorker:
    """A worker that serves nothing until its first `refresh`. `stepping` "inline" keeps everything on one thread.

    `rendezvous`: where the other ranks of its engine are, if there are any. `route`: where its weights come from, if
    each rank is sent its own part. `scorer`: where the reward model answers. `kind_by`: see `Stage`.
    Raises: ConfigError, ModelError; with a `route` DeadlineExceeded.
    """
    world = make_env(env.name, env.options)
    asked = None if scorer is None else Asked(reward.model, host.connect, host.clock, first=scorer)
    mix = open_mix(reward, model=asked)
    guard = make_guard(world, mix, deadline_s=env.step_deadline_s, context_tokens=engine.context_tokens)
    tokenizer = Tokenizer.load(Path(model_folder))
    if engine.served:
        opened, expected, pupil = open_served_engine(engine, Path(model_folder), Path(run_folder), host)
    else:
        opened, expected, pupil = open_engine(
            engine, Path(model_folder), tokenizer, host, stepping, rendezvous, whole=route is None
        )
    parts = None if route is None else _open_parts(route, engine, Path(model_folder), host)
    refresher = Refresher(
        opened,
        parts or ChunkFetcher(open_carrier(weights, Path(run_folder)), stepping),
        clock=host.clock,
        expected=expected,
        deadline_s=weights.refresh_deadline_s,
        wire=engine.parallel.wire,
    )
    table = open_table(
        world,
        Path(model_folder),
        rollout=rollout,
        deadline_s=env.step_deadline_s,
        sign=Path(run_folder) / f"sessions-{host.name}.url",
    )
    limits = Limits.of(rollout, engine)
    stage = Stage(
        engine=opened, tokenizer=tokenizer, guard=guard, limits=limits, table=table, asked=asked, kind_by=kind_by
    )
    ref = host.connect(buffer)
    return RolloutWorker(stage, refresher, ref, rollout=rollout, seed=seed, clock=host.clock, pupil=pupil, parts=parts)


def make_rollout_rank(
    host: Host,
    *,
    rendezvous: Rendezvous,
    engine: config.Engine,
    model_folder: str,
    route: "Route | None" = None,
    **rest: Any,
) -> "RolloutWorker | EngineRank":
    """One rank of a worker whose engine is spread: rank 0 is the worker, the others compute for it.

    `rest` as for `make_rollout_worker`.
    """
    if rendezvous.rank > 0:
        from contraflow.rollout.rank import EngineRank, load_rank

        rank = load_rank(engine, Path(model_folder), rendezvous, clock=host.clock)
        intake = None
        if route is not None:
            from contraflow.rollout.intake import open_intake

            intake = open_intake(route, engine, rank.core.config, rank=rendezvous.rank)
        return EngineRank(rank, host, intake)
    return make_rollout_worker(
        host, rendezvous=rendezvous, engine=engine, model_folder=model_folder, route=route, **rest
    )


def _open_parts(route: "Route", section: config.Engine, folder: Path, host: Host) -> "PartFetcher":
    from contraflow.model.folder import read_config
    from contraflow.rollout.intake import PartFetcher, open_intake

    return PartFetcher(open_intake(route, section, read_config(folder), rank=0), route, host.connect)
