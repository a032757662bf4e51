"""Preferences: pairs of answers of which one was chosen, read from JSON lines or made by a stated rule.

Takes the section `preferences`; gives pairs as text, and as token ids with what was left out. The same pairs from the
same seed, on every machine. Does not train.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from contraflow import config
from contraflow.envs.base import Env, Split
from contraflow.envs.draws import Draws
from contraflow.errors import ConfigError, ModelError, ScorerError
from contraflow.model.tokenizer import Tokenizer
from contraflow.rewards.base import Said, Transcript
from contraflow.rewards.mix import Mix
from contraflow.rewards.registry import make_mix
from contraflow.rewards.scorer import row_of
from contraflow.types import StopReason, Task

_TRIES = 1000  # draws of a second answer until the rule tells it from the first


class Preference(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a file. `gold`: what the rule that made it says of both answers. Other keys are left alone."""

    prompt: str
    chosen: str
    rejected: str
    margin: float = 0.0
    gold: tuple[float, float] | None = None


class Pair(msgspec.Struct, frozen=True):
    """As the reward model reads it: ids of prompt, answer and end token."""

    chosen: list[int]
    rejected: list[int]
    margin: float


@dataclass
class Pairs:
    """What can be learned from, and how many rows cannot."""

    pairs: list[Pair] = field(default_factory=list)
    same: int = 0  # chosen and rejected are the same text: nothing is preferred
    long: int = 0

    def told(self) -> str:
        """For people; empty when there is nothing to tell."""
        named = {"with two equal answers": self.same, "too long": self.long}
        return ", ".join(f"{count:,} {why} left out" for why, count in named.items() if count)


def make_preferences(section: config.Preferences, env: Env, seed: int, *, split: Split) -> Iterator[Preference]:
    """Pairs without end, one for each task of a split: two drawn answers that the golden part tells apart.

    Lengths are uniform in [shortest, longest], characters uniform among all, or among those not used yet where
    `repeats` is false. The better one is chosen with probability sigmoid(distance / temperature) (Bradley and Terry).
    Raises: ConfigError when the part does not tell answers apart.
    """
    mix = make_mix({section.gold: 1.0})
    index = 0
    while True:
        yield _preference(section, env.task(split, index), mix, Draws(seed, "preference", split, index))
        index += 1


def _preference(section: config.Preferences, task: Task, mix: Mix, draws: Draws) -> Preference:
    first = _answer(section, draws)
    worth = _gold(mix, task, first)
    for _ in range(_TRIES):
        other = _answer(section, draws)
        distance = worth - (value := _gold(mix, task, other))
        if distance:
            break
    else:
        raise ConfigError(f"preferences.gold = {section.gold!r} gave {worth:g} for {_TRIES} answers to {task.prompt!r}")
    heat = section.temperature
    chance = float(distance > 0) if heat == 0 else 0.5 * (1 + math.tanh(distance / heat / 2))
    kept = draws.word() / 2**64 < chance
    pairs = ((first, worth), (other, value))
    (chosen, high), (rejected, low) = pairs if kept else pairs[::-1]
    margin = abs(distance) if section.margins else 0.0
    return Preference(prompt=task.prompt, chosen=chosen, rejected=rejected, margin=margin, gold=(high, low))


def _answer(section: config.Preferences, draws: Draws) -> str:
    length = section.shortest + draws.below(section.longest - section.shortest + 1)
    left, drawn = section.characters, ""
    for _ in range(length):
        drawn += left[draws.below(len(left))]
        if not section.repeats:
            left = left.replace(drawn[-1], "")
    return drawn


def _gold(mix: Mix, task: Task, answer: str) -> float:
    return mix.score(task, Transcript((Said("prompt", task.prompt), Said("model", answer)), StopReason.STOP))[0]


def write_preferences(rows: Iterable[Preference], file: Path) -> int:
    """Write rows as JSON lines, whole or not at all; gives how many."""
    part, count = file.with_name(f"{file.name}.partial"), 0
    try:
        with part.open("wb") as opened:
            for count, row in enumerate(rows, 1):  # noqa: B007 - told
                opened.write(msgspec.json.encode(row) + b"\n")
        part.replace(file)
    except OSError as fault:
        raise ConfigError(f"{file} cannot be written: {fault}") from None
    return count


def read_preferences(file: Path, *, most: int) -> Iterator[Preference]:
    """The first `most` rows. Raises: ConfigError naming file and line of a row that is none, or says nothing."""
    try:
        with file.open("rb") as opened:
            lines = ((number, line) for number, line in enumerate(opened, 1) if line.strip())
            for _, (number, line) in zip(range(most), lines, strict=False):
                yield _row(file, number, line)
    except OSError as fault:
        raise ConfigError(f"preferences.file = {str(file)!r} cannot be read: {fault}") from None


def _row(file: Path, number: int, line: bytes) -> Preference:
    try:
        row = msgspec.json.decode(line, type=Preference)
    except msgspec.DecodeError as fault:  # NaN and infinities are no JSON
        raise ConfigError(f"{file}, line {number}: {fault}") from None
    for name in ("prompt", "chosen", "rejected"):
        if not getattr(row, name).strip():
            raise ConfigError(f"{file}, line {number}: {name!r} is empty; a pair is a prompt and two answers")
    if row.margin < 0:
        raise ConfigError(f"{file}, line {number}: margin = {row.margin:g}; a margin is 0 or more")
    return row


def encode_pairs(rows: Sequence[Preference], section: config.Preferences, tokenizer: Tokenizer) -> Pairs:
    """Ids of every pair that can be learned from. Raises: ModelError when the tokenizer cannot write one."""
    found = Pairs()
    for place, row in enumerate(rows, 1):
        if row.chosen.strip() == row.rejected.strip():
            found.same += 1
            continue
        try:
            chosen, rejected = (
                row_of((Said("prompt", row.prompt), Said("model", answer)), tokenizer)
                for answer in (row.chosen, row.rejected)
            )
        except ScorerError as fault:
            raise ModelError(f"preference {place}: {fault}") from None
        if max(len(chosen), len(rejected)) > section.max_tokens:
            found.long += 1
            continue
        found.pairs.append(Pair(chosen, rejected, row.margin if section.margins else 0.0))
    return found
