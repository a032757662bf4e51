"""Rows of a JSON-lines file as samples to learn from: conversations by the chat template, or prompt and completion.

Takes a file, a tokenizer and a template; gives samples whose mask is on what the model says, and how many rows were too
long. A row that cannot be learned from is an error that names its line. Does not train.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from contraflow import config
from contraflow.errors import ConfigError, ModelError
from contraflow.model.chat import MODEL, ChatTemplate, Message
from contraflow.model.tokenizer import Tokenizer
from contraflow.types import Sample

Tokens = tuple[list[int], list[bool]]  # ids, and whether each is learned


class Row(msgspec.Struct, frozen=True):
    """One line: `messages`, or `prompt` and `completion`, as text or as messages. Other keys are left alone."""

    messages: list[Message] | None = None
    prompt: str | list[Message] | None = None
    completion: str | list[Message] | None = None


class Rows(NamedTuple):
    """What a file gives."""

    samples: list[Sample]
    dropped: int  # for their length
    cut: int

    def told(self) -> str:
        """For people; empty when there is nothing to tell."""
        named = {"dropped": self.dropped, "cut": self.cut}
        return ", ".join(f"{count:,} too long and {name}" for name, count in named.items() if count)


def read_rows(
    file: Path, section: config.Chat, tokenizer: Tokenizer, template: Callable[[], ChatTemplate], *, most: int
) -> Rows:
    """The first `most` rows of a file. `template` is asked for when the first conversation comes.

    Raises: ConfigError naming the file and the line of a row that is broken, holds nothing to learn, has no true prefix
    (the template writes earlier turns otherwise once later ones follow), or is too long where that is refused.
    """
    reader = _Reader(section, tokenizer, template)
    rows = Rows([], 0, 0)
    for number, line in _lines(file):
        if len(rows.samples) == most:
            break
        try:
            tokens = reader.tokens(msgspec.json.decode(line, type=Row))
            rows = _added(rows, *tokens, section)
        except (msgspec.DecodeError, ConfigError, ModelError) as fault:
            raise ConfigError(f"{file}, line {number}: {fault}") from None
    return rows


def _added(rows: Rows, ids: list[int], mask: list[bool], section: config.Chat) -> Rows:
    most = section.max_tokens
    if len(ids) <= most:
        rows.samples.append(sample_of(ids, mask))
        return rows
    if section.too_long == "refuse":
        raise ConfigError(f"{len(ids)} tokens; chat.max_tokens = {most}")
    if section.too_long == "drop" or not any(mask[1:most]):
        return rows._replace(dropped=rows.dropped + 1)
    rows.samples.append(sample_of(ids[:most], mask[:most]))
    return rows._replace(cut=rows.cut + 1)


def sample_of(tokens: Sequence[int], mask: Sequence[bool]) -> Sample:
    """Tokens to be learned where `mask` says; nothing predicts the first. Raises ModelError when none is learned."""
    learned = np.array(mask, np.bool_)
    learned[:1] = False
    if not learned.any():
        raise ModelError("nothing for the model to say: it has to begin with a prompt and hold an answer")
    length = int(np.flatnonzero(learned)[-1]) + 1  # what comes after the last learned token has no say in the loss
    return Sample(
        tokens=np.array(tokens[:length], np.int32),
        mask=learned[:length],
        behaviour=np.zeros(length, np.float32),
        advantages=np.zeros(length, np.float32),
        versions=np.full(length, -1, np.int32),
    )


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with file.open("rb") as opened:
            yield from ((number, line) for number, line in enumerate(opened, 1) if line.strip())
    except OSError as fault:
        raise ConfigError(f"chat.file = {str(file)!r} cannot be read: {fault}") from None


class _Reader:
    """Rows to ids. The template is loaded when the first conversation comes, and then kept."""

    def __init__(self, section: config.Chat, tokenizer: Tokenizer, load: Callable[[], ChatTemplate]) -> None:
        self._last, self._tokenizer = section.turns == "last", tokenizer
        self._template = functools.cache(load)

    def tokens(self, row: Row) -> Tokens:
        """Raises: ConfigError, ModelError."""
        if row.messages is not None:
            return self._conversation(row.messages, 0)
        if isinstance(row.prompt, str) and isinstance(row.completion, str):
            asked, said = (self._tokenizer.encode(text, special=True) for text in (row.prompt, row.completion))
            said += [self._tokenizer.eos] if said[-1:] != [self._tokenizer.eos] else []
            return asked + said, [False] * len(asked) + [True] * len(said)
        if isinstance(row.prompt, list) and isinstance(row.completion, list):
            return self._conversation([*row.prompt, *row.completion], len(row.prompt))
        raise ConfigError("a row holds 'messages', or 'prompt' and 'completion', both texts or both lists of messages")

    def _conversation(self, messages: Sequence[Message], start: int) -> Tokens:
        """Ids of a conversation, learned at the model's turns from message `start` on."""
        turns = [place for place, one in enumerate(messages) if one.role == MODEL and place >= start]
        if not turns:
            raise ConfigError(f"no turn of the {MODEL!r} to learn from")
        template = self._template()
        if template.marks and not self._last and not start:
            return template.marked(messages)
        ids, mask, written = list[int](), list[bool](), ""
        for place in turns[-1:] if self._last else turns:
            asked = template.text(messages[:place], ask=True)
            said = template.text(messages[: place + 1], ask=False)
            if not asked.startswith(written) or not said.startswith(asked):
                raise ConfigError(
                    f"message {place + 1}: the template writes what came before otherwise once this follows, so what"
                    " the model says cannot be told from it; use chat.turns = 'last', or a template with"
                    " {% generation %}"
                )
            prompt = self._tokenizer.encode(asked[len(written) :], special=True)
            answer, learned = _answer(said[len(asked) :], self._tokenizer)
            ids += prompt + answer
            mask += [False] * len(prompt) + learned
            written = said
        return ids, mask


def _answer(text: str, tokenizer: Tokenizer) -> Tokens:
    """What the model says ends with its end token; what the template writes behind that is not learned."""
    ids = tokenizer.encode(text, special=True)
    end = len(ids) - ids[::-1].index(tokenizer.eos) if tokenizer.eos in ids else len(ids)
    return ids, [place < end for place in range(len(ids))]
