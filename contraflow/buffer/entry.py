"""A group with a ticket as the store knows it, and what is asked of one. Plain data and pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass

from contraflow.buffer.salvage import Kept
from contraflow.types import Episode, Group


@dataclass(slots=True)
class Entry:
    """A group with a ticket. Until `payload` is there, `oldest` is a version that no token of it can be older than, and
    `newest` one that an engine must not lag behind to start it. `left`: an attempt before, with what it has left to go
    on from.
    """

    group: int
    attempt: int
    oldest: int
    newest: int
    payload: Group | Kept | None = None
    left: "Entry | None" = None


def entry_of(kept: Kept) -> Entry:
    """A group whose payload a restart found."""
    return Entry(kept.group, kept.attempt, kept.oldest, kept.newest, kept)


def equal_rewards(episodes: Sequence[Episode]) -> bool:
    """Whether there is nothing to be learned from comparing them."""
    return len({episode.reward for episode in episodes}) <= 1


def listed(groups: Sequence[int]) -> str:
    """Up to twenty ids, lowest first."""
    shown = ", ".join(map(str, sorted(groups)[:20])) or "none"
    return shown if len(groups) <= 20 else f"{shown} and {len(groups) - 20} more"
