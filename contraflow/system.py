"""Opens and closes the parts of a run: the folder's lock, the runtime, buffer, trainer and rollout workers.

Takes a recipe and a folder, gives a `System` whose parts answer and whose first version is published. Does not run
anything: that is loop.py.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contraflow.beginning import Beginning, begin
from contraflow.buffer.service import Buffer, make_buffer
from contraflow.config import Engine, Recipe, Train, recipe_toml
from contraflow.errors import ConfigError, ContraflowError, RunFolderError, WorkerDied
from contraflow.machines import Spread, check_machines, gpu_pools
from contraflow.model.builtin import model_folder
from contraflow.model.folder import read_config
from contraflow.model.invariant import open_invariant
from contraflow.parallel.devices import check_device, first_gpu, visible_gpus, worker_setting
from contraflow.parallel.layout import check_fit
from contraflow.rewards.model import MODEL
from contraflow.rewards.scorer import Scorer, ScorerReport, make_scorer
from contraflow.rollout.intake import Route
from contraflow.rollout.open_served import check_servers
from contraflow.rollout.preflight import check_tasks
from contraflow.rollout.worker import RolloutWorker, make_rollout_rank, make_rollout_worker
from contraflow.run_folder import locked, sweep_workers, write_whole
from contraflow.runtime import open_runtime
from contraflow.runtime.base import Gang, Ref, Runtime
from contraflow.telemetry import Clock
from contraflow.train.lab import bench_of
from contraflow.train.learner import Place
from contraflow.train.worker import Trainer, make_trainer
from contraflow.types import Manifest
from contraflow.weights.memory import shared_folder, sweep

START_S = 120.0  # loading a model on a cold machine
BF16_TOLERANCE = 0.05  # measured: bf16 moves log-probabilities by 0.006 in the mean; single tokens of a model by more
SCORER = "reward-model"  # its process
BUFFERED = ("nvlink", "deepep")  # forms of dispatch whose memory is made once, for tokens of one dtype
LOSSY_TOLERANCE = 0.05  # of the probe: below it, rounding that differs between trainer and engine fails the proof
PRELOAD = ("torch", "contraflow.rollout.worker", "contraflow.train.worker")  # imported once, then forked


@dataclass
class System:
    """The started parts of one run. `rollouts` changes when a dead worker is replaced; nothing else does."""

    recipe: Recipe
    folder: Path
    runtime: Runtime
    line: int
    first_step: int
    buffer: Ref[Buffer]
    trainer: Gang[Trainer]
    manifest: Manifest
    writer: str  # of cuts, this start's own
    rollouts: dict[str, Ref[RolloutWorker]] = field(default_factory=dict)
    note: str = ""  # what a person should know about how it started
    scorer: Ref[Scorer] | None = None  # of the reward model
    scored_by: ScorerReport | None = None  # which it is, as it said when it was started
    starts: Counter[str] = field(default_factory=Counter)  # of rollout workers, by name

    async def start_rollout(self, name: str) -> None:
        """Start rollout worker `name`, or start it again after its death; it serves nothing until refreshed."""
        recipe, ranks = self.recipe, self.recipe.engine.parallel.ranks
        plan = dict[str, Any](
            rollout=recipe.rollout,
            engine=self._engine_of(name),
            env=recipe.env,
            reward=recipe.reward,
            weights=recipe.weights,
            model_folder=str(model_folder(recipe.model.folder)),
            run_folder=str(self.folder),
            seed=recipe.run.seed,
            buffer=self.buffer.address,
            kind_by=recipe.buffer.curriculum.by,
            stepping="inline" if recipe.runtime.kind == "inline" else "thread",
            scorer=None if self.scorer is None else self.scorer.address,
        )
        if recipe.weights.in_parts:
            plan["route"] = await self._route_to(name)
        if ranks == 1:
            self.rollouts[name] = await self.runtime.start(name, make_rollout_worker, **plan)
        else:
            gang: Gang[Any] = await self.runtime.start_gang(name, ranks, make_rollout_rank, **plan)
            self.rollouts[name] = gang.refs[0]
            mates = tuple(ref.address for ref in gang.refs[1:])
            await self.rollouts[name].call(START_S, RolloutWorker.lead, mates)

    async def start_scorer(self) -> None:
        """Start the reward model's process, or start it again after its death; rollout workers learn where it is."""
        section, before = self.recipe.reward.model, self.scored_by
        self.scorer = await self.runtime.start(SCORER, make_scorer, section=section)
        self.scored_by = found = await self.scorer.call(START_S, Scorer.report)
        if before is not None and found.digest != before.digest:
            raise ConfigError(
                f"reward.model.folder = {section.folder!r} was changed while the run went on: {before.digest} is now "
                f"{found.digest}; rewards of two models do not compare"
            )
        for rollout in self.rollouts.values():
            with suppress(WorkerDied):  # the loop hears of it, and starts it anew
                await rollout.call(START_S, RolloutWorker.meet_scorer, self.scorer.address)

    async def stop_rollout(self, name: str) -> str:
        """See rollout worker `name` out; what went wrong as it closed, which keeps nobody."""
        del self.rollouts[name]
        try:
            await self.runtime.stop(name)
        except ContraflowError as fault:
            return str(fault)
        return ""

    async def _route_to(self, name: str) -> Route:
        """The way from the trainer's ranks to the engine of `name`, made anew each time that it is started."""
        self.starts[name] += 1
        links = await self.trainer.call(START_S, Trainer.link, name, self.starts[name])
        return Route(
            carrier=self.recipe.weights.carrier,
            link=links[0],
            trainers=tuple(ref.address for ref in self.trainer.refs),
            parallel=self.recipe.train.parallel,
            device=self.recipe.train.device,
            dtype=self.recipe.weights.plain,
            bucket_bytes=self.recipe.weights.bucket_bytes,
            deadline_s=self.recipe.weights.refresh_deadline_s,
        )

    def _engine_of(self, name: str) -> Engine:
        """The engine's settings for one of the workers, on the GPUs that are its own."""
        recipe, engine = self.recipe, self.recipe.engine
        if engine.served:
            return _with_servers(engine, int(name.rpartition("-")[2]), recipe.rollout.workers)
        if recipe.runtime.kind != "local":  # of a cluster's GPUs each worker sees its own
            return engine
        device = worker_setting(
            engine.device,
            ranks=engine.parallel.ranks,
            worker=int(name.rpartition("-")[2]),
            visible=visible_gpus(engine.device),
        )
        return engine.model_copy(update={"device": device})

    def role_of(self, process: str) -> str:
        """The rollout worker that a process is a rank of, or the process itself."""
        name = process.rpartition("-")[0]
        return name if self.recipe.engine.parallel.ranks > 1 and name in self.rollouts else process


def _with_servers(engine: Engine, worker: int, workers: int) -> Engine:
    """Each worker updates the weights of its servers, so no two may share one."""
    own = engine.server.urls[worker::workers]
    return engine.model_copy(update={"server": engine.server.model_copy(update={"urls": own})})


@asynccontextmanager
async def open_system(recipe: Recipe, folder: Path, *, resume: bool, clock: Clock) -> AsyncIterator[System]:
    """Lock the folder, start every part, publish the first version; stop them all on the way out.

    Raises: RunFolderError (in use, not empty, or nothing to resume), and whatever a part raised while it started.
    """
    await check_tasks(recipe, model_folder(recipe.model.folder))
    check_layouts(recipe)
    check_proof(recipe)
    check_wire(recipe)
    if recipe.engine.served:
        check_servers(recipe.engine, model_folder(recipe.model.folder))
    check_devices(recipe, visible_gpus(recipe.train.device, recipe.engine.device))
    if resume and not (folder / "recipe.toml").is_file():
        raise RunFolderError(f"{folder} holds no run to resume; leave --resume out to start one")
    with locked(folder, resume=resume):
        sweep_workers(folder)
        runtime = open_runtime(recipe.runtime, folder, clock=clock, preload=PRELOAD, gpu_pools=gpu_pools(recipe))
        try:
            if isinstance(runtime, Spread):
                await check_machines(recipe, folder, runtime, resume=resume)
            if not resume:  # before anything is started: a run killed while it starts can be resumed
                write_whole(folder / "recipe.toml", recipe_toml(recipe))
            writer = secrets.token_hex(8)
            beginning = await asyncio.to_thread(begin, recipe.train, folder, resume=resume, writer=writer, clock=clock)
            system = await _start(recipe, folder, runtime, beginning, resume=resume)
            write_whole(folder / "recipe.toml", recipe_toml(recipe))
            yield system
        except BaseException as failure:
            try:
                await runtime.close()
            except ContraflowError as fault:  # what ended the run is the news; that stopping failed too is a note on it
                failure.add_note(f"while stopping: {fault}")
            if recipe.weights.carrier == "memory":
                sweep(shared_folder())  # a trainer that was killed could not let go of the versions it published
            raise
        else:
            await runtime.close()


def check_layouts(recipe: Recipe) -> None:
    """Raise ConfigError, naming the section, unless the model can be spread and computed as the recipe wants it."""
    model = read_config(model_folder(recipe.model.folder))
    if recipe.engine.bitwise:
        open_invariant(model)
    for section, parallel in (("train", recipe.train.parallel), ("engine", recipe.engine.parallel)):
        try:
            check_fit(model, parallel)
        except ConfigError as fault:
            raise ConfigError(f"{section}.parallel: {fault}") from None
    train, engine = recipe.train, recipe.engine
    for name, pool in (("train", train), ("engine", engine)):
        if (kind := pool.parallel.dispatch) in BUFFERED and pool.device == "cpu":
            raise ConfigError(f"{name}.parallel.dispatch = {kind!r} needs {name}.device = 'cuda': kernels for GPUs")
    if (kind := train.parallel.dispatch) in BUFFERED and train.compute != engine.compute:
        raise ConfigError(
            f"train.parallel.dispatch = {kind!r}: its buffers are of one precision, but the trainer computes in "
            f"{train.compute} and its proofs in the engine's {engine.compute}; make train.compute and engine.compute "
            "the same"
        )


def check_wire(recipe: Recipe) -> None:
    """Raise ConfigError if engines would fail each version's proof because tokens are rounded on their way to experts.

    Rounded alike they come out alike, up to the order of sums: so wire, form and ep must be the same on both sides.
    """
    train, engine = recipe.train.parallel, recipe.engine.parallel
    tolerance = recipe.weights.probe_tolerance
    alike = (train.wire, train.dispatch, train.ep) == (engine.wire, engine.dispatch, engine.ep)
    settled = alike and train.dispatch != "auto"
    lossy = {train.wire if train.ep > 1 else "same", engine.wire if engine.ep > 1 else "same"} != {"same"}
    if lossy and not settled and tolerance < LOSSY_TOLERANCE and recipe.engine.kind == "native":
        raise ConfigError(
            f"train.parallel: wire {train.wire!r}, dispatch {train.dispatch!r}, ep {train.ep}; engine.parallel: wire "
            f"{engine.wire!r}, dispatch {engine.dispatch!r}, ep {engine.ep}; weights.probe_tolerance = {tolerance}: "
            "tokens rounded on their way in one and otherwise in the other give other log-probabilities (0.02 to 2.3 "
            "were seen), and engines would refuse every version. Give both the same wire, dispatch (not 'auto') and "
            f"ep, or a tolerance of {LOSSY_TOLERANCE} and more"
        )


def check_devices(recipe: Recipe, visible: int) -> None:
    """Raise ConfigError, naming the setting, unless the GPUs that the recipe asks for are among `visible` ones."""
    train, engine = recipe.train.device, recipe.engine.device
    if recipe.runtime.kind == "ray":  # its machines have them, or no place is found
        return
    if recipe.runtime.kind == "inline" and len({first_gpu(train), first_gpu(engine)} - {None}) > 1:
        raise ConfigError(
            f"runtime.kind = 'inline' is one process on one GPU, but train.device = {train!r} and engine.device = "
            f"{engine!r}; use the same, or runtime.kind = 'local'"
        )
    for section, settings in (("train", recipe.train), ("engine", recipe.engine)):
        check_device(f"{section}.device", settings.device, ranks=settings.parallel.ranks, visible=visible)
    shared = _gpus(recipe.train, [train]) & _gpus(recipe.engine, _engine_settings(recipe, visible))
    if shared and recipe.weights.carrier == "collective":
        raise ConfigError(
            f"weights.carrier = 'collective' with train.device = {train!r} and engine.device = {engine!r}: both use "
            f"GPU {min(shared)}, and NCCL joins no two processes on one; use different GPUs, or another carrier"
        )


def _engine_settings(recipe: Recipe, visible: int) -> list[str]:
    engine, ranks = recipe.engine.device, recipe.engine.parallel.ranks
    return [worker_setting(engine, ranks=ranks, worker=n, visible=visible) for n in range(recipe.rollout.workers)]


def _gpus(section: Engine | Train, settings: Iterable[str]) -> set[int]:
    firsts = {first for setting in settings if (first := first_gpu(setting)) is not None}
    return {first + rank for first in firsts for rank in range(section.parallel.ranks)}


def check_proof(recipe: Recipe) -> None:
    """Raise ConfigError if an engine in bf16 would fail each version's proof because it rounds otherwise.

    The trainer computes the proof in the engine's precision. In bf16 that gives the same bits, or nearly, only if both
    add up in the same order; in fp32 the difference is far below the tolerance.
    """
    train, engine, tolerance = recipe.train, recipe.engine, recipe.weights.probe_tolerance
    kinds = [first_gpu(section.device) is None for section in (train, engine)]
    unlike = ""
    if engine.served:
        unlike = f"engine.kind = {engine.kind!r}"
    elif train.parallel.pp > 1:
        unlike = f"train.parallel.pp = {train.parallel.pp}"
    elif train.parallel.tp != engine.parallel.tp:
        unlike = f"engine.parallel.tp = {engine.parallel.tp} and train.parallel.tp = {train.parallel.tp}"
    elif kinds[0] != kinds[1]:
        unlike = f"engine.device = {engine.device!r} and train.device = {train.device!r}"
    if unlike and engine.compute == "bfloat16" and engine.kind != "scripted" and tolerance < BF16_TOLERANCE:
        raise ConfigError(
            f"weights.probe_tolerance = {tolerance} with engine.compute = 'bfloat16' and {unlike}: trainer and engine "
            f"round differently, so engines would refuse every version; set it to {BF16_TOLERANCE} or more, make the "
            "two alike, or use engine.compute = 'float32'"
        )


async def _start(recipe: Recipe, folder: Path, runtime: Runtime, at: Beginning, *, resume: bool) -> System:
    buffer = await runtime.start(
        "buffer",
        make_buffer,
        buffer=recipe.buffer,
        folder=str(folder),
        threaded=recipe.runtime.kind != "inline",
        **at.ledger(resume=resume, exact=recipe.train.exact_checkpoints),
    )
    line = await buffer.call(START_S, Buffer.line)
    trainer = await runtime.start_gang(
        "trainer",
        recipe.train.parallel.ranks,
        make_trainer,
        train=recipe.train,
        loss=recipe.loss,
        weights=recipe.weights,
        place=Place(
            model_folder=str(model_folder(recipe.model.folder)),
            run_folder=str(folder),
            seed=recipe.run.seed,
            line=line,
            temperature=recipe.rollout.temperature,
            keep_episodes=recipe.run.keep_episodes,
            resume=None if at.cut is None else at.cut.name,
            writer=at.writer,
            bench=bench_of(recipe),
            longest=recipe.engine.context_tokens,
            critic=recipe.critic,
            threaded=recipe.runtime.kind != "inline",
            proof=recipe.engine.compute,
            bitwise=recipe.engine.bitwise,
        ),
        buffer=buffer.address,
        engine=recipe.engine,
    )
    manifest = (await trainer.call(START_S, Trainer.publish, at.step))[0]
    assert manifest is not None, "rank 0 answers for all"
    system = System(recipe, folder, runtime, line, at.step, buffer, trainer, manifest, at.writer, note=at.note)
    if MODEL in recipe.reward.parts:
        await system.start_scorer()
    for rank in range(recipe.rollout.workers):
        await system.start_rollout(f"rollout-{rank}")
    system.note = "; ".join(filter(None, [system.note, *await _forms(system)]))
    return system


async def _forms(system: System) -> list[str]:
    """How tokens reach experts on other ranks, in each pool: what was asked for, what runs and why."""
    train = await system.trainer.refs[0].call(START_S, Trainer.report)
    rollouts = [await ref.call(START_S, RolloutWorker.report) for ref in system.rollouts.values()]
    told = [f"trainer: {line}" for line in train.forms]
    told += [f"engine: {line}" for rollout in rollouts[:1] for line in rollout.engine.forms]
    brief = [line.partition(" (")[0] for line in told]
    return brief if brief == told else [*brief, "the times are in the report"]
