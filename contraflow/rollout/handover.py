"""What of a group that a worker cannot finish another one goes on from. Pure decisions.

Takes the episodes of the group as far as they came, gives the part that is worth a move. Does not move it.

Prompt and environment have to be fed to the other engine in any case, so only sampled tokens count: moved, they are
fed at the price of prefill; begun anew, they are sampled again. What a move costs besides is a few tokens' time: that
is `rollout.continue_from` (bench/moving.py).
"""

from collections.abc import Sequence

from contraflow.errors import EngineError
from contraflow.rollout.episode import broken_episode
from contraflow.types import Episode, Group, StopReason, Task, Ticket

_ANEW = EngineError("to be played anew")


def sampled(episode: Episode) -> int:
    """Tokens that an engine made of it."""
    return int(episode.trained.sum())


def is_open(episode: Episode) -> bool:
    """Whether it is yet to be finished, by whoever gets it."""
    return episode.stop is StopReason.ABORTED


def worth_moving(episode: Episode, *, least: int) -> bool:
    """Whether to go on from it costs less than to play it anew: it is scored, or has at least `least` sampled tokens.

    Episodes that failed are moved with their group: they would fail again.
    """
    return not is_open(episode) or sampled(episode) >= least


def part_of(ticket: Ticket, task: Task, episodes: Sequence[Episode], *, least: int) -> Group | None:
    """The group with the episodes that are worth moving, the others blank; None if it is better played anew.

    `least` 0: nothing is ever moved.
    """
    if least == 0:
        return None
    kept = [each if worth_moving(each, least=least) else _blank(each) for each in episodes]
    if not any(sampled(each) for each in kept if is_open(each) or not each.failed):
        return None
    return Group(ticket=ticket, task=task, episodes=tuple(kept))


def _blank(episode: Episode) -> Episode:
    return broken_episode(episode.seed, _ANEW, StopReason.ABORTED)
