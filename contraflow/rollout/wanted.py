"""Whether a task is worth sampling: made before its group starts, so that the buffer can hear what kind it is.

Takes a ticket, who makes tasks, and the buffer; gives yes or no. Plays nothing.
"""

from contraflow.buffer.service import Buffer
from contraflow.errors import TaskError
from contraflow.rollout.episode import Stage
from contraflow.runtime.base import Ref
from contraflow.types import Ticket


async def is_wanted(ticket: Ticket, stage: Stage, buffer: Ref[Buffer], *, deadline_s: float) -> bool:
    """Ask the buffer, which has dropped the group if this is False. A task that cannot be made is for who plays it.

    Raises TaskError for a task without the fact `stage.kind_by`.
    """
    by = stage.kind_by
    if not by:
        return True
    try:
        task = await stage.guard.task("train", ticket.group)
    except TaskError:
        return True
    if by not in task.facts:
        known = ", ".join(sorted(task.facts)) or "none"
        raise TaskError(f"task {task.key!r} has no fact {by!r}, which buffer.curriculum.by names; it has: {known}")
    return await buffer.call(deadline_s, Buffer.wanted, ticket.group, ticket.attempt, task.facts[by])
