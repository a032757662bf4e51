"""The life of a sample: one frozen type per stage, and the type changes when the thing changes hands.

    Task -> Completion -> Episode -> Group -> Sample -> Batch -> Manifest

Shape letters: L tokens of one episode (prompt included), N new tokens of one completion, T packed tokens of a batch,
S sequences in a batch, M MoE layers, K experts per token. Arrays are numpy; ids are int32, log-probabilities fp32.
Everything here is a msgspec struct, so it is also the wire format between workers.
"""

from enum import StrEnum
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]
Routes = npt.NDArray[Any]  # uint8 up to 256 experts, uint16 above


class Version(msgspec.Struct, frozen=True, order=True):
    """One set of policy weights: `n` counts published steps on history `line`. `Version(1, 12)` prints as `1.12`."""

    line: int
    n: int

    def __str__(self) -> str:
        return f"{self.line}.{self.n}"


class StopReason(StrEnum):
    """Why an episode or a completion ended."""

    STOP = "stop"  # the model gave a stop token, or the environment said done
    LENGTH = "length"  # the token or turn budget ran out
    ABORTED = "aborted"  # somebody asked for it
    ENV_ERROR = "env_error"  # the environment raised, gave nonsense or did not answer
    REWARD_ERROR = "reward_error"  # the reward raised or was not finite
    ENGINE_ERROR = "engine_error"  # the engine refused or failed


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt with what is needed to judge its answers. Made by an environment, a pure function of (split, index).

    >>> Task(key="train/17", prompt="12+34=", reference="46")
    """

    key: str
    prompt: str
    reference: str  # an answer that the grader must give full marks
    facts: dict[str, str] = {}  # whatever else the grader or the environment needs


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """The right to start one group. `group` is also the index of the task in the train split: one task, one group."""

    group: int
    attempt: int  # 1, 2, ... ; a group that was lost is posed again with the same seeds
    line: int


class Span(msgspec.Struct, frozen=True):
    """Tokens `[start, end)` were sampled by `version`."""

    version: Version
    start: int
    end: int


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is asked for. `group` lets requests that share a prompt share its prefill."""

    id: str
    prompt: Int32  # [Lp]
    seed: int  # sampling noise is a function of (seed, position) and of nothing else
    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy; log-probabilities are then those of temperature 1
    stop_tokens: tuple[int, ...] = ()
    group: str = ""
    want_routes: bool = False
    done: int = 0  # the last so many tokens of `prompt` were sampled earlier for the same request: it goes on from them


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine answers: N new tokens, the stop token included."""

    tokens: Int32  # [N]
    logprobs: Float32  # [N], of the temperature-scaled full softmax
    spans: tuple[Span, ...]  # cover [0, N) in order
    stop: StopReason
    cache: Literal["kept", "recomputed", "unbroken"] = (
        "unbroken"  # what a refresh in mid-generation did to the KV cache
    )
    routes: Routes | None = None  # [Lp + N - 1, M, K]: the last token is never fed; of an ABORTED one where to be had


class Turn(msgspec.Struct, frozen=True):
    """Tokens `[start, end)` of an episode came from `role`."""

    role: Literal["prompt", "model", "env"]
    start: int
    end: int


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a task: all tokens in order, who wrote them, and what they earned."""

    seed: int
    tokens: Int32  # [L]
    trained: Bool  # [L], True where the model sampled the token
    logprobs: Float32  # [L], behaviour log-probability of tokens[i] given tokens[:i]; 0 where not trained
    spans: tuple[Span, ...]  # versions of the trained tokens, positions in [0, L)
    turns: tuple[Turn, ...]
    stop: StopReason
    reward: float  # weighted sum of the parts
    parts: dict[str, float] = {}
    error: str = ""  # set when stop is ABORTED or one of the *_ERROR reasons; such an episode is never trained
    routes: Routes | None = None  # [L - 1, M, K]

    @property
    def failed(self) -> bool:
        return bool(self.error)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """G episodes of one task: the unit that is admitted, kept, trained and counted."""

    ticket: Ticket
    task: Task
    episodes: tuple[Episode, ...]

    @property
    def oldest(self) -> Version | None:
        """Version of the oldest trained token; None when no episode can be trained."""
        versions = [s.version for e in self.episodes if not e.failed for s in e.spans]
        return min(versions, default=None)


class Chosen(msgspec.Struct, frozen=True):
    """A group the window lets a step train; tokens of versions below `floor` are masked (policy `mask`)."""

    group: int
    attempt: int
    floor: Version


class Take(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of one step, oldest first."""

    step: int
    groups: tuple[Chosen, ...]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One episode as the trainer sees it: tokens with credit. `versions` is n per token, -1 where not trained.

    What a step's first look adds is None until then, or where nobody asks for it; it is 0 where not trained.
    """

    tokens: Int32  # [L]
    mask: Bool  # [L]
    behaviour: Float32  # [L]
    advantages: Float32  # [L]
    versions: Int32  # [L]
    routes: Routes | None = None  # [L - 1, M, K], experts of the fed tokens; None: the router chooses
    routed: Bool | None = None  # [L - 1], where they are known and shall be taken
    truncated: bool = False  # the budget ended it, not the model or the environment
    proximal: Float32 | None = None  # [L], log-probabilities of the policy at the step's start
    reference: Float32 | None = None  # [L], of the frozen reference
    values: Float32 | None = None  # [L], of the state before each trained token, by the critic at the step's start
    valued: int | None = None  # n of the version whose critic that was
    bootstrap: float = 0.0  # its value of the state after the last token, where the episode is truncated
    returns: Float32 | None = None  # [L], what those values should have been


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One packed micro-batch: S sequences laid end to end in T tokens, `starts` being `[S + 1]` offsets.

    `weights` `[T]` carries the share of each token in the update's loss, so that micro-batches add up exactly to one
    large batch.
    """

    tokens: Int32  # [T]
    positions: Int32  # [T], 0-based within each sequence
    starts: Int32  # [S + 1]
    mask: Bool  # [T]
    behaviour: Float32  # [T]
    advantages: Float32  # [T]
    weights: Float32  # [T]
    versions: Int32  # [T]
    routes: Routes | None = None  # [T - S, M, K], of the fed tokens: all but each sequence's last
    routed: Bool | None = None  # [T - S]
    proximal: Float32 | None = None  # [T], and so on: as in `Sample`, None unless every sample has it
    reference: Float32 | None = None
    values: Float32 | None = None
    returns: Float32 | None = None


class Tensor(msgspec.Struct, frozen=True):
    """Where one tensor lies in a version's bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32", "bfloat16", ...
    offset: int
    nbytes: int


class Probe(msgspec.Struct, frozen=True):
    """Prompts and the log-probabilities the trainer gives their tokens: an engine must give the same, or not serve.

    `prompts` are S token rows; `logprobs` row i has len(prompts[i]) - 1 entries, of token j+1 given tokens [0, j].
    """

    prompts: tuple[Int32, ...]
    logprobs: tuple[Float32, ...]
    tolerance: float  # largest absolute difference that still counts as equal


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What travels of a version in place of its bytes: the changes of its chunks, one after the other."""

    parent: Version  # whose bytes are changed
    seal: str  # digest of the parent's digests: bytes of anything else are not the parent
    lengths: tuple[int, ...]  # bytes of the change of each chunk; 0: it is as before
    digests: tuple[str, ...]  # of the changes, cut into pieces of `chunk_bytes` as a version is


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One published version: what it holds, where it lies, and how to prove that it arrived."""

    version: Version
    parent: Version | None
    model: str  # digest of the model's configuration
    carrier: str  # "memory" or "blob", or "delta-" and one of them
    location: str  # shared-memory name or blob key
    tensors: tuple[Tensor, ...]
    chunk_bytes: int
    digests: tuple[str, ...]  # one per chunk of the version's whole bytes, in order, however they travel
    probe: Probe
    wire: str = "same"  # precision in which the trainer's tokens travel to experts: an engine's may differ, and says so
    delta: Delta | None = None  # None: the version travels whole
