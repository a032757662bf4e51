"""The reward part `model`: what a reward model says a conversation is worth, in spreads from the mean, clipped.

Takes the section `reward.model`; gives a part that asks a process of its own (scorer.py), one that computes in place,
or one that only checks that it could be asked. An answer that was cut off earns the least, unasked.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from contraflow.config.preference import Scorer as Section
from contraflow.errors import ConfigError, DeadlineExceeded, ModelError, ScorerError, WorkerDied
from contraflow.model.reward import read_scale
from contraflow.model.tokenizer import Tokenizer
from contraflow.rewards.base import Said, Transcript
from contraflow.rewards.scorer import Scorer, open_model, row_of, values_of
from contraflow.runtime.base import Address, Ref
from contraflow.telemetry import Clock
from contraflow.types import StopReason, Task

MODEL = "model"  # the part's name in a recipe
_GRACE_S = 1.0  # a call bounds its own wait; this is for the way from thread to loop and back


class _Met(NamedTuple):
    number: int  # of processes met so far
    ref: Ref[Scorer] | None


class Asked:
    """A `Part` that asks the process of the reward model; called from any number of threads but the loop's own.

    Invariant: no answer is waited for longer than `deadline_s`. A question whose process died is asked again at the
    next one that is met, as long as there is time.
    """

    def __init__(
        self, section: Section, connect: Callable[[Address], Ref[Any]], clock: Clock, *, first: Address | None = None
    ) -> None:
        """To be made on the event loop that `connect`'s references are for. `first`: where it answers, if it is up."""
        self._section, self._connect, self._clock = section, connect, clock
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._met = _Met(0, None)
        if first is not None:
            self.meet(first)

    def meet(self, address: Address) -> None:
        """Ask there from now on."""
        with self._changed:
            self._met = _Met(self._met.number + 1, self._connect(address))
            self._changed.notify_all()

    def __call__(self, task: Task, transcript: Transcript) -> float:
        """Raises: ScorerError."""
        if transcript.stop is not StopReason.STOP:
            return -self._section.clip
        until, asked = self._clock() + self._section.deadline_s, 0
        while True:
            asked, ref = self._next(asked, until)
            left_s = max(0.0, until - self._clock())
            call = asyncio.run_coroutine_threadsafe(_ask(ref, left_s, transcript.turns), self._loop)
            try:
                return call.result(left_s + _GRACE_S)
            except WorkerDied:
                continue
            except (DeadlineExceeded, TimeoutError) as late:
                call.cancel()
                raise ScorerError(f"no reward within reward.model.deadline_s: {late}") from None

    def _next(self, asked: int, until: float) -> tuple[int, Ref[Scorer]]:
        """A process later than number `asked`."""
        with self._changed:
            self._changed.wait_for(lambda: self._met.number > asked, max(0.0, until - self._clock()))
            number, ref = self._met
        if ref is None or number <= asked:
            why = "it died, and no other was there in time" if asked else "it was not there in time"
            raise ScorerError(f"no reward within reward.model.deadline_s = {self._section.deadline_s:g}: {why}")
        return number, ref


async def _ask(ref: Ref[Scorer], deadline_s: float, turns: Sequence[Said]) -> float:
    return await ref.call(deadline_s, Scorer.score, tuple(turns))


class InPlace:
    """A `Part` that computes where it is called, one conversation at a time: for evaluations."""

    def __init__(self, section: Section) -> None:
        """Raises: ConfigError, ModelError."""
        self._section = section
        self._tokenizer = Tokenizer.load(_folder(section))
        self._model, self._scale = open_model(section)

    def __call__(self, task: Task, transcript: Transcript) -> float:
        """Raises: ScorerError."""
        if transcript.stop is not StopReason.STOP:
            return -self._section.clip
        row = row_of(transcript.turns, self._tokenizer, most=self._section.max_tokens)
        value = values_of(self._model, [row])[0]
        return self._scale.normal(value, self._section.clip)


class Unasked:
    """A `Part` that checks what a reward model would be given, and gives 0: for the look before a run."""

    def __init__(self, section: Section) -> None:
        """Raises: ConfigError, ModelError when the folder holds no reward model."""
        folder, self._most = _folder(section), section.max_tokens
        read_scale(folder)
        self._tokenizer = Tokenizer.load(folder)

    def __call__(self, task: Task, transcript: Transcript) -> float:
        """Raises: ScorerError for what the reward model could not read."""
        row_of(transcript.turns, self._tokenizer, most=self._most)
        return 0.0


def _folder(section: Section) -> Path:
    if not section.folder:
        raise ConfigError(
            "reward.model.folder is empty; the part 'model' needs a reward model, which contraflow reward-model makes"
        )
    folder = Path(section.folder).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"reward.model.folder = {section.folder!r}: no such folder; make it: contraflow reward-model")
    if not (folder / "config.json").is_file():
        raise ModelError(f"reward.model.folder = {section.folder!r} holds no config.json, so it is no model folder")
    return folder
