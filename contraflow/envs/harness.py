"""Tasks that an outside program plays: an agent harness that speaks to an OpenAI-style endpoint.

Takes a command line to start per episode, or none: then programs that run already fetch episodes. Poses tasks: those of
another environment, or mere numbers that the program makes its own tasks from. How a program is started, heard and
answered is rollout/harness.py; here is what it plays.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import Field, model_validator

from contraflow.envs.base import Env, Observation, Session, Split
from contraflow.envs.options import Options
from contraflow.types import Task

LOCAL = ("127.0.0.1", "localhost", "::1")


class HarnessOptions(Options):
    """Who plays, what, and who says what it was worth."""

    command: tuple[str, ...] = ()  # words of a command line, started once per episode; no shell reads them
    tasks: Annotated[
        dict[str, Any], Field(default_factory=dict)
    ]  # `name` and `options` of the environment whose tasks are played; empty: numbers only
    reward: Literal["harness", "recipe"] = "harness"  # reported by the program, or by the recipe's reward parts
    edited: Literal["refuse", "branch"] = "refuse"  # a request that changes what was said: refused, or answered aside
    host: str = "127.0.0.1"  # where each worker listens
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0: a free one, told in RUN/sessions-WORKER.url
    key_env: str = ""  # name of the variable with the key that fetches episodes; needed beyond this host
    max_request_bytes: Annotated[int, Field(ge=1024)] = 8 << 20  # a larger request is refused

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.reward == "recipe" and not self.tasks:
            raise ValueError("reward = 'recipe' needs tasks: a mere number has no reference to judge by")
        if self.tasks and (not isinstance(self.tasks.get("name"), str) or self.tasks.keys() - {"name", "options"}):
            raise ValueError(f"tasks = {self.tasks}: write {{ name = 'arithmetic', options = {{}} }}")
        if self.host not in LOCAL and not self.key_env:
            raise ValueError(f"host = {self.host!r} listens to other machines; name a key for them in key_env")
        if "\0" in "".join(self.command) or self.command[:1] == ("",):
            raise ValueError(f"command = {list(self.command)}: no program has an empty name, and no word a zero byte")
        return self


class Harness:
    """The environment. Stateless. `options` are for whoever starts and hears the program."""

    name = "harness"

    def __init__(self, options: HarnessOptions, make: Callable[[str, Mapping[str, Any]], Env]) -> None:
        """`make` makes the environment whose tasks are played."""
        self.options = options
        self._tasks = make(options.tasks["name"], options.tasks.get("options", {})) if options.tasks else None
        self.bounded = self._tasks is None or self._tasks.bounded

    def task(self, split: Split, index: int) -> Task:
        """The other environment's task; or one without a prompt, of which the program knows `split` and `index`."""
        task = Task(key=f"{split}/{index}", prompt="", reference="")
        if self._tasks is not None:
            task = self._tasks.task(split, index)
        facts = {**task.facts, "split": split, "index": str(index)}
        if self.options.reward == "harness":
            facts["scored"] = "env"
        return msgspec.structs.replace(task, facts=facts)

    def open(self, task: Task) -> Session:
        """What an episode is without the program, for the check before a run: the reference is right."""
        return Reference(task)


class Reference:
    """A session that says 1 to the reference and 0 to all else."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def step(self, action: str) -> Observation:
        return Observation("1" if action == self._task.reference else "0", done=True)
