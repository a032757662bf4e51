"""What a rollout worker tells: about a group, about held-out tasks, about itself. Plain numbers that travel as JSON."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from contraflow.rollout.engine import EngineReport
from contraflow.types import Episode, Group, Ticket, Version


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A group that was put into the buffer; or one that was not begun, since the engine lags or the worker leaves
    (`lagging`), so that its ticket is good for another; or one that was given up (`given_up` says why); or one that the
    buffer poses again, to go on from what is there of it (`handed_back`).
    """

    ticket: Ticket
    lagging: bool = False
    given_up: str = ""  # "drained", "deadline", or what was wrong with what an earlier attempt had left
    handed_back: bool = False
    continued: int = 0  # episodes that an earlier attempt had finished or begun, and this one took over
    saved: int = 0  # sampled tokens of these that were not sampled again
    cut: int = 0  # episodes that were not finished by the group's deadline
    lengths: tuple[int, ...] = ()  # sampled tokens of each episode that did not fail
    episodes: int = 0
    failed: int = 0
    reward: float = 0.0  # mean over episodes that did not fail
    tokens: int = 0  # sampled
    stops: dict[str, int] = {}  # episodes by StopReason


class Drained(msgspec.Struct, frozen=True):
    """What became of the groups that a worker held when it was told to leave."""

    finished: int
    handed_back: int  # whatever was not, begun or not


class EvalReport(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out tasks, answered `samples` times each by one version. A failed episode counts as a wrong answer."""

    version: Version
    first: int
    count: int  # of tasks
    failed: int  # of episodes
    accuracy: float  # mean of the part `correct`
    reward: float  # mean over all tasks, as are the parts
    parts: dict[str, float]
    samples: int = 1
    temperature: float = 0.0  # 0 is greedy
    passed: dict[int, float] = {}  # pass@k by k
    intervals: dict[str, tuple[float, float]] = {}  # of reward, parts and pass@k: 95 %, bootstrap over tasks


class RolloutReport(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout worker now. Totals are of episodes in training groups since the worker began."""

    doing: str
    seconds: dict[str, float]  # of the worker's event loop, by cause; the engine's own are in `engine`
    engine: EngineReport
    groups: int
    stops: dict[str, int]  # episodes by StopReason
    lost_threads: int  # in calls of an environment or reward that have not returned
    sessions: dict[str, int] = {}  # of outside programs, by what became of them and of their requests


def summarise(group: Group) -> GroupSummary:
    """The summary of a group that is complete."""
    whole = [episode for episode in group.episodes if not episode.failed]
    return GroupSummary(
        ticket=group.ticket,
        episodes=len(group.episodes),
        failed=len(group.episodes) - len(whole),
        reward=_mean([episode.reward for episode in whole]),
        lengths=tuple(int(episode.trained.sum()) for episode in whole),
        tokens=sum(int(episode.trained.sum()) for episode in group.episodes),
        stops=count_stops(group.episodes),
    )


def count_stops(episodes: Sequence[Episode]) -> dict[str, int]:
    """Episodes by why they ended."""
    return dict(Counter(str(episode.stop) for episode in episodes))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
