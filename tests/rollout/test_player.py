"""A process that plays episodes is started once, whoever gives up waiting for it, and again only when it is gone."""

import asyncio
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from contraflow.errors import TaskError
from contraflow.rollout.desk import Ended, Session
from contraflow.rollout.player import Player
from contraflow.types import Task

# Says that it has begun, and is ready once it is let; then every episode is worth the id of this process.
PROGRAM = """
import json, os, sys
hello = json.loads(sys.stdin.readline())
open(hello["begun"], "w").write("begun")
open(hello["let"]).read()
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    line = json.loads(line)
    if "play" in line:
        print(json.dumps({"key": line["play"], "reward": os.getpid()}), flush=True)
"""


@pytest.fixture
def pipes(tmp_path):
    for name in ("begun", "let"):
        os.mkfifo(tmp_path / name)
    return {name: str(tmp_path / name) for name in ("begun", "let")}


def session_of(key):
    return Session(key, Task(key="train/0", prompt="", reference=""), temperature=1.0, counts=Counter())


async def played(player, key):
    session = session_of(key)
    async with player.seat(session, url="http://nowhere"):
        return await session.next()


def test_an_episode_given_up_while_the_player_starts_leaves_the_start_to_the_next(pipes):
    async def main():
        player = Player((sys.executable, "-S", "-c", PROGRAM), pipes, os.environ)
        async with asyncio.timeout(60):
            hurried = asyncio.create_task(played(player, "a"))
            await asyncio.to_thread(Path(pipes["begun"]).read_text)
            hurried.cancel()
            await asyncio.wait([hurried])
            patient = [asyncio.create_task(played(player, key)) for key in "bc"]
            await asyncio.to_thread(Path(pipes["let"]).write_text, "go")
            ended = await asyncio.gather(*patient)
            await player.close()
            return hurried.cancelled(), ended

    given_up, (b, c) = asyncio.run(main())
    assert given_up
    assert b == c
    assert isinstance(b, Ended)
    assert b.reward


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("/no/such/program",), "'/no/such/program' does not start"),
        ((sys.executable, "-S", "-c", "import sys; sys.exit('out of luck')"), "exit code 1: out of luck"),
    ],
)
def test_a_player_that_does_not_come_up_says_why_and_is_tried_again(command, says):
    async def main():
        player = Player(command, {}, os.environ)
        async with asyncio.timeout(60):
            for key in "ab":
                with pytest.raises(TaskError, match=says):
                    await played(player, key)
            await player.close()

    asyncio.run(main())
