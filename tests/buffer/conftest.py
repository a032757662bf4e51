"""Groups made from the versions and rewards a test is about; everything else about them is the least there can be."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from contraflow.types import Episode, Group, Span, StopReason, Task, Ticket, Version

MakeGroup = Callable[..., Group]


def _episode(line: int, versions: Sequence[int], reward: float, error: str) -> Episode:
    """One token by each of `versions`."""
    count = len(versions)
    return Episode(
        seed=0,
        tokens=np.zeros(1 + count, np.int32),
        trained=np.arange(1 + count) >= 1,
        logprobs=np.zeros(1 + count, np.float32),
        spans=tuple(Span(Version(line, n), 1 + i, 2 + i) for i, n in enumerate(versions)),
        turns=(),
        stop=StopReason.ENV_ERROR if error else StopReason.STOP,
        reward=reward,
        error=error,
    )


@pytest.fixture(scope="session")
def make_group() -> MakeGroup:
    """A group for a ticket: episode i earned `rewards[i]`, failed with `errors[i]`, has a token by each version."""

    def make(
        ticket: Ticket,
        versions: Sequence[int] = (0,),
        *,
        rewards: Sequence[float] = (0.0, 1.0),
        errors: Sequence[str] = ("", ""),
        line: int | None = None,
    ) -> Group:
        line = ticket.line if line is None else line
        episodes = [_episode(line, versions, *each) for each in zip(rewards, errors, strict=True)]
        return Group(
            ticket=ticket, task=Task(key=f"train/{ticket.group}", prompt="", reference=""), episodes=tuple(episodes)
        )

    return make
