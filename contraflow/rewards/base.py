"""What a reward judges, and what a part of one is.

A part takes a task and what was said, and gives one finite number, by custom in [0, 1]. Knows text only.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from contraflow.types import StopReason, Task


class Said(msgspec.Struct, frozen=True):
    """One turn, as text; stop tokens are left out."""

    role: Literal["prompt", "model", "env"]
    text: str


class Transcript(msgspec.Struct, frozen=True):
    """All turns of one episode in order, and why it ended: `LENGTH` means cut off, not finished."""

    turns: tuple[Said, ...]
    stop: StopReason

    @property
    def answer(self) -> str:
        """What the model wrote last, without white space around it; empty when it wrote nothing."""
        return next((said.text.strip() for said in reversed(self.turns) if said.role == "model"), "")


Part = Callable[[Task, Transcript], float]
