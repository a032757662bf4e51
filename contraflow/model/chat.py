"""Conversations as text, by a tokenizer's own chat template: of tokenizer_config.json or chat_template.jinja.

Takes messages, gives what the template writes, and which of it the model says. The `transformers` library renders it
(an extra, imported late), as it does for those who train elsewhere. Special tokens in a message are read as such: this
is for whole conversations to learn from. What an engine is fed, turn by turn from strangers, `template.py` writes: it
keeps contents apart and needs no transformers in a rollout worker. Both read the same templates.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from contraflow.errors import ConfigError, ModelError
from contraflow.model.template import Message

__all__ = ["MODEL", "ChatTemplate", "Message"]

MODEL = "assistant"  # the role whose words are the model's


class ChatTemplate:
    """The template of one model folder. Stateless."""

    def __init__(self, folder: Path, renderer: Any) -> None:
        self._folder, self._renderer = folder, renderer

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate":
        """Raises: ConfigError without the extra, ModelError when the folder has no template, or no tokenizer."""
        try:
            from transformers import AutoTokenizer
        except ImportError as fault:
            raise ConfigError(f"chat templates need pip install 'contraflow[chat]': {fault}") from None
        try:
            renderer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as fault:
            raise ModelError(f"{folder} holds no tokenizer that transformers can read: {fault}") from fault
        if not isinstance(renderer.chat_template, str):
            raise ModelError(f"{folder} has no chat template: chat_template.jinja, or one in tokenizer_config.json")
        return cls(folder, renderer)

    @property
    def marks(self) -> bool:
        """Whether the template says by `{% generation %}` what the model writes."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self._renderer.chat_template) is not None

    def text(self, messages: Sequence[Message], *, ask: bool) -> str:
        """The conversation as text; with `ask`, up to where the model is to speak. Raises: ModelError."""
        return str(self._render(messages, tokenize=False, add_generation_prompt=ask))

    def marked(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Token ids, and which of them the template marks as the model's. Raises: ModelError."""
        made = self._render(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return list(made["input_ids"]), [bool(mark) for mark in made["assistant_masks"]]

    def _render(self, messages: Sequence[Message], **how: Any) -> Any:
        try:
            return self._renderer.apply_chat_template([msgspec.structs.asdict(one) for one in messages], **how)
        except Exception as fault:  # templates raise what they like, to refuse roles and orders
            raise ModelError(f"the chat template of {self._folder} refuses it: {fault}") from fault
