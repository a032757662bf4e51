"""What the leader of a spread engine says to its ranks, and they to it. See `gang.py` for when."""

from typing import TypeVar

import msgspec

from contraflow.errors import ChannelError, WorkerDied
from contraflow.rollout.engine import EngineReport
from contraflow.rollout.star import Star
from contraflow.types import Completion, Probe, Request, Version

T = TypeVar("T")


class Submit(msgspec.Struct, tag="submit", frozen=True):
    """`number` names the request in its outcome: ids may be used again."""

    number: int
    request: Request


class Abort(msgspec.Struct, tag="abort", frozen=True):
    id: str


class Step(msgspec.Struct, tag="step", frozen=True):
    """Carry out the orders, then step; answered by a `Reply`."""

    orders: tuple[Submit | Abort, ...]


class Swap(msgspec.Struct, tag="swap", frozen=True):
    """Take parts of a version from the process group, prove and serve them; answered by `Consent`s only."""

    version: Version
    probe: Probe


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """End; not answered."""


class Beat(msgspec.Struct, tag="beat", frozen=True):
    """A sign of life, answered by one."""


class Passes(msgspec.Struct, tag="passes", frozen=True):
    """What one rank has tokens for; from the leader, what any has."""

    prefill: bool
    decode: bool


class Consent(msgspec.Struct, tag="consent", frozen=True):
    """What is wrong on one rank, or nothing; from the leader, on any."""

    objection: str


class Ended(msgspec.Struct, tag="ended", frozen=True):
    """A request's completion, or why there is none."""

    number: int
    completion: Completion | None
    error: str = ""


class Reply(msgspec.Struct, tag="reply", frozen=True):
    """What came of a step."""

    ended: tuple[Ended, ...]
    report: EngineReport


class Broken(msgspec.Struct, tag="broken", frozen=True):
    """A rank's last words."""

    text: str


Order = Step | Swap | Stop | Beat | Passes | Consent
Said = Passes | Consent | Reply | Beat | Broken


def hear(star: Star, rank: int, kind: type[T]) -> T:
    """The next message of a follower. Raises as `Star.hear` does; WorkerDied also when it says that it failed."""
    said: Said = star.hear(rank, Said)
    if isinstance(said, Broken):
        raise WorkerDied(f"rank {rank}", f"it failed: {said.text}")
    if not isinstance(said, kind):
        raise ChannelError(f"rank {rank} said {type(said).__name__} where {kind.__name__} was due")
    return said
