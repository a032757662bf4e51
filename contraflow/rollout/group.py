"""The episodes of one group: begun or gone on with, all at once, and broken off with what they have when it is to move.

Takes a ticket, what episodes are played with and what an earlier attempt left; gives the group once all have ended.
Cancelling ends the episodes. Does not know the buffer, or what becomes of a group that did not end in time.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress

from contraflow.errors import EngineError, TaskError
from contraflow.rollout.draft import Draft
from contraflow.rollout.engine import Engine
from contraflow.rollout.episode import Stage, broken_episode, play
from contraflow.rollout.handover import is_open, sampled
from contraflow.rollout.shift import Shift
from contraflow.types import Episode, Group, Task, Ticket

HALT_S = 5.0  # for engines to give back what they have


async def play_group(
    ticket: Ticket,
    stage: Stage,
    shift: Shift,
    *,
    seeds: Sequence[int],
    left: Group | None,
    told: Callable[[str, Task], AbstractContextManager[None]],
) -> Group:
    """Play an episode for each of `seeds`, going on from those of `left` that have the same.

    `told` is entered with the group's key and task while they are played. Whatever breaks is told in the episodes.
    """
    key = f"{ticket.line}.{ticket.group}.{ticket.attempt}"
    try:
        task = await stage.guard.task("train", ticket.group)
    except TaskError as fault:
        task = Task(key=f"train/{ticket.group}", prompt="", reference="")
        return Group(ticket=ticket, task=task, episodes=tuple(broken_episode(seed, fault) for seed in seeds))
    shift.task = task
    known = {} if left is None else {episode.seed: episode for episode in left.episodes}
    with told(key, task):
        async with asyncio.TaskGroup() as tasks:
            for place, seed in enumerate(seeds):
                draft, before = Draft(seed, known.get(seed)), known.get(seed)
                if before is None or is_open(before):
                    playing = tasks.create_task(play(task, stage, draft, key=f"{key}/{place}", group=key))
                    shift.places.append((draft, playing))
                else:
                    draft.recalled = sampled(before)
                    shift.places.append((draft, _done(before)))
            await _ended(shift, stage.engine)
    return Group(ticket=ticket, task=task, episodes=tuple(playing.result() for _, playing in shift.places))


async def _ended(shift: Shift, engine: Engine) -> None:
    playing = [each for _, each in shift.places]
    try:
        await asyncio.wait(playing)
    except asyncio.CancelledError:
        asked = shift.halt() if shift.moves else {}
        if asked:  # the others wait for environment or reward, and go on from their last turn
            with suppress(TimeoutError, EngineError):  # a late or closed engine gives nothing back
                async with asyncio.timeout(HALT_S):
                    await engine.abort(list(asked))
                    await asyncio.wait(asked.values())
        raise


def _done(episode: Episode) -> asyncio.Future[Episode]:
    future = asyncio.get_running_loop().create_future()
    future.set_result(episode)
    return future
