"""Do a server's log-probabilities belong to the distribution it samples from, at temperatures other than 1?

Many servers report those of temperature 1 whatever they sample at, unless told otherwise when they start; trained on,
they make every importance ratio wrong. Asks a server for a few tokens at a high temperature and compares: at a low one
a model that is sure of its tokens would give both alike.
"""

import numpy as np

from contraflow.errors import EngineError, ServerError
from contraflow.rollout.dialect import Dialect, Piece

_TEMPERATURE = 4.0
_TOKENS = 8


async def prove_scaled(dialect: Dialect, vocab: int) -> None:
    """Return if the server's log-probabilities follow the temperature. Raises: EngineError, ServerError."""
    prompt = np.arange(1, 3, dtype=np.int32) % vocab
    tokens, given = list[int](), list[float]()
    piece = Piece(
        id="temperature",
        prompt=prompt,
        seed=1,
        max_new_tokens=_TOKENS,
        temperature=_TEMPERATURE,
        stop_tokens=(),
        salt="temperature",
        routes=False,
    )
    async for chunk in dialect.generate(piece):
        tokens += chunk.tokens
        given += chunk.logprobs
    if not len(tokens) == len(given) == _TOKENS:
        got = f"{len(tokens)} tokens with {len(given)} log-probabilities"
        raise ServerError(dialect.url, "malformed", f"asked for {_TOKENS} tokens it gave {got}")
    (plain,) = await dialect.score([np.concatenate([prompt, np.array(tokens, np.int32)])], "temperature")
    if np.abs(plain[-_TOKENS:] - np.array(given)).max() < 1e-3:
        raise EngineError(
            f"server {dialect.url} gives log-probabilities of temperature 1 for tokens sampled at another; start it so "
            "that they follow the temperature (vLLM: with --logprobs-mode processed_logprobs; SGLang: without "
            "SGLANG_RETURN_ORIGINAL_LOGPROB), or sample at temperature 1"
        )
