"""The OpenAI-style form of requests and answers: JSON of completions and chat completions, whole and as a stream.

Takes parsed JSON, gives what is said and wished for, or a `TaskError` that names the field. What would change how
tokens are sampled is refused rather than ignored: training relies on it. Answers come in one piece, even streamed.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable
from typing import TYPE_CHECKING, Any

import msgspec

from contraflow.errors import ContraflowError, TaskError
from contraflow.model.template import Message
from contraflow.rollout.conversation import Chat, Ids, Text
from contraflow.rollout.http_server import Reply

if TYPE_CHECKING:
    from contraflow.rollout.desk import Answer

_ROLES = ("system", "developer", "user", "assistant", "tool")
# What a field may be beside absent or null: anything else would ask for other sampling, or for what is not given.
_ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "stop": ([], ""),
    "suffix": ("",),
    "echo": (False,),
    "tools": ([],),
    "functions": ([],),
    "logprobs": (False, 0),
    "response_format": ({"type": "text"},),
}


class Wish(msgspec.Struct, frozen=True):
    """How a program wants its answer."""

    max_tokens: int | None
    stream: bool
    with_ids: bool  # token ids beside the text


def read_chat(body: Any, *, temperature: float) -> tuple[Chat, Wish]:
    """The body of a chat completion. Raises: TaskError."""
    wish = _wish(body, temperature)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise TaskError("messages is not a list of at least one message")
    said = tuple(_message(place, each) for place, each in enumerate(messages))
    if said[-1].role == "assistant":
        raise TaskError("the last message is the model's own; what should it answer?")
    return Chat(said), wish


def read_completion(body: Any, *, temperature: float) -> tuple[Text | Ids, Wish]:
    """The body of a completion; `prompt` is a text or a list of token ids. Raises: TaskError."""
    wish = _wish(body, temperature)
    match body.get("prompt"):
        case str(text):
            return Text(text), wish
        case list(ids) if all(type(each) is int for each in ids):
            return Ids(tuple(ids)), wish
    raise TaskError("prompt is neither a text nor a list of token ids; one prompt a request")


def read_reward(body: Any) -> float:
    """The number in `{"reward": 0.5}`. Raises: TaskError."""
    reward = body.get("reward") if isinstance(body, dict) else None
    try:
        number = float(reward) if isinstance(reward, int | float) and not isinstance(reward, bool) else math.nan
    except OverflowError:  # JSON's whole numbers have no end
        number = math.inf
    if not math.isfinite(number):
        raise TaskError(f"reward = {str(reward)[:80]!r}: send {{'reward': NUMBER}}, finite")
    return number


def completion_body(answer: "Answer", *, chat: bool, with_ids: bool) -> dict[str, Any]:
    """A whole answer."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": answer.finish, "logprobs": None}
    if chat:
        choice["message"] = {"role": "assistant", "content": answer.text}
    else:
        choice["text"] = answer.text
    if with_ids:
        choice |= {"token_ids": list(answer.ids), "prompt_token_ids": list(answer.prompt_ids)}
    kind = "chat.completion" if chat else "text_completion"
    return _head(kind) | {"choices": [choice], "usage": _usage(answer)}


async def completion_events(answering: "Awaitable[Answer]", *, chat: bool) -> AsyncGenerator[Any, None]:
    """The same as a stream of events: who speaks, what was said, why it ended."""
    kind = "chat.completion.chunk" if chat else "text_completion"

    def event(delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
        said = {"delta": delta} if chat else {"text": delta.get("content", "")}
        return _head(kind) | {"choices": [{"index": 0, "finish_reason": finish, "logprobs": None, **said}]}

    if chat:
        yield event({"role": "assistant", "content": ""}, None)
    try:
        answer = await answering
    except asyncio.CancelledError:
        raise
    except ContraflowError as fault:  # the status has been sent: an event is all that is left to say it by
        yield {"error": {"message": str(fault), "type": "invalid_request_error", "code": "bad_request"}}
        return
    yield event({"content": answer.text}, None)
    yield event({}, answer.finish) | {"usage": _usage(answer)}


def error_reply(status: int, code: str, text: str) -> Reply:
    """An error as clients of OpenAI's API read it."""
    return Reply(status, {"error": {"message": text, "type": "invalid_request_error", "code": code, "param": None}})


def _wish(body: Any, temperature: float) -> Wish:
    if not isinstance(body, dict):
        raise TaskError("the body is no JSON object")
    for name, allowed in _ONLY.items():
        if body.get(name) is not None and body[name] not in allowed:
            raise TaskError(f"{name} = {str(body[name])[:80]!r} is not for this endpoint; leave it out")
    asked = body.get("temperature")
    if asked is not None and asked != temperature:
        raise TaskError(f"temperature = {asked!r}: rollout.temperature = {temperature:g} is used; leave it out")
    counts: list[Any] = [body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    if any(type(count) is not int or count < 1 for count in counts):
        raise TaskError(f"max_tokens = {counts[0]!r}: at least 1, or left out")
    return Wish(min(counts, default=None), bool(body.get("stream")), bool(body.get("return_token_ids")))


def _message(place: int, each: Any) -> Message:
    if not isinstance(each, dict) or each.get("role") not in _ROLES:
        raise TaskError(f"messages[{place}] is no object with a role among {', '.join(_ROLES)}")
    if each.get("tool_calls") or each.get("function_call"):
        raise TaskError(f"messages[{place}] holds tool calls as objects; the model's words are text, calls within them")
    return Message(each["role"], _content(place, each.get("content")))


def _content(place: int, content: Any) -> str:
    match content:
        case None:
            return ""
        case str(text):
            return text
        case list(parts) if all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
            return "".join(part["text"] for part in parts)
    raise TaskError(f"messages[{place}].content is neither a text nor a list of texts")


def _head(kind: str) -> dict[str, Any]:
    return {"id": "turn", "object": kind, "created": 0, "model": "policy"}


def _usage(answer: "Answer") -> dict[str, int]:
    prompt, new = len(answer.prompt_ids), len(answer.ids)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
