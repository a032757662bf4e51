"""Episodes that an outside program plays: its requests are the prompts, its silence or its death the end.

Takes a task and the draft of an episode; lets a program, started for it or come by itself, speak with the engine by way
of `desk.py` until it is done. Every token of the episode is one that the engine was fed or sampled. What breaks outside
is a `TaskError`, which costs the episode. Every wait on a program ends after the environment's deadline.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np

from contraflow.envs.draws import derive_seed
from contraflow.envs.harness import HarnessOptions
from contraflow.errors import ConfigError, TaskError
from contraflow.model.template import ChatTemplate
from contraflow.rewards.base import Said
from contraflow.rollout.conversation import Addition, Conversation, EditedError, UnwritableError
from contraflow.rollout.desk import Answer, Desk, Ended, Refused, Session, Turn
from contraflow.rollout.draft import Draft
from contraflow.rollout.episode import Stage, take_turn
from contraflow.rollout.player import Player
from contraflow.rollout.program import program
from contraflow.types import Completion, Request, StopReason, Task

_MOST_REFUSED = 16  # requests of one episode; then its program does not understand


class Table:
    """Where all episodes of a worker are played. Invariant: a session is open while its episode is played."""

    def __init__(
        self,
        options: HarnessOptions,
        template: ChatTemplate,
        *,
        temperature: float,
        deadline_s: float,
        sign: Path | None,
        environ: Mapping[str, str],
        player: Player | None = None,
    ) -> None:
        """`temperature`: the one that programs may ask for, the run's. `deadline_s` bounds each wait on a program.
        `player` plays all episodes, if there is one.

        The address is written to `sign`, if there is one, once it is known. Raises: ConfigError when the key of
        `options` is not set.
        """
        fetch_key = environ.get(options.key_env, "")
        if options.key_env and not fetch_key:
            raise ConfigError(f"env.options.key_env names {options.key_env}, which is not set in the environment")
        self._options, self._template, self._temperature = options, template, temperature
        self._deadline_s, self._sign, self._environ = deadline_s, sign, environ
        self._player = player
        self._opened = asyncio.Lock()
        self.desk = Desk(
            new_key=lambda: secrets.token_urlsafe(24), fetch_key=fetch_key, max_bytes=options.max_request_bytes
        )

    async def converse(self, draft: Draft, task: Task, stage: Stage, *, key: str, group: str) -> StopReason:
        """Let a program and the engine take turns until it is done, as `play` says. Raises: TaskError, EngineError."""
        await self.open()
        async with self._seated(task) as session:
            play = _Play(draft, stage, Conversation(self._template, stage.tokenizer), key=key, group=group)
            refused = 0
            while isinstance(heard := await self._hear(session), Turn):
                try:
                    await play.turn(heard, branch=self._options.edited == "branch", session=session)
                except (Refused, EditedError, UnwritableError) as refusal:
                    heard.answer.set_exception(_refused(refusal))
                    refused += 1
                    if refused > _MOST_REFUSED:
                        raise TaskError(
                            f"{refused} requests of the harness were refused; the last: {refusal}"
                        ) from None
                if play.aborted:
                    return StopReason.ABORTED
            return self._closed(heard, draft, task, cut=play.cut)

    async def close(self) -> None:
        """Hang up on everybody, and take the sign in."""
        if self._player is not None:
            await self._player.close()
        await self.desk.shut()
        if self._sign is not None:
            self._sign.unlink(missing_ok=True)

    async def open(self) -> None:
        """Listen, and say where, unless that is done. Raises: TaskError."""
        async with self._opened:
            if self.desk.url:
                return
            try:
                await self.desk.listen(self._options.host, self._options.port)
            except OSError as fault:
                where = f"env.options.host = {self._options.host!r}, port = {self._options.port}"
                raise TaskError(f"{where}: cannot listen there: {fault}") from None
            if self._sign is not None:
                self._sign.write_text(self.desk.url + "\n", encoding="utf-8")

    async def _hear(self, session: Session) -> Turn | Ended:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await session.next()
        except TimeoutError:
            self.desk.counts["late"] += 1
            if self._player is not None:
                await self._player.check(self._deadline_s)
            raise TaskError(f"the harness asked for nothing within {self._deadline_s:g} s, and did not end") from None

    def _closed(self, ended: Ended, draft: Draft, task: Task, *, cut: bool) -> StopReason:
        if ended.fault:
            self.desk.counts["broken"] += 1
            raise TaskError(ended.fault)
        if not draft.tokens:
            raise TaskError("the harness ended before the model said anything")
        if ended.reward is not None:
            draft.said.append(Said("env", repr(ended.reward)))
            return StopReason.STOP
        if task.facts.get("scored") == "env":
            raise TaskError("the harness ended without a reward; POST it to v1/reward, or set env.options.reward")
        return StopReason.LENGTH if cut else StopReason.STOP

    @asynccontextmanager
    async def _seated(self, task: Task) -> AsyncIterator[Session]:
        fetched = self._player is None and not self._options.command
        session = self.desk.open(task, temperature=self._temperature, fetched=fetched)
        try:
            if self._player is not None:
                async with self._player.seat(session, url=self.desk.url):
                    yield session
                return
            if not self._options.command:
                yield session
                return
            invitation = self.desk.invitation(session)
            async with program(self._options.command, session, invitation, self._environ):
                yield session
        finally:
            self.desk.close(session)


class _Play:
    """One episode in the making. Invariant: the draft holds what was fed and sampled, in order, branches left out."""

    def __init__(self, draft: Draft, stage: Stage, talk: Conversation, *, key: str, group: str) -> None:
        self._draft, self._stage, self._talk, self._key, self._group = draft, stage, talk, key, group
        self._left, self._turns, self._branches = stage.limits.max_new_tokens, 0, 0
        self.cut = self.aborted = False

    async def turn(self, heard: Turn, *, branch: bool, session: Session) -> None:
        """Answer one request. Raises: Refused, EditedError, UnwritableError (the draft is as before), EngineError."""
        try:
            addition = self._talk.following(heard.spoken)
        except EditedError:
            if not branch:
                raise
            session.counts["branches"] += 1
            return await self._aside(heard)
        draft = self._draft
        prompt = np.array([*draft.tokens, *addition.ids], np.int32)
        self._check_room(len(prompt))
        if addition.ids:
            draft.hear("env" if draft.tokens else "prompt", addition.text, addition.ids)
        request = self._request(prompt, heard, name=str(self._turns), seed=derive_seed(draft.seed, self._turns))
        completion = await take_turn(draft, request, self._stage)
        text = draft.say(completion, self._stage.tokenizer)
        ids = completion.tokens.tolist()
        ended = completion.stop is StopReason.STOP
        self._talk.answered(heard.spoken, text, ids, ended=ended)
        self._turns += 1
        self._left -= len(ids)
        self.cut, self.aborted = not ended, completion.stop is StopReason.ABORTED or draft.is_halted()
        session.counts["turns"] += 1
        self._answer(heard, completion, prompt.tolist(), text)

    async def _aside(self, heard: Turn) -> None:
        """A conversation of its own, of which nothing is kept or trained."""
        addition: Addition = self._talk.opening(heard.spoken)
        prompt = np.array(addition.ids, np.int32)
        self._check_room(len(prompt))
        seed = derive_seed(self._draft.seed, "branch", self._branches)
        request = self._request(prompt, heard, name=f"branch-{self._branches}", seed=seed)
        self._branches += 1
        completion = await self._stage.engine.generate(msgspec.structs.replace(request, want_routes=False))
        ids = completion.tokens.tolist()
        self._left -= len(ids)
        ended = completion.stop is StopReason.STOP
        self._answer(heard, completion, addition.ids, self._stage.tokenizer.transcribe(ids[:-1] if ended else ids))

    def _check_room(self, prompt: int) -> None:
        limits = self._stage.limits
        full = prompt >= limits.context_tokens
        if full or self._left < 1 or self._turns >= limits.max_turns:
            self.cut = True
            raise Refused(
                400,
                "budget_spent",
                f"no further turn: {self._turns} of rollout.max_turns = {limits.max_turns} turns, {self._left} of"
                f" rollout.max_new_tokens = {limits.max_new_tokens} tokens left, {prompt} of engine.context_tokens ="
                f" {limits.context_tokens} in use; report the reward, or end",
            )

    def _request(
        self, prompt: "np.ndarray[tuple[int], np.dtype[np.int32]]", heard: Turn, *, name: str, seed: int
    ) -> Request:
        limits, most = self._stage.limits, heard.wish.max_tokens
        return Request(
            id=f"{self._key}/{name}",
            prompt=prompt,
            seed=seed,
            max_new_tokens=self._left if most is None else min(most, self._left),
            temperature=limits.temperature,
            stop_tokens=(self._stage.tokenizer.eos,),
            group=self._group,
            want_routes=limits.routes,
        )

    def _answer(self, heard: Turn, completion: Completion, prompt: list[int], text: str) -> None:
        finish = "stop" if completion.stop is StopReason.STOP else "length"
        if not heard.answer.done():
            ids = tuple(completion.tokens.tolist())
            heard.answer.set_result(Answer(text=text, ids=ids, prompt_ids=tuple(prompt), finish=finish))


def _refused(refusal: TaskError) -> Refused:
    if isinstance(refusal, Refused):
        return refusal
    code = "history_edited" if isinstance(refusal, EditedError) else "bad_request"
    return Refused(400, code, str(refusal))
