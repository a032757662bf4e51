"""Text to token ids and back, from a model folder's `tokenizer.json` (the `tokenizers` library does the work).

Also builds the one-token-per-character tokenizer of the shipped models, in the same format, so transformers reads it.
Adds no tokens of its own (no beginning-of-sequence token, no chat template): a prompt is what the environment wrote.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contraflow.errors import ModelError

PAD, EOS = "<pad>", "<eos>"
ALPHABET = "0123456789+-*/=()[]<>?!.,:;' \nabcdefghijklmnopqrstuvwxyz"


class Tokenizer:
    """One model's vocabulary. Safe to share between threads: it holds no state that calls change."""

    def __init__(self, parsed: Any, literal: Any, *, eos: int, place: str) -> None:
        self._parsed = parsed
        self._literal = literal
        self._special = {i for i, token in parsed.get_added_tokens_decoder().items() if token.special}
        self._place = place
        self.eos = eos

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read `tokenizer.json` and the name of the end token in `tokenizer_config.json`.

        Raises: ModelError when either is missing or torn, or when the end token is not in the vocabulary.
        """
        from tokenizers import Tokenizer as Backend

        text = _read(folder / "tokenizer.json")
        try:
            # Two of them, since how to treat special tokens inside a text is a property of the object.
            parsed, literal = Backend.from_str(text), Backend.from_str(text)
        except Exception as fault:
            raise ModelError(f"{folder / 'tokenizer.json'} is not a tokenizer: {fault}") from fault
        literal.encode_special_tokens = True
        name = _end_token(folder / "tokenizer_config.json")
        eos = parsed.token_to_id(name)
        if eos is None:
            raise ModelError(f"the end token {name!r} of {folder} is not in its vocabulary")
        return cls(parsed, literal, eos=eos, place=str(folder))

    @property
    def size(self) -> int:
        """Number of ids, special tokens included."""
        return int(self._parsed.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`. With `special`, names of special tokens such as `<eos>` become those tokens.

        Leave `special` off for text from outside, which could end or fake a turn with them.
        Raises: ModelError when the vocabulary cannot write the text.
        """
        backend = self._parsed if special else self._literal
        try:
            return list(backend.encode(text, add_special_tokens=False).ids)
        except Exception as fault:
            raise ModelError(f"the tokenizer of {self._place} cannot write {_short(text)}: {fault}") from fault

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out."""
        kept = [int(i) for i in ids if int(i) not in self._special]
        return str(self._parsed.decode(kept, skip_special_tokens=False))

    def transcribe(self, ids: Sequence[int]) -> str:
        """The text of `ids` with nothing left out, for whoever judges it: see `pieces` for what has no letters."""
        if any(self._parsed.id_to_token(int(i)) is None for i in ids):
            return "".join(self.pieces(ids))
        return str(self._parsed.decode([int(i) for i in ids], skip_special_tokens=False))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One text per token, to be looked at: special tokens by name, ids outside the vocabulary as `<id 77>`."""
        known = [self._parsed.id_to_token(int(i)) is not None for i in ids]
        return [
            str(self._parsed.decode([int(i)], skip_special_tokens=False)) if is_known else f"<id {int(i)}>"
            for i, is_known in zip(ids, known, strict=True)
        ]


def build_char_tokenizer(folder: Path, alphabet: str = ALPHABET) -> Tokenizer:
    """Write a tokenizer with one token per character of `alphabet` into `folder`: ids `<pad>` 0, `<eos>` 1, then these.

    A character outside the alphabet is refused when it is encoded, never dropped.
    Raises: ModelError when a character comes twice.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    if len(set(alphabet)) != len(alphabet):
        raise ModelError(f"alphabet {alphabet!r} has a character twice")
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *alphabet])}
    # The unknown token is named and absent: that makes the library raise instead of dropping what it does not know.
    backend: Any = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([PAD, EOS])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return Tokenizer.load(folder)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; a model folder needs its tokenizer beside config.json") from None
    except UnicodeDecodeError as fault:
        raise ModelError(f"{path} is not text: {fault}") from None


def _end_token(path: Path) -> str:
    try:
        named = json.loads(_read(path)).get("eos_token")
    except (json.JSONDecodeError, AttributeError) as fault:
        raise ModelError(f"{path} is not a JSON object: {fault}") from None
    name = named.get("content") if isinstance(named, dict) else named
    if not isinstance(name, str):
        raise ModelError(f"{path} names no eos_token, so no answer could ever end")
    return name


def _short(text: str) -> str:
    return repr(text) if len(text) <= 60 else f"{text[:60]!r}..."
