"""What an environment is: it poses tasks without end and answers what the model says about them.

`Env.task` is a pure function of (split, index); `Env.open` starts one episode; `Session.step` answers one model turn.
Knows text only: no tokens, no model, no reward.
"""

from collections.abc import Awaitable
from typing import Literal, Protocol

import msgspec

from contraflow.types import Task

Split = Literal["train", "test"]


class Observation(msgspec.Struct, frozen=True):
    """The environment's answer to one model turn. `text` is fed to the model unless `done` ends the episode."""

    text: str
    done: bool


class Session(Protocol):
    """One episode, from the environment's side. Never shared between episodes."""

    def step(self, action: str) -> Observation | Awaitable[Observation]:
        """Answer what the model wrote in one turn (its stop token left out).

        May be `async def`: then it runs on the event loop and must not block it. Either kind has to answer within
        `env.step_deadline_s`. Raising, or answering anything but an `Observation`, costs this episode and no other.
        """
        ...


class Env(Protocol):
    """A source of tasks and of sessions that play them."""

    @property
    def name(self) -> str: ...

    @property
    def bounded(self) -> bool:
        """True promises that `task`, `open` and `step` return in microseconds, so they may run on the event loop.

        When in doubt say False: every call then runs in a thread of its own, under the deadline.
        """
        ...

    def task(self, split: Split, index: int) -> Task:
        """Task number `index` (0, 1, 2, ... without end) of a split: the same on every call, in every process.

        No train task may pose a question of the test split, whatever the index.
        """
        ...

    def open(self, task: Task) -> Session: ...
