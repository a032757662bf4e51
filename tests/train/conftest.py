"""Groups made from plain numbers: random but seeded, so a test says only what it is about."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from contraflow.types import Chosen, Episode, Group, Span, StopReason, Task, Ticket, Turn, Version

MakeEpisode = Callable[..., Episode]
MakeGroup = Callable[..., Group]


def _episode(
    length: int,
    *,
    prompt: int = 2,
    reward: float = 0.0,
    seed: int = 0,
    vocab: int = 32,
    versions: Sequence[int] = (0,),
    error: str = "",
) -> Episode:
    """`length` tokens, the first `prompt` of them given; the rest sampled by `versions` in equal shares."""
    rng = np.random.default_rng(seed)
    trained = np.arange(length) >= prompt
    cuts = np.linspace(min(prompt, length), length, len(versions) + 1).astype(int).tolist()
    return Episode(
        seed=seed,
        tokens=rng.integers(0, vocab, length, dtype=np.int32),
        trained=trained,
        logprobs=np.where(trained, -rng.random(length) * 4 - 0.1, 0).astype(np.float32),
        spans=tuple(Span(Version(1, n), a, b) for n, a, b in zip(versions, cuts[:-1], cuts[1:], strict=True)),
        turns=(Turn("prompt", 0, prompt), Turn("model", prompt, length)),
        stop=StopReason.STOP,
        reward=reward,
        parts={"correct": reward},
        error=error,
    )


def _group(episodes: Sequence[Episode], *, index: int = 0, attempt: int = 1) -> Group:
    ticket = Ticket(group=index, attempt=attempt, line=1)
    task = Task(key=f"train/{index}", prompt="1+1=", reference="2")
    return Group(ticket=ticket, task=task, episodes=tuple(episodes))


@pytest.fixture
def make_episode() -> MakeEpisode:
    return _episode


@pytest.fixture
def make_group() -> MakeGroup:
    return _group


@pytest.fixture
def choose() -> Callable[[Sequence[Group]], list[Chosen]]:
    """What the window says when nothing is too old."""
    return lambda groups: [Chosen(g.ticket.group, g.ticket.attempt, Version(0, 0)) for g in groups]
