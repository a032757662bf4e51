"""What stands behind the twin of a server, whatever API it speaks: our own engine, with weights that really change.

Takes a model folder, gives tokens one at a time, each a request of its own, since noise is a function of seed and
position. Does not pause or know requests of several tokens: that is what the twins differ in.
"""

from pathlib import Path

import msgspec
import numpy as np

from contraflow.config import Engine as EngineSection
from contraflow.model.decoder import Decoder
from contraflow.model.folder import load_folder
from contraflow.rollout.native import NativeEngine
from contraflow.telemetry import Clock
from contraflow.types import Completion, Float32, Int32, Request, Version
from contraflow.weights.probe import make_probe, probe_logprobs, probe_prompts


class TwinModel:
    """Invariant: `_asked` are the requests that the engine works on."""

    def __init__(self, folder: Path, section: EngineSection, *, clock: Clock, raw_logprobs: bool) -> None:
        """`raw_logprobs`: give those of temperature 1, whatever the tokens were sampled at."""
        self._decoder = load_folder(folder)
        self._engine = NativeEngine(self._decoder, section, clock=clock, stepping="inline", version=Version(0, 0))
        self._routes, self._raw = section.routes, raw_logprobs
        self._loads = 0
        self.given = 0  # completions so far
        self._asked: set[str] = set()
        self.config = self._decoder.config

    async def load(self, fresh: Decoder) -> None:
        """Take its weights by the engine's own swap, proven by what they themselves give."""
        self._loads += 1
        probe = make_probe(fresh, probe_prompts(fresh.config.vocab, prompts=1, tokens=4, seed=0), 1e-3)
        await self._engine.swap(Version(0, self._loads), dict(fresh.state_dict()), probe)

    def score(self, tokens: Int32) -> Float32:
        """Log-probabilities at temperature 1 of all tokens but the first."""
        (scores,) = probe_logprobs(self._decoder, [tokens])
        return scores

    async def next(self, prompt: Int32, *, seed: int, temperature: float, stops: tuple[int, ...]) -> Completion:
        """A completion of one token, or of none if it was aborted."""
        self.given += 1
        request = Request(
            id=str(self.given),
            prompt=prompt,
            seed=seed,
            max_new_tokens=1,
            temperature=temperature,
            stop_tokens=stops,
            want_routes=self._routes,
        )
        self._asked.add(request.id)
        try:
            given = await self._engine.generate(request)
        finally:
            self._asked.discard(request.id)
        if not self._raw or not len(given.tokens):
            return given
        return msgspec.structs.replace(given, logprobs=self.score(np.concatenate([prompt, given.tokens]))[-1:])

    async def abort(self) -> None:
        """End what is asked for now."""
        await self._engine.abort(list(self._asked))

    async def close(self) -> None:
        """Stop the engine."""
        await self._engine.close()
