"""Recorded groups sampled again and held to the record: same seeds and versions, so the same tokens.

Takes recorded groups and the versions that a replay's trainer publishes; gives tallies of what came out alike. Prompts,
observations and rewards stay as recorded: only the engine works again. Does not train, and writes nothing.

Shape letters: N tokens of a piece.
"""

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from contraflow import config
from contraflow.buffer.recorded import Recorded
from contraflow.envs.draws import derive_seed
from contraflow.errors import CarrierError
from contraflow.model.tokenizer import Tokenizer
from contraflow.rollout.engine import Engine
from contraflow.rollout.open_engine import open_engine
from contraflow.rollout.pupil import Pupil
from contraflow.rollout.refresh import ChunkFetcher, Refresher
from contraflow.runtime.base import Address, Host, Ref
from contraflow.types import Chosen, Completion, Episode, Group, Manifest, Request, Version
from contraflow.weights import open_carrier

TOLERANCE = 1e-4  # of a log-probability: rows of another batch are added up in another order, and fp32 rounds
EXACT = 0.0  # the same in bitwise mode, where they are not
_RECORD_S = 60.0  # deadline of a read of payloads
_TOLD = 8  # differences of one call that are told by name; the rest is counted

Fate: TypeAlias = Literal["again", "kept", "gone"]


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens `[start, end)` of the episode at `place` of its group, sampled by one version in model turn `turn`.

    `fate` "again": its version and its context give it again; "kept": it leant on what no record holds, a KV cache of
    older versions or, of a script, who was asked for it; "gone": no replay from this cut has its version.
    """

    place: int
    turn: int
    begun: int  # where the turn begins
    start: int
    end: int
    version: Version
    fate: Fate


class Count(msgspec.Struct, frozen=True, kw_only=True):
    """Pieces and their tokens; of these the ones that came out alike; the largest difference of a log-probability."""

    pieces: int = 0
    alike: int = 0
    tokens: int = 0
    alike_tokens: int = 0  # up to the first of a piece that differs: what follows one has another context
    off: float = 0.0

    def __add__(self, other: "Count") -> "Count":
        return Count(
            pieces=self.pieces + other.pieces,
            alike=self.alike + other.alike,
            tokens=self.tokens + other.tokens,
            alike_tokens=self.alike_tokens + other.alike_tokens,
            off=max(self.off, other.off),
        )


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """What became of pieces. `differences` names pieces of fate "again" that did not come out alike, the first few."""

    again: Count = Count()
    kept: Count = Count()
    gone: Count = Count()
    differences: tuple[str, ...] = ()

    def __add__(self, other: "Tally") -> "Tally":
        told = (*self.differences, *other.differences)[:_TOLD]
        return Tally(
            again=self.again + other.again,
            kept=self.kept + other.kept,
            gone=self.gone + other.gone,
            differences=told,
        )


class How(msgspec.Struct, frozen=True, kw_only=True):
    """How the run sampled, and from where on a replay can."""

    seed: int  # the run's
    temperature: float
    keeps_cache: bool  # an unfinished answer kept its KV cache when weights changed
    first: int  # the oldest version that will be served
    tolerance: float = TOLERANCE  # by which log-probabilities may differ


class Survey(msgspec.Struct, frozen=True):
    """Of groups, in order: the versions that are to sample them again; and what is out of reach."""

    versions: tuple[frozenset[int], ...]
    gone: Tally


def pieces(group: Group, how: How, *, whole_turns: bool) -> Iterator[Piece]:
    """A group as pieces, for a replay that has versions `how.first` and newer of the line of its ticket.

    `whole_turns`: the version that began a turn decides all of it, as with the scripted engine.
    """
    for place, episode in enumerate(group.episodes):
        said = [turn for turn in episode.turns if turn.role == "model"]
        for number, turn in enumerate(said):
            within = [span for span in episode.spans if span.start < turn.end and span.end > turn.start]
            for span in within:
                version = within[0].version if whole_turns else span.version
                at_hand = version.line == group.ticket.line and version.n >= how.first
                leaning = (how.keeps_cache or whole_turns) and span.start > turn.start
                yield Piece(
                    place=place,
                    turn=number,
                    begun=turn.start,
                    start=span.start,
                    end=span.end,
                    version=version,
                    fate="gone" if not at_hand else "kept" if leaning else "again",
                )


def compare(episode: Episode, piece: Piece, made: Completion, tolerance: float = TOLERANCE) -> tuple[Count, str]:
    """What of a piece came out alike, and the first thing that did not."""
    was_N, is_N = episode.tokens[piece.start : piece.end], made.tokens
    shared = min(len(was_N), len(is_N))
    unlike = np.flatnonzero(was_N[:shared] != is_N[:shared])
    alike = int(unlike[0]) if unlike.size else shared
    was = episode.logprobs[piece.start : piece.start + alike].astype(np.float64)
    off_N = np.nan_to_num(np.abs(was - made.logprobs[:alike]), nan=np.inf)
    off = float(off_N.max(initial=0.0))
    same = alike == len(was_N) == len(is_N) and off <= tolerance
    length = len(was_N)
    count = Count(pieces=1, alike=int(same), tokens=length, alike_tokens=alike, off=off)
    if same:
        return count, ""
    if off > tolerance:
        worst, shown = int(off_N.argmax()), ".6f" if tolerance else ".9g"
        values = f"was {was[worst]:{shown}}, is {made.logprobs[worst]:{shown}}"
        what = f"log-probability of token {piece.start + worst} {values}"
    else:
        tokens = [str(row[alike]) if alike < len(row) else "none" for row in (was_N, is_N)]
        what = f"token {piece.start + alike} was {tokens[0]}, is {tokens[1]}"
    return count, f"episode {piece.place}, version {piece.version}: {what}"


class Resampler:
    """Samples recorded groups again on one engine of one rank.

    Invariant: `sample` asks for pieces of the version that is served, and of no other.
    """

    def __init__(
        self,
        engine: Engine,
        refresher: Refresher,
        record: Ref[Recorded],
        *,
        how: How,
        tokenizer: Tokenizer,
        pupil: Pupil | None,
    ) -> None:
        """`pupil`: who answers, if the engine is scripted."""
        self._engine, self._refresher, self._record = engine, refresher, record
        self._how, self._tokenizer, self._pupil = how, tokenizer, pupil

    async def survey(self, chosen: tuple[Chosen, ...]) -> Survey:
        """Which versions recorded groups need. Raises PayloadError when one was damaged."""
        needed, gone = [], Count()
        for group in await self._fetch(chosen):
            found = list(self._pieces(group))
            needed.append(frozenset(piece.version.n for piece in found if piece.fate != "gone"))
            lost = [piece.end - piece.start for piece in found if piece.fate == "gone"]
            gone += Count(pieces=len(lost), tokens=sum(lost))
        return Survey(tuple(needed), Tally(gone=gone))

    async def refresh(self, manifest: Manifest) -> None:
        """Serve a version. Raises CarrierError, DeadlineExceeded."""
        report = await self._refresher.refresh(manifest)
        if not report.served:
            raise CarrierError(f"version {manifest.version} cannot be sampled from: {report.reason}")

    async def sample(self, chosen: tuple[Chosen, ...]) -> Tally:
        """Sample what the served version had sampled of these groups. Raises PayloadError, EngineError."""
        groups = await self._fetch(chosen)
        async with asyncio.TaskGroup() as tasks:
            made = [tasks.create_task(self._sample(group)) for group in groups]
        return sum((one.result() for one in made), Tally())

    async def close(self) -> None:
        """Stop the engine, then let go of the weights it served."""
        await self._engine.close()
        self._refresher.close()

    async def _fetch(self, chosen: tuple[Chosen, ...]) -> list[Group]:
        return await self._record.call(_RECORD_S, Recorded.as_sampled, chosen)

    def _pieces(self, group: Group) -> Iterable[Piece]:
        whole = self._pupil is not None
        return pieces(group, self._how, whole_turns=whole)

    async def _sample(self, group: Group) -> Tally:
        assert self._engine.version is not None, "`refresh` comes first"
        served, name = self._engine.version.n, f"{group.ticket.group}.{group.ticket.attempt}"
        due = [piece for piece in self._pieces(group) if piece.fate != "gone" and piece.version.n == served]
        if self._pupil is not None:
            self._pupil.learn(name, self._tokenizer.encode(group.task.reference))
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(self._engine.generate(self._request(group, piece, name))) for piece in due]
        if self._pupil is not None:
            self._pupil.forget(name)
        return sum(
            (_tally(group, piece, made.result(), self._how.tolerance) for piece, made in zip(due, asked, strict=True)),
            Tally(),
        )

    def _request(self, group: Group, piece: Piece, name: str) -> Request:
        seed = derive_seed(self._how.seed, "episode", group.ticket.group, piece.place)
        return Request(
            id=f"{name}/{piece.place}/{piece.start}",
            prompt=group.episodes[piece.place].tokens[: piece.start],
            seed=derive_seed(seed, piece.turn),
            max_new_tokens=piece.end - piece.start,
            temperature=self._how.temperature,
            stop_tokens=(self._tokenizer.eos,),
            group=name,
            done=piece.start - piece.begun,
        )


def _tally(group: Group, piece: Piece, made: Completion, tolerance: float) -> Tally:
    count, difference = compare(group.episodes[piece.place], piece, made, tolerance)
    if piece.fate == "kept":
        return Tally(kept=count)
    named = f"group {group.ticket.group}, attempt {group.ticket.attempt}, {difference}"
    return Tally(again=count, differences=(named,) if difference else ())


def make_resampler(
    host: Host,
    *,
    how: How,
    engine: config.Engine,
    weights: config.Weights,
    model_folder: str,
    run_folder: str,
    record: Address,
    stepping: Literal["thread", "inline"] = "thread",
) -> Resampler:
    """A worker that serves nothing until its first `refresh`. Raises ConfigError, ModelError."""
    tokenizer = Tokenizer.load(Path(model_folder))
    opened, expected, pupil = open_engine(engine, Path(model_folder), tokenizer, host, stepping, None, whole=True)
    fetcher = ChunkFetcher(open_carrier(weights, Path(run_folder)), stepping)
    refresher = Refresher(opened, fetcher, clock=host.clock, expected=expected, deadline_s=weights.refresh_deadline_s)
    return Resampler(opened, refresher, host.connect(record), how=how, tokenizer=tokenizer, pupil=pupil)
