"""What a worker's groups came to: counted, and an end to it once nothing whole comes any more.

Takes groups that were put into the buffer, gives totals. Raises what broke them when many in a row were broken.
"""

from collections import Counter

from contraflow.errors import EngineError, RewardError, TaskError
from contraflow.rollout.report import count_stops
from contraflow.types import Group, StopReason

MOST_BARREN = 64  # groups in a row without one whole episode; then something is broken for good, and says so


class Harvest:
    """Totals of episodes in training groups since the worker began."""

    def __init__(self) -> None:
        self.groups = 0
        self.stops: Counter[str] = Counter()
        self._barren = 0

    def add(self, group: Group) -> None:
        """A group was delivered. Raises the TaskError, RewardError or EngineError that kept every episode of the last
        `MOST_BARREN` groups from being whole."""
        self.groups += 1
        self.stops.update(count_stops(group.episodes))
        whole = any(not episode.failed for episode in group.episodes)
        self._barren = 0 if whole else self._barren + 1
        if self._barren >= MOST_BARREN:
            last = group.episodes[-1]
            kinds = {StopReason.ENV_ERROR: TaskError, StopReason.REWARD_ERROR: RewardError}
            raise kinds.get(last.stop, EngineError)(
                f"{self._barren} groups in a row had not one whole episode; the last failed with: {last.error}"
            )
