"""The process of a reward model: rollout workers ask it, and it answers many in one pass.

Takes conversations by call; gives rewards in spreads from the mean, clipped. The first of a batch waits for others a
few milliseconds; while a pass runs, the next batch gathers. Says which model it is. Does not know tasks or policies.
"""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from contraflow.config.preference import Scorer as Section
from contraflow.errors import ModelError, ScorerError
from contraflow.model.reward import RewardModel, Scale, digest_of, load_reward_model
from contraflow.model.tokenizer import Tokenizer
from contraflow.rewards.base import Said
from contraflow.runtime.base import Host

Row = list[int]


class ScorerReport(msgspec.Struct, frozen=True, kw_only=True):
    """Which reward model answers, how its numbers are made comparable, and what it has done so far."""

    digest: str
    folder: str
    mean: float
    std: float
    clip: float
    scored: int
    passes: int


class Scorer:
    """Answers `score` in batches. Belongs to one event loop; a pass runs in a thread.

    Invariants: at most one pass runs at a time, of at most `batch` conversations; every question in `_waiting` is
    answered by the task `_serving`, which lives as long as there are any.
    """

    def __init__(
        self, model: RewardModel, scale: Scale, tokenizer: Tokenizer, section: Section, *, digest: str
    ) -> None:
        self._model, self._scale, self._tokenizer = model, scale, tokenizer
        self._section, self._digest = section, digest
        self._waiting: list[tuple[Row, asyncio.Future[float]]] = []
        self._full = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._scored = self._passes = 0

    async def score(self, turns: tuple[Said, ...]) -> float:
        """The reward of a finished conversation, in [-clip, clip].

        Raises: ScorerError when it cannot be read, is too long, or the model gives no finite number.
        """
        row = row_of(turns, self._tokenizer, most=self._section.max_tokens)
        answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((row, answer))
        if len(self._waiting) >= self._section.batch:
            self._full.set()
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        value = await answer
        if not math.isfinite(value):
            raise ScorerError(f"reward model {self._digest} gave {value} for a conversation of {len(row)} tokens")
        return self._scale.normal(value, self._section.clip)

    async def report(self) -> ScorerReport:
        """At any time."""
        return ScorerReport(
            digest=self._digest,
            folder=self._section.folder,
            mean=self._scale.mean,
            std=self._scale.std,
            clip=self._section.clip,
            scored=self._scored,
            passes=self._passes,
        )

    async def close(self) -> None:
        """Whoever still waits is told."""
        if self._serving is not None:
            self._serving.cancel()
        for _, answer in self._waiting:
            answer.cancel()

    async def _serve(self) -> None:
        while self._waiting:
            await self._gather()
            taken, self._waiting = self._waiting[: self._section.batch], self._waiting[self._section.batch :]
            asked = [(row, answer) for row, answer in taken if not answer.done()]  # others were given up
            rows = [row for row, _ in asked]
            try:
                values = await asyncio.to_thread(values_of, self._model, rows) if rows else []
            except Exception as fault:  # noqa: BLE001 - each of those who asked is told
                for _, answer in asked:
                    if not answer.done():
                        answer.set_exception(ScorerError(f"reward model {self._digest}: {fault}"))
                continue
            self._scored, self._passes = self._scored + len(rows), self._passes + bool(rows)
            for (_, answer), value in zip(asked, values, strict=True):
                if not answer.done():
                    answer.set_result(value)

    async def _gather(self) -> None:
        """Until a batch is full, or `gather_s`."""
        self._full.clear()
        if len(self._waiting) < self._section.batch and self._section.gather_s:
            try:
                async with asyncio.timeout(self._section.gather_s):
                    await self._full.wait()
            except TimeoutError:
                return


def make_scorer(host: Host, *, section: Section) -> Scorer:
    """The worker. Raises: ModelError."""
    folder = Path(section.folder).expanduser()
    return Scorer(*open_model(section), Tokenizer.load(folder), section, digest=digest_of(folder))


def open_model(section: Section) -> tuple[RewardModel, Scale]:
    """Raises: ModelError."""
    compute = {"float32": torch.float32, "bfloat16": torch.bfloat16}[section.compute]
    return load_reward_model(Path(section.folder).expanduser(), device=section.device, compute_dtype=compute)


def row_of(turns: Sequence[Said], tokenizer: Tokenizer, *, most: int | None = None) -> Row:
    """Ids of a conversation as an episode holds it: the end token after each turn of the model.

    Raises: ScorerError when there is nothing in it, the tokenizer cannot write it, or it has more than `most` tokens.
    """
    row = Row()
    try:
        for said in turns:
            row += tokenizer.encode(said.text, special=said.role == "prompt")
            row += [tokenizer.eos] if said.role == "model" else []
    except ModelError as fault:
        raise ScorerError(f"the reward model cannot read it: {fault}") from None
    if not row or (most is not None and len(row) > most):
        raise ScorerError(
            f"a conversation of {len(row)} tokens; a reward model takes 1 to {most} (reward.model.max_tokens)"
        )
    return row


@torch.no_grad()
def values_of(model: RewardModel, rows: Sequence[Row]) -> list[float]:
    """What the head says of each row."""
    values: list[float] = model(rows).tolist()
    return values
