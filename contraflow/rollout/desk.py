"""Where outside programs speak: an OpenAI-style HTTP endpoint with one session per episode.

Takes requests of programs; gives them, one at a time, to whoever plays the session, and the answers back. A session is
found by its key: as the bearer token, in the path (`/s/KEY/v1/...`), or in the model's name (`policy/KEY`), which is
all that some programs can choose. Knows no tokens and no engine. What an answer looks like is `openai.py`.
"""

import asyncio
import hmac
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from contraflow.errors import ContraflowError, TaskError
from contraflow.rollout.conversation import Ids, Spoken
from contraflow.rollout.http_server import Ask, HttpServer, Reply
from contraflow.rollout.openai import (
    Wish,
    completion_body,
    completion_events,
    error_reply,
    read_chat,
    read_completion,
    read_reward,
)
from contraflow.types import Task

_MODEL = "policy/"  # with a session's key behind it
_LONGEST_POLL_S = 60.0  # that a program may wait for an episode in one request


class Refused(TaskError):
    """A request that is answered with an error. Attributes: `status` of HTTP, `code` for programs to tell them by."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(text)
        self.status, self.code = status, code


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The model's turn, as a program is told it."""

    text: str
    ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    finish: str  # "stop" or "length"


class Ended(msgspec.Struct, frozen=True):
    """The program is done: it reported a `reward` or None. `fault` says how it broke instead."""

    reward: float | None
    fault: str = ""


@dataclass(frozen=True, eq=False)
class Turn:
    """A request that waits for the model's turn."""

    spoken: Spoken
    wish: Wish
    answer: "asyncio.Future[Answer]"


class Session:
    """One episode, as a program sees it.

    Invariants: at most one turn waits for an answer; the same request again is given the same answer; once closed, or
    ended, every request is refused.
    """

    def __init__(self, key: str, task: Task, *, temperature: float, counts: Counter[str]) -> None:
        """`temperature` is the only one that requests may ask for."""
        self.key, self.task, self.temperature = key, task, temperature
        self.counts = counts
        self._last: Turn | None = None
        self._inbox: asyncio.Queue[Turn | Ended] = asyncio.Queue()
        self._over = ""

    def ask(self, spoken: Spoken, wish: Wish) -> "asyncio.Future[Answer]":
        """The model's turn that a request asks for. Raises: Refused."""
        last = self._last
        if last is not None and last.spoken == spoken and not _failed(last.answer):
            self.counts["repeated"] += 1
            return last.answer
        if self._over:
            raise Refused(410, "session_over", f"this session is over: {self._over}")
        if last is not None and not last.answer.done():
            raise Refused(409, "busy", "this session's last request is not answered yet; one at a time")
        self._last = Turn(spoken, wish, asyncio.get_running_loop().create_future())
        self._last.answer.add_done_callback(_looked_at)
        self._inbox.put_nowait(self._last)
        return self._last.answer

    def end(self, ended: Ended, why: str) -> bool:
        """The program is done, or gone; False if it was before."""
        if self._over:
            return False
        self._over = why
        self._inbox.put_nowait(ended)
        return True

    async def next(self) -> Turn | Ended:
        """What the program wants next. What it asked before it ended is given first."""
        return await self._inbox.get()

    def close(self) -> None:
        """Refuse whatever comes, and whoever waits."""
        self._over = self._over or "its episode is finished"
        if self._last is not None and not self._last.answer.done():
            self._last.answer.set_exception(Refused(410, "session_over", "the episode ended before the answer"))


class Desk:
    """Invariant: a session is found by its key from `open` to `close`."""

    def __init__(self, *, new_key: Callable[[], str], fetch_key: str, max_bytes: int) -> None:
        """`fetch_key`: what a program has to show to fetch episodes; empty: nothing."""
        self._new_key, self._fetch_key = new_key, fetch_key
        self._sessions: dict[str, Session] = {}
        self._waiting: asyncio.Queue[Session] = asyncio.Queue()
        self._http = HttpServer(self._handle, max_bytes=max_bytes)
        self.url = ""
        self.counts: Counter[str] = Counter()

    async def listen(self, host: str, port: int) -> None:
        """Begin to answer; `url` says where."""
        self.url = await self._http.listen(host, port)

    async def shut(self) -> None:
        """Hang up on everybody."""
        await self._http.close()

    def open(self, task: Task, *, temperature: float, fetched: bool) -> Session:
        """A new session; `fetched`: the next program that asks for an episode gets it."""
        session = Session(self._new_key(), task, temperature=temperature, counts=self.counts)
        self._sessions[session.key] = session
        self.counts["sessions"] += 1
        if fetched:
            self._waiting.put_nowait(session)
        return session

    def close(self, session: Session) -> None:
        """Forget a session."""
        session.close()
        self._sessions.pop(session.key, None)

    def invitation(self, session: Session) -> dict[str, object]:
        """What a program needs to play a session."""
        return {
            "base_url": f"{self.url}/s/{session.key}/v1",
            "api_key": session.key,
            "task": msgspec.to_builtins(session.task),
        }

    async def _handle(self, ask: Ask) -> Reply:
        try:
            return await self._routed(ask)
        except Refused as refusal:
            self.counts[refusal.code] += 1
            return error_reply(refusal.status, refusal.code, str(refusal))
        except ContraflowError as fault:
            self.counts["bad_request"] += 1
            return error_reply(400, "bad_request", str(fault))

    async def _routed(self, ask: Ask) -> Reply:
        token = ask.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if ask.path == "/sessions":
            return await self._fetch(ask, token)
        path = ask.path
        if path.startswith("/s/"):
            _, _, token, path = [*path.split("/", 3), ""][:4]
        session = self._sessions.get(token) or self._sessions.get(_model_of(ask.body).removeprefix(_MODEL))
        if session is None:
            raise Refused(401, "no_session", "no session of this key: it never was, or its episode is finished")
        match ask.method, path.strip("/"):
            case "GET", "v1/models":
                return Reply(body={"object": "list", "data": [{"id": "policy", "object": "model"}]})
            case "POST", "v1/chat/completions":
                spoken, wish = read_chat(ask.body, temperature=session.temperature)
                return await self._spoken(session, spoken, wish, chat=True)
            case "POST", "v1/completions":
                said, wish = read_completion(ask.body, temperature=session.temperature)
                return await self._spoken(session, said, wish, chat=False)
            case "POST", "v1/reward":
                reward = read_reward(ask.body)
                if not session.end(Ended(reward), "its reward is reported"):
                    raise Refused(410, "session_over", "this session is over; its reward counts as it was")
                return Reply(body={"reward": reward})
            case "POST", "v1/end":
                session.end(Ended(None), "the program ended it")
                return Reply(body={})
        raise Refused(
            404,
            "no_such_path",
            f"{ask.method} {path}: there are v1/chat/completions, v1/completions, v1/models, v1/reward and v1/end",
        )

    async def _spoken(self, session: Session, spoken: Spoken, wish: Wish, *, chat: bool) -> Reply:
        answer = asyncio.shield(session.ask(spoken, wish))  # a program that hangs up may ask again
        if wish.stream:
            return Reply(events=completion_events(answer, chat=chat))
        given = await answer
        return Reply(body=completion_body(given, chat=chat, with_ids=wish.with_ids or isinstance(spoken, Ids)))

    async def _fetch(self, ask: Ask, token: str) -> Reply:
        known = not self._fetch_key or hmac.compare_digest(token.encode(), self._fetch_key.encode())
        if ask.method != "POST" or not known:
            raise Refused(401, "no_key", "fetch an episode by POST /sessions, with its key as the bearer token")
        wait_s = ask.body.get("wait_s", 0.0) if isinstance(ask.body, dict) else 0.0
        if not isinstance(wait_s, int | float) or not 0 <= wait_s <= _LONGEST_POLL_S:
            raise Refused(400, "bad_request", f"wait_s = {wait_s!r}: 0 to {_LONGEST_POLL_S:g} seconds")
        try:
            async with asyncio.timeout(max(wait_s, 0.001)):  # a moment, in which one that waits is found
                while True:
                    session = await self._waiting.get()
                    if session.key in self._sessions:
                        return Reply(body=self.invitation(session))
        except TimeoutError:
            return Reply(body={"base_url": None})


def _model_of(body: object) -> str:
    name = body.get("model") if isinstance(body, dict) else None
    return name if isinstance(name, str) else ""


def _failed(answer: "asyncio.Future[Answer]") -> bool:
    return answer.done() and (answer.cancelled() or answer.exception() is not None)


def _looked_at(answer: "asyncio.Future[Answer]") -> None:
    """Whoever asked may have gone: then nobody else looks at the error."""
    if not answer.cancelled():
        answer.exception()
