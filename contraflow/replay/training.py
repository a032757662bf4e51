"""A run's recorded takes trained again from one of its cuts, and held to the cuts that followed.

Takes a run's folder and a cut's name; gives lines to print. Real trainers, on as many ranks as the recipe says, and
recorded groups: on the same machine the weights are the same bit for bit, and every later cut that is still there has
to say so. On demand each version also samples again what it had sampled, and is held to the record: see sampling.py.
"""

import asyncio
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from contraflow.buffer.recorded import Recorded, make_recorded
from contraflow.buffer.riding import RIDERS
from contraflow.config import Recipe, load_recipe
from contraflow.cuts import CutManifest, CutSpace, Part, open_cuts
from contraflow.errors import CheckpointError, LedgerError
from contraflow.model.builtin import model_folder
from contraflow.replay.sampling import Resampling, check_repeats, open_resampling
from contraflow.restoring import copy
from contraflow.runtime import open_runtime
from contraflow.runtime.base import Gang, Ref, Runtime
from contraflow.telemetry import Clock
from contraflow.train.checkpoint import Cut, cut_of
from contraflow.train.learner import Place
from contraflow.train.uploads import space_url
from contraflow.train.worker import Trainer, make_trainer
from contraflow.types import Manifest, Take

CALL_S = 120.0  # loading a model on a cold machine
Tell = Callable[[str], None]


def replay(run: Path, cut: str, *, clock: Clock, tell: Tell, sample: bool = False) -> int:
    """Train what the record holds after `cut` (such as line-0-step-8); the number of cuts found equal.

    `sample`: also sample it again. Raises CheckpointError when a later cut differs or the cut is not there, LedgerError
    when payloads were let go or damaged, ReplayError when other tokens or log-probabilities came out, ConfigError when
    the engine does not repeat.
    """
    recipe = load_recipe(run / "recipe.toml", [])
    if sample:
        check_repeats(recipe.engine)
    pause = threading.Event().wait
    space = open_cuts(space_url(recipe.train, run), clock=clock, pause=pause)
    with tempfile.TemporaryDirectory(prefix="contraflow-replay-") as scratch:
        copy(space, space.manifest(cut), open_cuts(str(Path(scratch) / "checkpoints"), clock=clock, pause=pause))
        return asyncio.run(_replay(recipe, run, Path(scratch), space, cut, clock=clock, tell=tell, sample=sample))


async def _replay(
    recipe: Recipe, run: Path, scratch: Path, space: CutSpace, name: str, *, clock: Clock, tell: Tell, sample: bool
) -> int:
    cut = cut_of(space.manifest(name))
    later = {cut_of(manifest).step: manifest for manifest in map(space.manifest, space.names())}
    runtime = open_runtime(recipe.runtime, scratch, clock=clock)
    train = recipe.train.model_copy(update={"checkpoint_url": ""})
    weights = recipe.weights.model_copy(update={"carrier": "blob", "url": "", "full_every": 1})
    recipe = recipe.model_copy(update={"train": train, "weights": weights})  # the run's own places are left alone
    try:
        record = await runtime.start(
            "buffer",
            make_recorded,
            folder=str(run),
            line=cut.line,
            first_step=cut.step,
            max_age=recipe.buffer.max_age,
        )
        takes = await record.call(CALL_S, Recorded.takes)
        if not takes:
            raise LedgerError(f"nothing is recorded after cut {name}: choose an earlier one of {space.names()}")
        trainer = await _start_trainer(runtime, recipe, scratch, record, cut)
        if not sample:
            return await _train(recipe, trainer, takes, later, None, tell)
        resampling = await open_resampling(runtime, recipe, scratch, record, takes, tell=tell)
        try:
            await resampling.follow(_first(await trainer.call(CALL_S, Trainer.publish, cut.step)))
            return await _train(recipe, trainer, takes, later, resampling, tell)
        finally:
            for line in resampling.table():
                tell(line)
    finally:
        await runtime.close()


async def _start_trainer(
    runtime: Runtime, recipe: Recipe, scratch: Path, record: Ref[Recorded], cut: Cut
) -> Gang[Trainer]:
    return await runtime.start_gang(
        "trainer",
        recipe.train.parallel.ranks,
        make_trainer,
        train=recipe.train,
        loss=recipe.loss,
        weights=recipe.weights,
        place=Place(
            model_folder=str(model_folder(recipe.model.folder)),
            run_folder=str(scratch),
            seed=recipe.run.seed,
            line=cut.line,
            temperature=recipe.rollout.temperature,
            keep_episodes=0,
            resume=cut.name,
            longest=recipe.engine.context_tokens,
            critic=recipe.critic,
            threaded=recipe.runtime.kind != "inline",
            proof=recipe.engine.compute,
            bitwise=recipe.engine.bitwise,
        ),
        buffer=record.address,
        engine=recipe.engine,
    )


async def _train(
    recipe: Recipe,
    trainer: Gang[Trainer],
    takes: list[Take],
    later: Mapping[int, CutManifest],
    resampling: Resampling | None,
    tell: Tell,
) -> int:
    equal = 0
    for take in takes:
        reports = await trainer.call(recipe.train.step_deadline_s, Trainer.step, take)
        manifest = later.get(take.step + 1)
        if manifest is None:
            tell(f"step {take.step}: {len(take.groups)} groups trained again")
        else:
            await trainer.call(CALL_S, Trainer.save, take.step + 1)
            by_rank = await trainer.call(CALL_S, Trainer.saved)
            _compare([part for parts in by_rank for part in parts], manifest.parts, manifest.id.name)
            equal += 1
            tell(f"step {take.step}: weights and optimizer are those of cut {manifest.id.name}, bit for bit")
        if resampling is not None:
            assert reports[0] is not None, "rank 0 answers for all"
            await resampling.follow(reports[0].manifest)
    if resampling is not None:
        resampling.check()
    return equal


def _first(by_rank: list[Manifest | None]) -> Manifest:
    assert by_rank[0] is not None, "rank 0 answers for all"
    return by_rank[0]


def _compare(again: list[Part], kept: tuple[Part, ...], name: str) -> None:
    made = {part.name: part.sha256 for part in again}
    was = {part.name: part.sha256 for part in kept if not part.name.startswith(f"{RIDERS}/")}
    if differing := sorted(key for key in made.keys() | was.keys() if made.get(key) != was.get(key)):
        raise CheckpointError(
            f"the replay differs from cut {name} in {len(differing)} of {len(was)} parts, first {differing[0]!r}:"
            " another machine, library, layout or recipe, or a trainer that does not repeat"
        )
