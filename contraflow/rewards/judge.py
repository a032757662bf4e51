"""The reward part `judge`: a language model behind an OpenAI-style endpoint says how good an answer is.

Takes the section `reward.judge`; gives a part that blocks, to be called from threads. Equal questions are asked once.
What may pass (429, 5xx, a connection, silence, no score) is tried again with growing pauses until the deadline; any
other refusal is an error at once. Follows no redirect; the key is sent to the endpoint and appears nowhere else.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from contraflow.config.judge import Judge
from contraflow.errors import ConfigError, JudgeError
from contraflow.rewards.base import Part, Transcript
from contraflow.telemetry import Clock
from contraflow.types import StopReason, Task

MAX_BYTES = 1 << 20  # of one verdict
_MAX_TEXT = 300  # characters of the endpoint's own words that an error repeats
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0
_SLOT = re.compile(r"\{(prompt|answer|reference)\}")
_BUSY = (408, 409, 425, 429)  # of the refusals, those that may pass


@dataclass(frozen=True)
class _Answer:
    status: int
    body: bytes
    retry_after_s: float


def open_judge(section: Judge, environ: Mapping[str, str], clock: Clock) -> Part:
    """The part. Raises ConfigError when the section names no endpoint or model, or a variable that is not set."""
    for key in ("url", "model"):
        if not getattr(section, key):
            raise ConfigError(f"reward.judge.{key} is empty; the part 'judge' needs an endpoint and a model to ask")
    if section.key_env and not environ.get(section.key_env):
        raise ConfigError(f"reward.judge.key_env names {section.key_env}, which is not set in the environment")
    key = environ.get(section.key_env, "")
    if key and not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(f"the key in {section.key_env} has a space, a line end or a letter beyond ASCII in it")
    return Verdicts(section, key, clock, threading.Event().wait)


class Verdicts:
    """A `Part`, called from any number of threads.

    Invariants: at most `concurrency` requests are open; of equal questions at most one; only scores are remembered.
    """

    def __init__(self, section: Judge, key: str, clock: Clock, pause: Callable[[float], object]) -> None:
        self._section, self._key, self._clock, self._pause = section, key, clock, pause
        self._free = threading.BoundedSemaphore(section.concurrency)
        self._lock = threading.Lock()
        self._known: OrderedDict[str, float] = OrderedDict()
        self._asked: dict[str, Future[float]] = {}

    def __call__(self, task: Task, transcript: Transcript) -> float:
        """A number in [0, 1]; 0 unasked for an answer that was cut off. Raises: JudgeError."""
        if transcript.stop is not StopReason.STOP:
            return 0.0
        question = fill(self._section.prompt, prompt=task.prompt, answer=transcript.answer, reference=task.reference)
        until = self._clock() + self._section.deadline_s
        with self._lock:
            if question in self._known:
                self._known.move_to_end(question)
                return self._known[question]
            asking = self._asked.get(question)
            if mine := asking is None:
                asking = self._asked[question] = Future()
        assert asking is not None
        if mine:
            self._settle(question, asking, until)
        try:
            return asking.result(max(0.0, until - self._clock()))
        except TimeoutError:
            raise self._fault("late", "the same question, asked for another episode, was open for too long") from None

    def _settle(self, question: str, asking: "Future[float]", until: float) -> None:
        try:
            score = self._judged(question, until)
        except BaseException as fault:
            with self._lock:
                del self._asked[question]
            asking.set_exception(fault)
            raise
        with self._lock:
            del self._asked[question]
            self._known[question] = score
            while len(self._known) > self._section.remembered:
                self._known.popitem(last=False)
        asking.set_result(score)

    def _judged(self, question: str, until: float) -> float:
        pause_s, tries = _FIRST_PAUSE_S, 0
        while True:
            tries += 1
            after_s = 0.0
            try:
                answer = self._ask(question, until)
                after_s = answer.retry_after_s
                return self._read(answer)
            except JudgeError as fault:
                wait_s = max(pause_s, after_s)
                if fault.kind == "refused" or self._clock() + wait_s >= until:
                    raise self._fault(fault.kind, f"{fault.text} (after {tries} tries)") from None
            self._pause(wait_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _ask(self, question: str, until: float) -> _Answer:
        if not self._free.acquire(timeout=max(0.0, until - self._clock())):
            raise self._fault("late", f"{self._section.concurrency} other questions were open all the time")
        try:
            return self._exchange(question, min(until, self._clock() + self._section.attempt_s))
        except TimeoutError:
            raise self._fault("late", "no whole verdict in time") from None
        except (OSError, HTTPException) as fault:
            raise self._fault("unreachable", f"{type(fault).__name__}: {fault}") from None
        finally:
            self._free.release()

    def _exchange(self, question: str, until: float) -> _Answer:
        place, section = urlsplit(self._section.url), self._section
        kind = HTTPSConnection if place.scheme == "https" else HTTPConnection
        link = kind(place.hostname or "", place.port, timeout=self._left(until))
        try:
            body: dict[str, Any] = {"model": section.model, "temperature": 0, "max_tokens": section.max_tokens}
            body |= {"messages": [{"role": "user", "content": question}]}
            headers = {"Content-Type": "application/json"}
            if self._key:
                headers["Authorization"] = f"Bearer {self._key}"
            link.request("POST", f"{place.path.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers)
            sock = link.sock  # the link forgets it when the answer is the last
            reply, found = link.getresponse(), bytearray()
            while len(found) <= MAX_BYTES:
                sock.settimeout(self._left(until))
                if not (piece := reply.read1(1 << 16)):
                    break
                found += piece
            if len(found) > MAX_BYTES:
                raise self._fault("malformed", f"a verdict of over {MAX_BYTES} bytes")
            if reply.length:
                raise self._fault("unreachable", f"the connection closed {reply.length} bytes before the end")
            return _Answer(reply.status, bytes(found), _seconds(reply.headers.get("Retry-After", "")))
        finally:
            link.close()

    def _left(self, until: float) -> float:
        left = until - self._clock()
        if left <= 0:
            raise TimeoutError
        return left

    def _read(self, answer: _Answer) -> float:
        said = self._clean(answer.body.decode(errors="replace"))[:_MAX_TEXT]
        if answer.status in _BUSY or answer.status >= 500:
            raise self._fault("busy", f"status {answer.status}: {said}")
        if answer.status != 200:
            raise self._fault("refused", f"status {answer.status}: {said}")
        try:
            text: Any = json.loads(answer.body)["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise self._fault("malformed", f"no chat completion: {said}") from None
        found = re.findall(self._section.score, text) if isinstance(text, str) else []
        score = _number(found[-1]) if found else None
        if score is None or not 0 <= score <= self._section.full:
            raise self._fault(
                "malformed", f"no score from 0 to {self._section.full:g} in {self._clean(str(text))[-_MAX_TEXT:]!r}"
            )
        return score / self._section.full

    def _fault(self, kind: str, text: str) -> JudgeError:
        return JudgeError(self._section.url, kind, self._clean(text))

    def _clean(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def fill(template: str, **slots: str) -> str:
    """The template with its slots filled, in one pass: a slot's name inside what is filled in stays what it is.

    >>> fill("{prompt}: {answer}", prompt="say {answer}", answer="5", reference="")
    'say {answer}: 5'
    """
    return _SLOT.sub(lambda found: slots[found[1]], template)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _seconds(text: str) -> float:
    """Of a Retry-After; a date, which servers of this kind do not send, counts as nothing."""
    return float(text) if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,3})?", text) else 0.0
