"""The generation seam: an engine turns requests into completions under one version of the weights at a time.

Takes token ids, gives token ids with what training needs: log-probability and version of each, experts if asked.
Knows no task, no reward and no algorithm. `native`, `scripted` and `served` stand behind it and
share one contract suite.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from contraflow.errors import EngineError
from contraflow.types import Completion, Probe, Request, Span, Version

if TYPE_CHECKING:
    from torch import Tensor


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine has done since it was made, and what it is doing. Counts are totals unless said otherwise."""

    version: Version | None  # served now
    tokens: int  # sampled
    fed_tokens: int  # prompt tokens computed, those computed again after a preemption or a refresh included
    shared_tokens: int = 0  # prompt tokens found in the KV cache instead
    steps: int
    running: int  # now: sequences that hold KV
    waiting: int  # now: sequences that do not
    kv_tokens: int = 0  # capacity; this and the next two are 0 where a cache is none, or another program's
    kv_tokens_held: int = 0  # now, in whole blocks
    preempted: int = 0
    swaps: int  # proven and served
    longest_stall_s: float  # of a swap, failed ones included
    seconds: dict[str, float]  # by cause; they sum to the time since the engine was made
    doing: str
    placed: int = 0  # times that experts were placed anew by their loads
    in_order: float = 0.0  # expert tokens of the busiest rank over the mean, mean over layers, had they never been
    imbalance: float = 0.0  # the same as it was before the last time
    promised: float = 0.0  # the same loads as experts have lain since
    forms: tuple[str, ...] = ()  # how tokens reach experts on other ranks: asked for, chosen, and why
    faults: dict[str, int] = {}  # failures of servers, by kind; none where there are no servers
    decoding: str = ""  # how decode passes run: in CUDA graphs or not and why, and whether one waits for the other


class Engine(Protocol):
    """Generates tokens. Methods are called from one event loop; computing never blocks that loop unless it must."""

    @property
    def version(self) -> Version | None:
        """The weights served; None until a first `swap`, and then nothing is generated."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Complete one prompt. Cancelling the call aborts the request.

        Generation ends with a stop token (kept as the last token), after `max_new_tokens`, or at the engine's context
        limit (both LENGTH). A request that goes on from `done` tokens gets, under the same version, what would have
        followed had it not been broken off (of a served engine: another draw). Raises EngineError: a prompt that
        doesn't fit, a value out of range, an id in use, no version served, an engine that is closed.
        """
        ...

    async def abort(self, ids: Sequence[str]) -> None:
        """End these requests now; their `generate` gives what there is, with StopReason.ABORTED. Unknown ids pass."""
        ...

    async def swap(self, version: Version, tensors: Mapping[str, "Tensor"], probe: Probe) -> float:
        """Serve new weights: between two steps they are copied in place, proven by `probe`, and served from then on.

        Gives the seconds in which no step could run. `tensors` must stay readable until a later swap has succeeded:
        they are what a failed one rolls back to. A cancelled call still ends with one or the other.

        Raises: CarrierError if a tensor is missing, surplus or misshapen (nothing is touched) or if the proof fails
        (what was served before is served again).
        """
        ...

    def report(self) -> EngineReport:
        """Counters and accounts, at any time, without waiting for the engine."""
        ...

    async def close(self) -> None:
        """Fail what is in flight with EngineError and stop. Safe to call twice."""
        ...


@runtime_checkable
class Remembers(Protocol):
    """An engine that keeps something of what it was asked, beyond the request: a prefix, the shape of a batch."""

    async def forget(self) -> None:
        """Compute from now on as if it had just been made with these weights. Raises: EngineError with requests in
        flight."""
        ...


def check_request(request: Request, *, context_tokens: int, vocab: int) -> None:
    """Raise EngineError if no engine with this context and vocabulary could answer the request."""
    what, prompt = f"request {request.id!r}", request.prompt
    if prompt.ndim != 1 or len(prompt) < 1:
        raise EngineError(f"{what}: a prompt of shape {list(prompt.shape)}; give at least one token, in one row")
    if len(prompt) >= context_tokens:
        raise EngineError(
            f"{what}: a prompt of {len(prompt)} tokens leaves no room in a context of {context_tokens}; "
            "shorten it or raise engine.context_tokens"
        )
    if prompt.min() < 0 or prompt.max() >= vocab:
        raise EngineError(
            f"{what}: token ids from {prompt.min()} to {prompt.max()}; the vocabulary is 0 to {vocab - 1}"
        )
    if not 0 <= request.done < len(prompt):
        raise EngineError(
            f"{what}: done = {request.done} of a prompt of {len(prompt)} tokens; it is from 0 to one less"
        )
    if request.max_new_tokens < 1:
        raise EngineError(f"{what}: max_new_tokens = {request.max_new_tokens}; ask for at least 1")
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        raise EngineError(f"{what}: temperature = {request.temperature}; it is 0 (greedy) or a positive number")


def spans_of(marks: Iterable[tuple[Version, int]], version: Version, tokens: int) -> tuple[Span, ...]:
    """Spans that cover `[0, tokens)`: `marks` are (version, end) in order, `version` sampled the rest.

    >>> spans_of([(Version(1, 4), 3)], Version(1, 5), 8)  # 1.4 sampled [0, 3), 1.5 sampled [3, 8)
    """
    spans: list[Span] = []
    start = 0
    for sampler, end in (*marks, (version, tokens)):
        if end > start:
            spans.append(Span(sampler, start, end))
            start = end
    return tuple(spans)
