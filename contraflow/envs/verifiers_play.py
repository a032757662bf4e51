"""The process that plays a worker's episodes with the `verifiers` package: `python -m contraflow.envs.verifiers_play`.

Takes lines of JSON on standard input: options and endpoint first, then episodes to play or to drop, and pings. Answers
on standard output with rewards, faults and pongs; what the package prints goes to standard error. Ends when its input
does. A hook that blocks blocks all of it: then pings go unanswered, and whoever started it kills it.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from contraflow.envs.options import read_options
from contraflow.envs.verifiers import VerifiersOptions, open_world
from contraflow.envs.verifiers_package import Playing

_LONGEST_FAULT = 1000  # characters

Say = Callable[[dict[str, Any]], None]


async def serve(lines: asyncio.StreamReader, say: Say) -> None:
    """Play until `lines` end. Raises: ConfigError for options that are refused."""
    hello = json.loads(await lines.readline())
    world = open_world(read_options(VerifiersOptions, hello["options"]), deadline_s=hello["deadline_s"])
    async with world.serving(hello["url"]) as playing, asyncio.TaskGroup() as group:
        say({"ready": True})
        episodes: dict[str, asyncio.Task[None]] = {}
        while line := await lines.readline():
            match json.loads(line):
                case {"play": key, "facts": facts}:
                    episodes[key] = group.create_task(_play(playing, key, facts, say))
                case {"drop": key}:
                    if episode := episodes.pop(key, None):
                        episode.cancel()
                case {"ping": number}:
                    say({"pong": number})
        for episode in episodes.values():
            episode.cancel()


async def _play(playing: Playing, key: str, facts: dict[str, str], say: Say) -> None:
    try:
        reward = await playing.play(int(facts["row"]), facts["hash"], key=key)
    except Exception as fault:  # noqa: BLE001 - whatever an environment raises costs its episode, and is told
        say({"key": key, "fault": f"{type(fault).__name__}: {fault}"[:_LONGEST_FAULT]})
    else:
        say({"key": key, "reward": reward})


async def _main(told: int) -> None:
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    await serve(lines, lambda line: _write(told, line))


def _write(told: int, line: dict[str, Any]) -> None:
    left = json.dumps(line).encode() + b"\n"
    while left:
        left = left[os.write(told, left) :]


if __name__ == "__main__":
    own = os.dup(1)
    os.dup2(2, 1)  # what the package's environments print is not an answer
    asyncio.run(_main(own))
