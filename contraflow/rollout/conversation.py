"""One conversation with an outside program: which tokens its next request adds to those that are known.

Takes what the program says (messages, a text, or token ids) and what the model answered; gives token ids to append.
What the model sampled is never tokenized again: a request has to begin with all that was said, and only what is new
after it becomes tokens. Pure: no engine, no network.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from contraflow.errors import ModelError, TaskError
from contraflow.model.template import ChatTemplate, Message, Piece
from contraflow.model.tokenizer import Tokenizer


class Chat(msgspec.Struct, frozen=True):
    """All messages so far, the model's own included."""

    messages: tuple[Message, ...]


class Text(msgspec.Struct, frozen=True):
    """All text so far, the model's own included. Names of special tokens in it count as these."""

    text: str


class Ids(msgspec.Struct, frozen=True):
    """All tokens so far, the model's own included."""

    ids: tuple[int, ...]


Spoken = Chat | Text | Ids


class EditedError(TaskError):
    """A request does not go on from what was said before."""


class UnwritableError(TaskError):
    """A request holds what the model's tokenizer or template cannot write."""


@dataclass(frozen=True)
class Addition:
    """What a request adds: token ids, and their text for whoever judges the episode."""

    ids: list[int]
    text: str
    spoken: Spoken


class Conversation:
    """Invariant: `_known` is all that was said in words, as the program was told it, up to the model's last turn."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template, self._tokenizer = template, tokenizer
        self._end = tokenizer.pieces([tokenizer.eos])[0]
        self._known: Spoken | None = None
        self._ended = False  # the model's last turn has an end token

    def opening(self, spoken: Spoken) -> Addition:
        """A request as the beginning of a conversation. Raises: UnwritableError."""
        match spoken:
            case Chat(messages):
                return self._written(spoken, self._opened(messages), "\n".join(each.content for each in messages))
            case Text(text):
                return self._written(spoken, [Piece(text, markup=True)], text)
            case Ids(ids):
                return Addition(self._checked(ids), self._tokenizer.transcribe(ids), spoken)

    def following(self, spoken: Spoken) -> Addition:
        """What a request adds to what is known. Raises: EditedError, UnwritableError."""
        match self._known, spoken:
            case None, _:
                return self.opening(spoken)
            case Chat(known), Chat(messages):
                new = messages[len(known) :]
                if not new or not _alike(known, messages[: len(known)]):
                    raise EditedError(_where(known, messages))
                pieces = self._behind_end(self._followed(known[:-1], new))
                return self._written(spoken, pieces, "\n".join(each.content for each in new))
            case Text(known_text), Text(text):
                if not text.startswith(known_text):
                    raise EditedError(f"the prompt's first {len(known_text)} characters are not those of before")
                new_text = text[len(known_text) :]
                return self._written(spoken, self._behind_end([Piece(new_text, markup=True)]), new_text)
            case Ids(known_ids), Ids(ids):
                if ids[: len(known_ids)] != known_ids:
                    raise EditedError(f"the prompt's first {len(known_ids)} tokens are not those of before")
                new_ids = ids[len(known_ids) :]
                return Addition(self._checked(new_ids), self._tokenizer.transcribe(new_ids), spoken)
            case known_form, _:
                raise EditedError(f"a {type(spoken).__name__} request in a {type(known_form).__name__} conversation")

    def answered(self, spoken: Spoken, text: str, ids: Sequence[int], *, ended: bool) -> None:
        """The model answered `spoken` with `ids`, of which the program is told `text`; `ended`: by an end token."""
        match spoken:
            case Chat(messages):
                self._known = Chat((*messages, Message("assistant", text)))
            case Text(before):
                self._known = Text(before + text)
            case Ids(before_ids):
                self._known = Ids((*before_ids, *ids))
        self._ended = ended

    def _opened(self, messages: Sequence[Message]) -> list[Piece]:
        try:
            return self._template.opening(messages)
        except ModelError as fault:
            raise UnwritableError(str(fault)) from None

    def _followed(self, known: Sequence[Message], new: Sequence[Message]) -> list[Piece]:
        try:
            return self._template.following(known, new)
        except ModelError as fault:
            raise UnwritableError(str(fault)) from None

    def _behind_end(self, pieces: list[Piece]) -> list[Piece]:
        """Without the end mark that the model wrote itself."""
        if self._ended and pieces and pieces[0].markup and pieces[0].text.startswith(self._end):
            return [Piece(pieces[0].text.removeprefix(self._end), markup=True), *pieces[1:]]
        return pieces

    def _written(self, spoken: Spoken, pieces: Sequence[Piece], text: str) -> Addition:
        try:
            ids = [i for piece in pieces for i in self._tokenizer.encode(piece.text, special=piece.markup)]
        except ModelError as fault:
            raise UnwritableError(str(fault)) from None
        return Addition(ids, text, spoken)

    def _checked(self, ids: Sequence[int]) -> list[int]:
        if wrong := [i for i in ids if not 0 <= i < self._tokenizer.size]:
            raise UnwritableError(f"token {wrong[0]} is not in the vocabulary of {self._tokenizer.size}")
        return list(ids)


def _alike(known: Sequence[Message], given: Sequence[Message]) -> bool:
    """Equal, but that clients may have stripped what the model said of white space around it."""
    return len(known) == len(given) and all(
        a == b or (a.role == b.role == "assistant" and a.content.strip() == b.content.strip())
        for a, b in zip(known, given, strict=True)
    )


def _where(known: Sequence[Message], given: Sequence[Message]) -> str:
    if len(given) <= len(known):
        return f"{len(given)} messages, where {len(known)} were said and something new has to follow"
    place = next(n for n in range(len(known)) if not _alike(known[n : n + 1], given[n : n + 1]))
    return f"message {place} ({given[place].role}) is not what was said before"
