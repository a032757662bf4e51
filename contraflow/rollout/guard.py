"""Asks an environment and its rewards, and believes nothing: every answer is checked, every wait has a deadline.

Takes an `Env` and a `Mix`, gives well-formed tasks, observations and scores, or a `TaskError` or `RewardError`.
"""

from typing import Any

import msgspec

from contraflow.envs.base import Env, Observation, Session, Split
from contraflow.errors import RewardError, TaskError
from contraflow.rewards.base import Transcript
from contraflow.rewards.mix import Mix
from contraflow.rollout.foreign import Foreign
from contraflow.types import Task

_CHARS_PER_TOKEN = 32  # longer observations than this per token of context are taken for nonsense


class Guard:
    """One environment and one mix, asked under the deadline of `foreign`. Safe to use for many episodes at once."""

    def __init__(self, env: Env, mix: Mix, foreign: Foreign, *, judging: Foreign, max_chars: int) -> None:
        """`judging` asks the rewards; `max_chars`: an observation longer than this is taken for nonsense."""
        self._env = env
        self._mix = mix
        self._foreign = foreign
        self._judging = judging
        self._max_chars = max_chars

    @property
    def lost_threads(self) -> int:
        """Threads inside a call of the environment or a reward that was given up and has not returned."""
        return self._foreign.lost + (0 if self._judging is self._foreign else self._judging.lost)

    async def task(self, split: Split, index: int) -> Task:
        """Task `index` of a split. Raises TaskError when the environment raises, hangs or gives no task."""
        task = await self._ask(self._env.task, split, index, what="env.task")
        if not isinstance(task, Task):
            raise TaskError(f"env.task gave a {type(task).__name__}, not a Task")
        try:
            return msgspec.convert(
                msgspec.to_builtins(task), Task
            )  # foreign code may have put anything into its fields
        except (TypeError, msgspec.ValidationError) as fault:
            raise TaskError(f"env.task gave a task that cannot travel: {fault}") from fault

    async def open(self, task: Task) -> Session:
        """A session of `task`. Raises TaskError."""
        session: Session = await self._ask(self._env.open, task, what="env.open")
        if not callable(getattr(session, "step", None)):
            raise TaskError(f"env.open gave a {type(session).__name__}, which has no step")
        return session

    async def step(self, session: Session, action: str) -> Observation:
        """What the environment answers to `action`. Raises TaskError when there is no answer, or it is none."""
        answer = await self._ask(session.step, action, what="step")
        if not isinstance(answer, Observation):
            raise TaskError(f"step gave a {type(answer).__name__}, not an Observation")
        text: Any = answer.text
        done: Any = answer.done
        if not isinstance(text, str) or not isinstance(done, bool):
            raise TaskError(f"step gave an Observation of {type(text).__name__} and {type(done).__name__}")
        if len(text) > self._max_chars:
            raise TaskError(f"step gave {len(text)} characters; at most {self._max_chars} could be of use")
        return answer

    async def score(self, task: Task, transcript: Transcript) -> tuple[float, dict[str, float]]:
        """The reward and its parts. Raises RewardError when a part raises, hangs or gives no finite number."""
        mix = self._mix
        reward, parts = await self._judging.call(
            mix.score, task, transcript, what="the reward", fail=RewardError, quick=mix.bounded
        )
        return reward, parts

    def close(self) -> None:
        """Let idle threads end, and what the rewards keep running."""
        self._foreign.close()
        self._judging.close()
        self._mix.close()

    async def _ask(self, function: Any, *args: Any, what: str) -> Any:
        return await self._foreign.call(function, *args, what=what, fail=TaskError, quick=self._env.bounded)


def make_guard(env: Env, mix: Mix, *, deadline_s: float, context_tokens: int) -> Guard:
    """A guard for episodes of at most `context_tokens`, whose every wait ends after `deadline_s`; rewards that run
    programs have their own time on top, and as many calls at once as they can run."""
    foreign, slow = Foreign(deadline_s), mix.slow
    judging = foreign if slow is None else Foreign(deadline_s + slow.deadline_s, threads=slow.at_once)
    return Guard(env, mix, foreign, judging=judging, max_chars=_CHARS_PER_TOKEN * context_tokens)
