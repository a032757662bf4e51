"""Chat messages to text, by the chat template of a model folder, in pieces that keep markup and contents apart.

Takes messages; gives pieces to be tokenized one by one, so that a special token's name inside a message stays letters.
Without a template, a conversation is its contents, one after the other. Needs jinja2 (an extra) where there is one.
This is what an engine is fed, turn by turn, and strangers write the messages. What is learned from conversations of
one's own, with special tokens read as such and answers marked, is `chat.py`. Both read the same templates.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from contraflow.errors import ConfigError, ModelError

_SLOT = re.compile("\ue000([0-9]+)\ue001")  # private-use letters: no template writes them by itself


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a chat. As a row of a file, it holds nothing else."""

    role: str
    content: str


class Piece(msgspec.Struct, frozen=True):
    """A stretch of a rendered chat: the template's own `markup`, or what a message holds."""

    text: str
    markup: bool


class ChatTemplate:
    """How one model's chats are written. Holds no state that calls change."""

    def __init__(self, source: str, *, place: str, names: dict[str, str]) -> None:
        """`source` is a Jinja template; empty: contents only. `names` are special tokens it may use, by variable."""
        self._place, self._names = place, names
        self._template = _compiled(source, place) if source else None

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate":
        """Of `chat_template.jinja`, or of `tokenizer_config.json`. Raises: ModelError, ConfigError without jinja2."""
        settings: dict[str, Any] = {}
        if (path := folder / "tokenizer_config.json").is_file():
            settings = json.loads(path.read_text(encoding="utf-8"))
        source = settings.get("chat_template") or ""
        if (path := folder / "chat_template.jinja").is_file():
            source = path.read_text(encoding="utf-8")
        if isinstance(source, list):  # several by name; the plain one is called default
            source = next((each["template"] for each in source if each.get("name") == "default"), "")
        names = {key: _token(settings.get(key)) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
        return cls(str(source), place=str(folder), names=names)

    def opening(self, messages: Sequence[Message]) -> list[Piece]:
        """A conversation up to where the model speaks. Raises: ModelError when the template refuses it."""
        return self._pieces(messages, 0)

    def following(self, known: Sequence[Message], new: Sequence[Message]) -> list[Piece]:
        """What is written after the model's turn that follows `known`: its end mark, `new`, and where it speaks again.

        The turn itself is not written again: what was sampled stays as it was. Raises: ModelError.
        """
        return self._pieces([*known, Message("assistant", ""), *new], len(known) + 1)

    def _pieces(self, messages: Sequence[Message], first: int) -> list[Piece]:
        """Pieces behind the content of message `first - 1`, or all of them."""
        parts = _SLOT.split(self._rendered(len(messages), [message.role for message in messages]))
        seen = [int(number) for number in parts[1::2]]
        if seen[-len(messages) + max(first - 1, 0) :] != list(range(max(first - 1, 0), len(messages))):
            raise ModelError(f"the chat template of {self._place} leaves messages out, or writes some twice: {seen}")
        pieces = [Piece(parts[0], markup=True)]
        for number, markup in zip(seen, parts[2::2], strict=True):
            if number < first:
                pieces = []
            else:
                pieces.append(Piece(messages[number].content, markup=False))
            pieces.append(Piece(markup, markup=True))
        return [piece for piece in pieces if piece.text]

    def _rendered(self, count: int, roles: Sequence[str]) -> str:
        slots = [f"\ue000{number}\ue001" for number in range(count)]
        if self._template is None:
            return "".join(slots)
        messages = [{"role": role, "content": slot} for role, slot in zip(roles, slots, strict=True)]
        try:
            return str(self._template.render(messages=messages, add_generation_prompt=True, **self._names))
        except Exception as fault:  # noqa: BLE001 - a template is a program, and may raise anything
            raise ModelError(f"the chat template of {self._place} refuses {list(roles)}: {fault}") from None


def _compiled(source: str, place: str) -> Any:
    try:
        from jinja2.exceptions import TemplateError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ConfigError(f"the chat template of {place} needs pip install 'contraflow[harness]' (jinja2)") from None

    def refuse(why: str) -> None:
        raise TemplateError(why)

    class Generation(Extension):
        """`{% generation %}` marks what is learned from a conversation; here it is what it holds."""

        tags = {"generation"}  # noqa: RUF012 - as the library declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = lambda value, **rest: json.dumps(value, ensure_ascii=False, **rest)
    try:
        return environment.from_string(source)
    except TemplateError as fault:
        raise ModelError(f"the chat template of {place} is not one: {fault}") from None


def _token(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")
