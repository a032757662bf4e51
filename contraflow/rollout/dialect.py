"""What a served engine asks of a server, whatever its API: the seam between `served.py` and `vllm.py`, `sglang.py`.

Every method raises ServerError when the server is gone, silent, refuses, or says what cannot be. A dialect keeps no
state about requests or weights. Shape letters: N new tokens, M MoE layers, K experts per token.
"""

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from contraflow.config import Engine as EngineSection
from contraflow.types import Float32, Int32, Routes, StopReason

# What is raised by reading an answer as something that it is not.
ODD = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, EOFError)


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of one completion that one server generates in one go; most completions are of one piece."""

    id: str  # never used twice
    prompt: Int32  # [Lp], what earlier pieces sampled included
    seed: int  # in [0, 2^63)
    max_new_tokens: int
    temperature: float  # 0 is greedy
    stop_tokens: tuple[int, ...]
    salt: str  # a cached prefix serves only requests of the same salt
    routes: bool


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens as they come. `stop` is set in the last chunk only."""

    tokens: list[int]
    logprobs: list[float]  # of the temperature-scaled full softmax
    stop: StopReason | None = None  # ABORTED: the server ended it unasked
    routes: Routes | None = None  # with the last chunk: [Lp + N - 1, M, K]
    stamp: str | None = None  # the weights that sampled it, if this server says so with its answers


class Dialect(Protocol):
    """One server."""

    @property
    def url(self) -> str: ...

    async def alive(self) -> None:
        """Return if the server takes requests."""
        ...

    async def check(self, section: EngineSection) -> str:
        """What the server is, in words. Raises ConfigError if it is no server for this engine: an unknown version, a
        context too short, something switched off that is needed."""
        ...

    def generate(self, piece: Piece) -> AsyncGenerator[Chunk, None]:
        """Stream a piece; closing the generator early ends it in the server too."""
        ...

    async def score(self, prompts: Sequence[Int32], salt: str) -> tuple[Float32, ...]:
        """Log-probabilities at temperature 1 of each prompt's tokens but the first, computed and not looked up."""
        ...

    async def pause(self) -> None:
        """End whatever runs, and begin nothing until `resume`. Returns when nothing computes any more."""
        ...

    async def load(self, folder: Path, stamp: str) -> None:
        """Replace the weights by those of a Hugging Face folder that the server can see, then be stamped so."""
        ...

    async def resume(self) -> None:
        """Take requests again after `pause`."""
        ...

    async def stamp(self) -> str:
        """The last stamp since the server began; empty if there is none."""
        ...
