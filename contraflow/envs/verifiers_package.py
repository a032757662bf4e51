"""The one file that speaks to the `verifiers` package, 0.4 or newer: its tasks, and episodes by its own environments.

Takes options, gives tasks as text and hash; plays an episode against a session of ours and gives the task's own reward.
What needs more than one conversation of text (tools, containers, several agents) is a `ConfigError` that names it.
"""

import math
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import verifiers.v1 as vf

from contraflow.errors import ConfigError, TaskError

if TYPE_CHECKING:
    from contraflow.envs.verifiers import VerifiersOptions

__all__ = ["ChatHarness"]

_HARNESS = "contraflow_chat"
sys.modules[_HARNESS] = sys.modules[__name__]  # the package finds a harness by the name of a top-level module only
_UNHEARD = ("setup_timeout", "finalize_timeout", "scoring_timeout")  # stops of a trace that leave it without a score


class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc] # the package is an extra: unknown to the checker
    """Asks for one turn of the model per segment, in this process: the package's own start a program for each.

    The session of ours is named by the model (`policy/KEY`), so one client serves all episodes.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        """One turn. A spent budget stops the conversation, which is scored as it stands; other refusals break it."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message.model_dump(exclude_none=True) for message in prompt or []]
        # No deadline here: whoever plays the session has one, and drops the episode.
        async with httpx.AsyncClient(timeout=None, verify=False) as client:
            answer = await client.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )
        if answer.status_code == httpx.codes.OK:
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")
        if "budget_spent" in answer.text:
            trace.stop("max_total_tokens")
        return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text)


class World:
    """One environment of the package. `asked` is what each of its tasks asks, as text."""

    def __init__(self, options: "VerifiersOptions", *, deadline_s: float | None) -> None:
        """Raises: ConfigError."""
        self._name = options.taskset
        try:
            self._env = vf.load_environment(vf.resolve_env_config(_config(options, deadline_s)))
            _check_played(self._env, options.taskset)
            self._tasks = list(self._env.taskset.take(options.listed))
        except ConfigError:
            raise
        except Exception as fault:
            raise ConfigError(
                f"env.options.taskset = {options.taskset!r}: {type(fault).__name__}: {fault}{_hint(options.taskset)}"
            ) from fault
        self.asked = [_asked(task.data) for task in self._tasks]

    def hash(self, row: int) -> str:
        """Of all that a task holds."""
        return str(self._tasks[row].hash)

    @asynccontextmanager
    async def serving(self, url: str) -> AsyncIterator["Playing"]:
        """Ready to play against the endpoint at `url`."""
        client = vf.EvalClientConfig(base_url=f"{url}/v1", api_key_var="")
        async with self._env.serving():
            yield Playing(self._env, self._tasks, client, self._name)


class Playing:
    """Plays episodes, as many at once as are asked for."""

    def __init__(self, env: Any, tasks: list[Any], client: Any, name: str) -> None:
        self._env, self._tasks, self._client, self._name = env, tasks, client, name

    async def play(self, row: int, digest: str, *, key: str) -> float:
        """The weighted sum of the task's own rewards for an episode with the session `key`.

        Raises: TaskError when the task is not the one that was posed, when it broke, or when it has no finite score.
        """
        task = self._tasks[row] if row < len(self._tasks) else None
        if task is None or task.hash != digest:
            raise TaskError(
                f"{self._name}: task {row} is not what it was when it was posed; its taskset has to be stable"
            )
        context = vf.ModelContext(model=f"policy/{key}", client=self._client)
        return _reward(await self._env.run_episode(task, context), self._name)


def _reward(episode: Any, name: str) -> float:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        told = f"{errors[-1].type}: {errors[-1].message}" if errors else "it says not why"
        raise TaskError(f"{name}: the episode broke: {told}")
    if len(episode.traces) != 1:
        raise TaskError(f"{name}: {len(episode.traces)} conversations in one episode; one can be trained")
    [trace] = episode.traces
    if trace.stop_condition in _UNHEARD:
        raise TaskError(f"{name}: {trace.stop_condition}: a hook of the task took longer than env.step_deadline_s")
    if not trace.rewards:
        raise TaskError(f"{name}: the task has no reward of its own")
    if not math.isfinite(trace.reward):
        raise TaskError(f"{name}: the task's rewards sum to {trace.reward}")
    return float(trace.reward)


def _config(options: "VerifiersOptions", deadline_s: float | None) -> dict[str, Any]:
    """What the package reads as its `[env]`. Raises: ConfigError for more than one agent, or another harness."""
    kind = vf.env_config_type(options.taskset, options.env)
    seats = [name for name, field in kind.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
    if len(seats) != 1:
        raise ConfigError(
            f"env.options.env = {options.env!r} lets {len(seats)} agents speak ({', '.join(seats)}); an episode is the"
            " conversation of one, so use an environment of one agent"
        )
    [seat] = seats
    given = options.env_options.get(seat, {})
    if "harness" in given or "runtime" in given:
        raise ConfigError(
            f"env.options.env_options.{seat}: no harness or runtime can be chosen: the model is asked in place; for a"
            " program of your own use env.name = 'harness'"
        )
    hooks = dict.fromkeys(("setup", "finalize", "scoring"), deadline_s)
    agent = {"harness": {"id": _HARNESS}, "runtime": {"type": "subprocess"}, "timeout": hooks} | given
    return options.env_options | {
        "id": options.env,
        "taskset": options.options | {"id": options.taskset},
        seat: agent,
    }


def _check_played(env: Any, name: str) -> None:
    """Raises: ConfigError for what the session endpoint cannot give."""
    taskset = env.taskset
    kind = type(taskset).task_type()
    if taskset.toolsets(taskset.config) or kind.toolsets(taskset.config.task):
        raise ConfigError(
            f"env.options.taskset = {name!r} serves tools (toolsets), which are not supported: to the endpoint a call"
            " is text; use a taskset without tools, or one whose environment reads calls from the text"
        )
    if kind.NEEDS_CONTAINER:
        raise ConfigError(f"env.options.taskset = {name!r} needs a container (NEEDS_CONTAINER), which is not supported")


def _hint(name: str) -> str:
    """For packages written for the interface that 0.4 has no more."""
    module = sys.modules.get(name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower())
    if module is None or not hasattr(module, "load_environment"):
        return ""
    return (
        "; it has load_environment(), the interface of verifiers before 0.4: get a version of it with a Taskset, or let"
        " it play as a program by env.name = 'harness'"
    )


def _asked(data: Any) -> str:
    """What tells one question from another, as text: the system's and the user's words, or all that the task holds."""
    told = "\n".join(text for text in (data.system_prompt, data.prompt_text) if text)
    return told or str(data.model_dump_json(exclude={"idx"}, exclude_defaults=True))
