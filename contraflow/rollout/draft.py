"""An episode while it is written: by one worker, or by one after the other.

Takes what the model, the task and the environment say, gives the `Episode`; of one that was begun elsewhere, what was
sampled there, turn by turn, for as long as everything around it is the same again. Asks nobody.

Shape letters: L tokens of the episode so far, N new tokens, M MoE layers, K experts per token.
"""

from collections.abc import Collection, Mapping
from typing import Any, Literal

import msgspec
import numpy as np

from contraflow.errors import ContraflowError, EngineError
from contraflow.model.tokenizer import Tokenizer
from contraflow.rewards.base import Said
from contraflow.types import Completion, Episode, Routes, Span, StopReason, Turn


class Draft:
    """One episode in the making.

    Invariants: `tokens`, `trained` and `logprobs` are equally long, turns cover them in order, spans cover exactly the
    trained ones. Routes of a token are those of the turn that fed it first: later turns only add rows.
    """

    def __init__(self, seed: int, left: Episode | None = None) -> None:
        """`left`: how far it came elsewhere, under the same seed."""
        self.seed = seed
        self.tokens: list[int] = []
        self.said: list[Said] = []
        self.asked = ""  # id of the request that is under way, if one is
        self._halted = False
        self.recalled = 0  # sampled tokens taken from `left`
        self._left = left
        self._trained: list[bool] = []
        self._logprobs: list[float] = []
        self._spans: list[Span] = []
        self._turns: list[Turn] = []
        self._routes: list[Routes] = []

    def halt(self) -> None:
        """Nobody is to be asked any more: it goes on elsewhere."""
        self._halted = True

    def is_halted(self) -> bool:
        return self._halted

    def hear(self, role: Literal["prompt", "env"], text: str, ids: list[int]) -> None:
        """Append what the model is told."""
        self.said.append(Said(role, text))
        self._append(role, ids, [0.0] * len(ids))

    def recall(self, stop_tokens: Collection[int]) -> Completion | None:
        """What was sampled elsewhere for the turn that begins now: all of it (STOP) or its beginning (ABORTED).

        None where nothing was, or where task or environment have said something else than then: what was sampled
        after that belongs to another conversation, and is forgotten.
        """
        left, at = self._left, len(self.tokens)
        if left is None:
            return None
        turn = next((turn for turn in left.turns if turn.role == "model" and turn.start == at < turn.end), None)
        if turn is None or left.tokens[:at].tolist() != self.tokens:
            self._left = None
            return None
        tokens, spans = left.tokens[at : turn.end], [span for span in left.spans if at < span.end <= turn.end]
        fed = turn.end - 1
        self.recalled += len(tokens)
        return Completion(
            tokens=tokens,
            logprobs=left.logprobs[at : turn.end],
            spans=tuple(Span(span.version, span.start - at, span.end - at) for span in spans),
            stop=StopReason.STOP if int(tokens[-1]) in stop_tokens else StopReason.ABORTED,
            routes=left.routes[:fed] if left.routes is not None and len(left.routes) >= fed else None,
        )

    def say(self, completion: Completion, tokenizer: Tokenizer) -> str:
        """Append what the model sampled; gives its text. Raises EngineError when the completion is not whole."""
        check(completion)
        start, ids = len(self.tokens), completion.tokens.tolist()
        self._spans += [Span(span.version, start + span.start, start + span.end) for span in completion.spans]
        self._append("model", ids, completion.logprobs.tolist())
        if completion.routes is not None:
            self._add_routes(completion.routes)
        ended = completion.stop is StopReason.STOP
        text = tokenizer.transcribe(ids[:-1] if ended else ids)
        self.said.append(Said("model", text))
        return text

    def finished(self, stop: StopReason, reward: float, parts: Mapping[str, float]) -> Episode:
        """The episode, scored."""
        return self._episode(stop, reward=reward, parts=dict(parts), routes=self._all_routes())

    def broken(self, stop: StopReason, fault: ContraflowError) -> Episode:
        """The episode as far as it got, never to be trained."""
        return self._episode(stop, reward=0.0, error=str(fault) or type(fault).__name__)

    def unfinished(self) -> Episode:
        """The episode as far as it got, here or elsewhere, to go on from: ABORTED, with the routes there are."""
        if self._left is not None and len(self._left.tokens) > len(self.tokens):
            return self._left
        return self._episode(StopReason.ABORTED, reward=0.0, error="not finished", routes=self._all_routes())

    def _append(self, role: Literal["prompt", "model", "env"], ids: list[int], logprobs: list[float]) -> None:
        start = len(self.tokens)
        self.tokens += ids
        self._trained += [role == "model"] * len(ids)
        self._logprobs += logprobs
        self._turns.append(Turn(role, start, len(self.tokens)))

    def _add_routes(self, routes_LMK: Routes) -> None:
        if len(routes_LMK) != len(self.tokens) - 1:
            raise EngineError(
                f"routes of {len(routes_LMK)} tokens for a sequence of {len(self.tokens)}; one fewer is due"
            )
        known = sum(len(rows) for rows in self._routes)
        self._routes.append(routes_LMK[known:])

    def _all_routes(self) -> Routes | None:
        return np.concatenate(self._routes) if self._routes else None

    def _episode(self, stop: StopReason, **rest: Any) -> Episode:
        return Episode(
            seed=self.seed,
            tokens=np.array(self.tokens, np.int32),
            trained=np.array(self._trained, np.bool_),
            logprobs=np.array(self._logprobs, np.float32),
            spans=tuple(self._spans),
            turns=tuple(self._turns),
            stop=stop,
            **rest,
        )


def check(completion: Completion) -> None:
    """Raise EngineError unless it is whole. Engines may be other programs, and what they answer is trained on."""
    count = len(completion.tokens)
    if len(completion.logprobs) != count or not np.isfinite(completion.logprobs).all():
        raise EngineError(f"{count} tokens came with log-probabilities {completion.logprobs.tolist()}")
    ends = [0, *(span.end for span in completion.spans)]
    if [span.start for span in completion.spans] != ends[:-1] or ends[-1] != count:
        raise EngineError(f"{count} tokens came with version spans {completion.spans}, which do not cover them")


def joined(first: Completion, rest: Completion) -> Completion:
    """Two parts of one turn as one. Experts of what the first part was fed stay those that it was sampled with.

    Raises EngineError when `rest` is not whole.
    """
    check(rest)
    shift = len(first.tokens)
    spans = list(first.spans)
    for span in rest.spans:
        start = shift + span.start
        if spans and spans[-1].version == span.version:
            start = spans.pop().start
        spans.append(Span(span.version, start, shift + span.end))
    routes = rest.routes
    if first.routes is not None and routes is not None:
        routes = np.concatenate([first.routes, routes[len(first.routes) :]])
    return msgspec.structs.replace(
        rest,
        tokens=np.concatenate([first.tokens, rest.tokens]),
        logprobs=np.concatenate([first.logprobs, rest.logprobs]),
        spans=tuple(spans),
        cache="recomputed",
        routes=routes,
    )
