"""What a replay samples again: at each version it reaches, all that this version had sampled, and a table at the end.

Takes recorded takes and manifests as they are published; gives lines to print. The engine is the recipe's, on one rank,
and must be one that repeats. Does not train: that is training.py.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from contraflow.buffer.recorded import Recorded
from contraflow.config import Engine, Parallel, Recipe
from contraflow.errors import ConfigError, ReplayError
from contraflow.model.builtin import model_folder
from contraflow.rollout.resample import EXACT, TOLERANCE, How, Resampler, Tally, make_resampler
from contraflow.runtime.base import Ref, Runtime
from contraflow.types import Chosen, Manifest, Take

SURVEY_S = 600.0  # reading every payload once; a disk of 100 MB/s reads 60 GB in it


class Resampling:
    """Invariant: `_due` holds what versions that did not come yet are to sample; `_tally` is of those that did."""

    def __init__(
        self,
        resampler: Ref[Resampler],
        due: dict[int, list[Chosen]],
        gone: Tally,
        *,
        recipe: Recipe,
        cut_step: int,
        tell: Callable[[str], None],
    ) -> None:
        self._resampler, self._due, self._tally = resampler, due, gone
        self._recipe, self._cut_step, self._tell = recipe, cut_step, tell
        self._tolerance = tolerance_of(recipe.engine)

    async def follow(self, manifest: Manifest) -> None:
        """Have a version sample again what it had sampled. Raises CarrierError, EngineError, PayloadError."""
        due = self._due.pop(manifest.version.n, [])
        await self._resampler.call(self._recipe.weights.refresh_deadline_s, Resampler.refresh, manifest)
        made, at_once = Tally(), self._recipe.rollout.concurrency
        for begin in range(0, len(due), at_once):
            chosen = tuple(due[begin : begin + at_once])
            made += await self._resampler.call(self._recipe.run.stall_s, Resampler.sample, chosen)
        again = made.again
        self._tell(f"version {manifest.version.n}: {again.alike} of {again.pieces} pieces sampled again are alike")
        for difference in made.differences:
            self._tell(f"  {difference}")
        self._tally += made

    def table(self) -> list[str]:
        """What was equal, what could not be expected to be, and what could not be asked for."""
        tally, left = self._tally, sum(map(len, self._due.values()))
        rows = [
            ("same version, seed and context", tally.again),
            ("behind a refresh, on a KV cache or script of the version before: not held to it", tally.kept),
            (f"of a version that is not at hand: before step {self._cut_step}, or of a line left behind", tally.gone),
        ]
        lines = [f"{'pieces':>7} {'alike':>7} {'tokens':>9} {'alike':>9}  {'log-probabilities':17}  sampled"]
        for what, count in rows:
            asked = count is not tally.gone
            alike = (f"{count.alike:7}", f"{count.alike_tokens:9}") if asked else ("      -", "        -")
            off = f"within {count.off:.1e}" if asked and count.alike_tokens else "-"
            lines.append(f"{count.pieces:7} {alike[0]} {count.tokens:9} {alike[1]}  {off:17}  {what}")
        if left:
            lines.append(f"the replay ended before {len(self._due)} versions came, which {left} groups wait for")
        return lines

    def check(self) -> None:
        """Raise ReplayError if what should have come out alike did not."""
        again = self._tally.again
        if again.alike != again.pieces:
            raise ReplayError(
                f"{again.pieces - again.alike} of {again.pieces} pieces came out otherwise, first"
                f" {self._tally.differences[0]} (log-probabilities may differ by {self._tolerance:g}): a payload was"
                " changed, or machine, libraries or recipe are not those of the run"
            )


def check_repeats(engine: Engine) -> None:
    """Raise ConfigError unless this engine gives the same tokens again."""
    wrong = ""
    if engine.served:
        wrong = f"engine.kind = {engine.kind!r}: servers batch as requests come, and sample with their own noise"
    elif engine.kind == "native" and engine.compute != "float32":
        wrong = f"engine.compute = {engine.compute!r}: it rounds by batch, and so far that other tokens are drawn"
    elif engine.parallel.ep > 1 and engine.parallel.wire != "same":
        wrong = f"engine.parallel.wire = {engine.parallel.wire!r}: tokens are rounded on their way between ranks"
    if wrong:
        raise ConfigError(f"this run cannot be sampled again, {wrong}; leave --sample out to train it again")


def tolerance_of(engine: Engine) -> float:
    """By how much a log-probability may differ when it is computed again, in another batch."""
    return EXACT if engine.bitwise else TOLERANCE


async def open_resampling(
    runtime: Runtime,
    recipe: Recipe,
    scratch: Path,
    record: Ref[Recorded],
    takes: Sequence[Take],
    *,
    tell: Callable[[str], None],
) -> Resampling:
    """Start the engine and look through the record. Raises ConfigError, ModelError, PayloadError."""
    alone = {"parallel": Parallel(), "replace_every": 0, "spare_experts": 0, "offload": "none"}
    first = takes[0].step
    resampler = await runtime.start(
        "rollout",
        make_resampler,
        how=How(
            seed=recipe.run.seed,
            temperature=recipe.rollout.temperature,
            keeps_cache=recipe.engine.on_refresh == "keep",
            first=first,
            tolerance=tolerance_of(recipe.engine),
        ),
        engine=recipe.engine.model_copy(update=alone),
        weights=recipe.weights,
        model_folder=str(model_folder(recipe.model.folder)),
        run_folder=str(scratch),
        record=record.address,
        stepping="inline" if recipe.runtime.kind == "inline" else "thread",
    )
    due, gone = defaultdict[int, list[Chosen]](list), Tally()
    for take in takes:
        survey = await resampler.call(SURVEY_S, Resampler.survey, take.groups)
        gone += survey.gone
        for chosen, versions in zip(take.groups, survey.versions, strict=True):
            for n in versions:
                due[n].append(chosen)
    return Resampling(resampler, dict(due), gone, recipe=recipe, cut_step=first, tell=tell)
